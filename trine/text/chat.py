"""Chat messages to the text that a model was trained on, with a record of who wrote what.

    template = ChatTemplate.of(tokenizer, sandbox=sandbox)
    segments = await template.arender([{"role": "user", "content": "hello"}])
    ids = tokenizer.encode_segments(segments)

The template is a program that came with the model: it runs in a sandbox child, inside a budget
(rule S4), and what the client wrote comes back as parts that are not trusted (rule S12). A model
without a template has none: no other one is guessed. Knows nothing of HTTP or of ids.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, RequestError
from ..sandbox import Exceeded, Failed, Sandbox, SandboxError
from .folder import read_template
from .guard import Segments
from .tokenizer import Tokenizer

CPU = 0.25  # seconds
MEMORY = 64 << 20  # bytes
CONTEXT = 131_072  # tokens, where nobody says how many there may be
CHARS = 8  # characters of a rendered text for each token of context
ARGUMENT_CHARS = 4096
TASK = "template.render"
ASKS_FOR_NONE = re.compile(r"""content['"\]]*\s+is\s+(not\s+)?none""", re.I)
Message = dict[str, Any]


class ChatTemplate:
    """A model's chat template. `sources`: templates by name; "tool_use" is taken when there are
    tools, else "default". `words`: the text of special tokens that templates may write."""

    def __init__(
        self,
        sources: dict[str, str],
        words: dict[str, str],
        *,
        sandbox: Sandbox | None = None,
        context: int = CONTEXT,
    ) -> None:
        self.sources = sources
        self.words = words
        self._sandbox = sandbox or Sandbox(preload=(TASK,))
        self._limit = CHARS * context

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, sandbox: Sandbox | None = None, context: int = CONTEXT
    ) -> ChatTemplate:
        """The template of a tokenizer's model, or the one it was opened with."""
        return cls(tokenizer.templates, tokenizer.words, sandbox=sandbox, context=context)

    @property
    def exists(self) -> bool:
        """Whether there is a template at all."""
        return bool(self.sources)

    def warm(self) -> None:
        """Start the sandbox's children and check the templates, so that the first chat waits for
        nothing and a broken template is told at once. Takes a tenth of a second: not for an event loop."""
        self._sandbox.warm()
        self.check()

    def check(self) -> dict[str, list[str]]:
        """The names that each template reads; CheckpointError for one that cannot be compiled."""
        try:
            return {
                name: self._sandbox.call("template.check", source, cpu=4 * CPU, memory=MEMORY)
                for name, source in self.sources.items()
            }
        except SandboxError as error:
            raise CheckpointError(f"the chat template cannot be used: {error}") from None

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Segments:
        """The text for `messages` as (text, trusted) parts; RequestError says what is wrong.
        `kwargs`: further names that the template reads, such as enable_thinking."""
        ask = self._ask(messages, tools, add_generation_prompt, kwargs)
        try:
            return segments(self._sandbox.call(TASK, ask, cpu=CPU, memory=MEMORY))
        except SandboxError as error:
            raise refusal(error) from None

    async def arender(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Segments:
        """`render` for an event loop."""
        ask = self._ask(messages, tools, add_generation_prompt, kwargs)
        try:
            return segments(await self._sandbox.acall(TASK, ask, cpu=CPU, memory=MEMORY))
        except SandboxError as error:
            raise refusal(error) from None

    def close(self) -> None:
        """End the sandbox's children."""
        self._sandbox.close()

    def _ask(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        source = self._source(bool(tools))
        ask = {
            "source": source,
            "messages": clean(messages, keep_none=bool(ASKS_FOR_NONE.search(source))),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            "arguments": checked_arguments(kwargs or {}),
            "words": self.words,
            "limit": self._limit,
        }
        check_unicode(ask["messages"], "messages")
        check_unicode(tools, "tools")
        return ask

    def _source(self, tools: bool) -> str:
        if tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        raise RequestError(
            "this model has no chat template, so messages cannot be put into its words: "
            "use completions, or start the server with --chat-template FILE",
            "messages",
        )


def open_template(path: str | None) -> str | None:
    """The text of the template file that the operator named, for `Tokenizer.open`."""
    return read_template(Path(path)) if path else None


def segments(answer: dict[str, Any]) -> Segments:
    """(text, trusted) parts from what the child answered."""
    text, parts, position = answer["text"], [], 0
    for start, stop in answer["trusted"]:
        parts += [(text[position:start], False), (text[start:stop], True)]
        position = stop
    return [(part, trusted) for part, trusted in [*parts, (text[position:], False)] if part]


def refusal(error: SandboxError) -> RequestError:
    """What the client is told when there is no text."""
    match error:
        case Failed(kind="Refused"):
            return RequestError(f"the model's chat template refuses these messages: {error}", "messages")
        case Failed(kind="Unread"):
            return RequestError(
                f"the model's chat template does not read {str(error)!r}", f"chat_template_kwargs.{error}"
            )
        case Failed(kind="TooMuch"):
            return RequestError(str(error), "messages")
        case Exceeded():
            return RequestError(f"the model's chat template took too much: {error}", "messages")
    return RequestError(f"the model's chat template failed on these messages: {error}", "messages")


def clean(messages: Any, keep_none: bool) -> list[Message]:
    """`messages` as templates expect them; RequestError names the field that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [clean_message(message, f"messages[{i}]", keep_none) for i, message in enumerate(messages)]


def clean_message(message: Any, field: str, keep_none: bool) -> Message:
    """One message: text parts joined, null fields dropped, arguments of calls as objects."""
    if not isinstance(message, dict):
        raise RequestError("a message must be an object", field)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError("a message needs a role, which is a text", f"{field}.role")
    cleaned = {name: value for name, value in message.items() if value is not None}
    calls = message.get("tool_calls")
    if calls is not None:
        cleaned["tool_calls"] = clean_calls(calls, f"{field}.tool_calls")
    content = message.get("content")
    if content is None:
        if not calls:
            raise RequestError("a message without tool_calls needs content", f"{field}.content")
        if keep_none:
            cleaned["content"] = None
    else:
        cleaned["content"] = clean_content(content, f"{field}.content")
    if "reasoning" in cleaned:  # the younger name of the same thing
        cleaned.setdefault("reasoning_content", cleaned["reasoning"])
    return cleaned


def clean_content(content: Any, field: str) -> str:
    """A text, or the texts of parts, one a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("content must be a text or a list of parts", field)
    texts: list[str] = []
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "text"}:
                raise RequestError("a text part needs a text", f"{field}[{i}].text")
            case {"type": kind}:
                raise RequestError(f"this model reads text, not {kind!r:.80}", f"{field}[{i}].type")
            case _:
                raise RequestError("a part must be an object with a type", f"{field}[{i}]")
    return "\n".join(texts)


def clean_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments, a JSON text on the wire, are the objects that templates expect."""
    if not isinstance(calls, list):
        raise RequestError("tool_calls must be a list", field)
    cleaned: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("a tool call needs a function with a name", f"{field}[{i}].function")
        arguments = function.get("arguments", {})
        cleaned.append({**call, "function": {**function, "arguments": parsed(arguments)}})
    return cleaned


def parsed(arguments: Any) -> Any:
    """The object in a JSON text, or the text itself if there is none in it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def checked_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Extra arguments are plain values of moderate size."""
    for name, value in kwargs.items():
        match value:
            case None | bool():
                continue
            case str() if len(value) <= ARGUMENT_CHARS:
                continue
            case int() if abs(value) < 2**63:
                continue
            case float() if math.isfinite(value):
                continue
        raise RequestError(
            f"it must be a text of at most {ARGUMENT_CHARS} characters, a number, true, false or null",
            f"chat_template_kwargs.{name}",
        )
    return kwargs


def check_unicode(value: Any, field: str) -> None:
    """RequestError if a text in `value` has half of a surrogate pair, or a number is out of range."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise RequestError("it has half of a surrogate pair, which no UTF-8 has", field) from None
        case dict():
            for name, inner in value.items():
                check_unicode(name, field)
                check_unicode(inner, f"{field}.{name}")
        case list():
            for i, inner in enumerate(value):
                check_unicode(inner, f"{field}[{i}]")
        case int() if not -(2**63) <= value < 2**64:
            raise RequestError("the number is too large", field)
