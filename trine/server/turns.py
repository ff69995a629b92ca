"""Messages of a chat as OpenAI's clients send them, and as chat templates know them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from . import limits
from .catalogue import Refusal
from .controls import Name

ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
UNSUPPORTED = ("refusal", "audio", "tool_calls", "tool_call_id", "function_call", "reasoning_content")


class Part(Struct, forbid_unknown_fields=True):
    """A piece of a message. Only text so far: the other kinds are known by name."""

    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """One turn. The fields after `name` are what answers carry: they may come back empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=limits.PARTS)] | None = None
    name: Name | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    reasoning_content: Any = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)]
Argument = str | int | float | bool | None


def turns(messages: list[Message]) -> list[dict[str, Any]]:
    return [turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def turn(message: Message, place: str) -> dict[str, Any]:
    """A message as templates know it. Texts of several parts are joined by line ends; a
    developer is the system's newer name."""
    for field in UNSUPPORTED:
        if getattr(message, field):
            raise Refusal("unsupported_field", f"{place}.{field}")
    if message.role in ("tool", "function"):
        raise Refusal("unsupported_value", f"{place}.role", value=message.role)
    if message.content is None:
        raise Refusal("missing_field", f"{place}.content")
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content}
    return found if message.name is None else {**found, "name": message.name}


def text(part: Part, place: str) -> str:
    if part.type != "text":
        raise Refusal("unsupported_value", f"{place}.type", value=part.type)
    if part.text is None:
        raise Refusal("missing_field", f"{place}.text")
    return part.text


def arguments(given: dict[str, Argument]) -> dict[str, Argument]:
    """Arguments for the chat template: plain names, plain values, none of the server's own."""
    for key, value in given.items():
        place = f"chat_template_kwargs.{key}"
        if not ARGUMENT.fullmatch(key) or key in RESERVED:
            raise Refusal("invalid_value", place, wanted="an argument that a template may be given")
        if isinstance(value, str) and len(value) > limits.TEMPLATE_CHARACTERS:
            raise Refusal("invalid_value", place, wanted=f"at most {limits.TEMPLATE_CHARACTERS} characters")
    return given
