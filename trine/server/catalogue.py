"""Every answer that is a refusal: its status, OpenAI type, code, and fixed text.

A text has slots for numbers, field names and words that this package wrote; nothing of a file
path, an address, a repr or a traceback can get in. What other parts say (a template, the
engine) passes `plain`, which lets one short line of harmless text through or a fixed one.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any, NamedTuple

import msgspec

from trine.errors import EngineDead, Overloaded, RequestError, TrineError

log = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]


class Entry(NamedTuple):
    status: int
    type: str
    text: str


BAD, SERVER = "invalid_request_error", "server_error"

CATALOGUE: dict[str, Entry] = {
    # the door
    "bad_request": Entry(400, BAD, "the request is not valid HTTP/1.1, or not as this server takes it"),
    "unknown_url": Entry(404, BAD, "there is nothing at this address; /openapi.json lists what there is"),
    "wrong_method": Entry(404, BAD, "this address does not answer to this method; use {allowed}"),
    "wrong_host": Entry(421, BAD, "this server does not answer to that Host; --allowed-hosts adds a name"),
    "wrong_origin": Entry(
        403, BAD, "pages of that origin may not ask this server; --allowed-origins adds one"
    ),
    "missing_api_key": Entry(401, BAD, "no API key was given; send the header Authorization: Bearer KEY"),
    "invalid_api_key": Entry(401, BAD, "that API key is not one of this server's"),
    "headers_too_large": Entry(
        431, BAD, "the headers are too large: at most {bytes} bytes in {count} fields"
    ),
    "body_too_large": Entry(413, BAD, "the body is too large: at most {limit} bytes"),
    "wrong_content_type": Entry(415, BAD, "the body must be sent as Content-Type: application/json"),
    "wrong_content_encoding": Entry(415, BAD, "the body must be sent without Content-Encoding"),
    "invalid_request_id": Entry(400, BAD, "X-Request-Id must be 1 to 64 of A-Z a-z 0-9 _ -, and given once"),
    "slow_request": Entry(408, BAD, "the request took too long to arrive"),
    # the body
    "invalid_json": Entry(400, BAD, "the body is not valid JSON in UTF-8"),
    "duplicate_key": Entry(400, BAD, "a key stands twice in one object of the body"),
    "json_too_deep": Entry(400, BAD, "the body is nested too deep: at most {limit}"),
    "json_too_large": Entry(400, BAD, "the body holds too many values: at most {limit}"),
    "invalid_number": Entry(400, BAD, "a number of the body is not finite or has too many digits"),
    "invalid_text": Entry(400, BAD, "a text of the body holds half a surrogate pair"),
    "not_an_object": Entry(400, BAD, "the body must be a JSON object"),
    # its fields
    "unknown_field": Entry(400, BAD, "unknown field {field}"),
    "misspelled_field": Entry(400, BAD, "unknown field {field}; did you mean {near}?"),
    "unsupported_field": Entry(400, BAD, "{field} is not supported yet; leave it out"),
    "unsupported_value": Entry(400, BAD, "{field}: {value} is not supported yet"),
    "missing_field": Entry(400, BAD, "{field} is required"),
    "invalid_type": Entry(400, BAD, "{field} must be {wanted}, not {got}"),
    "invalid_value": Entry(400, BAD, "{field} must be {wanted}"),
    "invalid_token": Entry(400, BAD, "{field}: token ids are from 0 to {last}"),
    "empty_prompt": Entry(400, BAD, "{field} is empty: there is nothing to go on from"),
    "invalid_request": Entry(400, BAD, "{reason}"),
    "context_length_exceeded": Entry(
        400,
        BAD,
        "this model's context is {limit} tokens; the prompt has {more}{prompt}, which leaves no room for an"
        " answer: {over} too many",
    ),
    "context_length_asked": Entry(
        400,
        BAD,
        "this model's context is {limit} tokens; {asked} were asked for ({prompt} in the prompt, {output} in"
        " {field}): {over} too many",
    ),
    "too_many_choices": Entry(400, BAD, "{field}: {asked} sequences were asked for, at most {limit} at once"),
    "no_chat_template": Entry(400, BAD, "this model has no chat template; use /v1/completions"),
    "model_not_found": Entry(404, BAD, "there is no such model here; /v1/models lists what there is"),
    # the state of things
    "rate_limit_exceeded": Entry(429, "rate_limit_error", "the queue is full; try again in {seconds} s"),
    "not_ready": Entry(503, SERVER, "the engine is not ready: {reason}"),
    "shutting_down": Entry(503, SERVER, "the server is shutting down"),
    "engine_dead": Entry(503, SERVER, "the engine stopped and did not come back"),
    "request_timeout": Entry(504, SERVER, "the request took longer than the {seconds} s it may take"),
    "slow_reader": Entry(408, SERVER, "the answer was not read for too long"),
    "aborted": Entry(409, SERVER, "the request was stopped by the operator"),
    "engine_error": Entry(500, SERVER, "the engine could not finish this request: {reason}"),
    "internal_error": Entry(500, SERVER, "something went wrong in the server; its log says what"),
}

FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,100}")
WORDS = re.compile(r"[\w ,.;:'\"()\[\]{}<>=+*?!%&|`$#~^/-]{1,300}")  # no backslash, @ or control
INNARDS = re.compile(
    r"0x[0-9a-fA-F]+|Traceback|File \"|\bline \d+|object at|\.py\b|(?:^|[\s'\"`(<=:,])~?/\w|\d+\.\d+\.\d+\.\d+"
)


class Refusal(RequestError):
    """A RequestError made from the catalogue; `code` is its key there."""

    def __init__(self, code: str, field: str | None = None, seconds: int | None = None, **slots: Any) -> None:
        entry = CATALOGUE[code]
        shown = {"field": name(field), "seconds": seconds, **slots}
        super().__init__(entry.text.format(**shown), name(field) if field else None, entry.status)
        self.code, self.type, self.seconds = code, entry.type, seconds


class Gone(Exception):
    """The client closed the connection: nothing is left to say."""


class Fault(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    """OpenAI's shape of an error."""

    error: Fault


def name(field: str | None) -> str:
    """A field's name as the client wrote it, if it is one that can be shown."""
    return field if field and FIELD.fullmatch(field) else "a field"


def plain(text: str | None, instead: str) -> str:
    """One line of harmless text, or `instead`: for what other parts tell the client."""
    line = " ".join((text or "").split())
    return line if WORDS.fullmatch(line) and not INNARDS.search(line) else instead


def refusal(error: BaseException) -> Refusal:
    """What the client is told of any exception; what is not its fault is logged here."""
    match error:
        case Refusal():
            return error
        case RequestError():
            reason = plain(str(error), "this request cannot be served as it is")
            return Refusal("invalid_request", error.field, reason=reason)
        case Overloaded():
            return Refusal("rate_limit_exceeded", seconds=max(1, math.ceil(error.seconds)))
        case EngineDead():
            log.error("the engine is dead: %s", error)
            return Refusal("engine_dead", seconds=5)
        case TrineError():
            log.error("a request failed: %s", error)
            return Refusal("internal_error")
    log.error("a request failed", exc_info=error)
    return Refusal("internal_error")


def encode(error: Refusal) -> bytes:
    """The body of an error answer, and the data of an error event."""
    return msgspec.json.encode(Error(Fault(str(error), error.type, error.field, error.code)))


def headers(error: Refusal) -> Headers:
    """The headers that go with a refusal."""
    found: Headers = [(b"content-type", b"application/json")]
    if error.seconds is not None and error.status in (429, 503):
        found.append((b"retry-after", str(error.seconds).encode()))
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    return found
