"""Rendering of chat templates, in the sandbox child, with a record of who wrote what.

The environment is the one model authors test their templates with (the chat templates of
transformers): jinja's immutable sandbox, trimmed blocks, loop controls, `tojson` that does not
escape HTML, `raise_exception`, `strftime_now`, the `generation` tag. Beside that, every literal
of the template becomes a trusted `Text`; what a client sent stays a plain str. Output pieces,
`~`, `join` and macros keep track (see `taint`).

Knows nothing of tokens, requests or budgets.
"""

from __future__ import annotations

import encodings.unicode_escape
import json
import unicodedata
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.debug
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .taint import Text, joined, ranges, trusted

# Imported when first needed otherwise, and then no file may be opened.
LATE = (encodings.unicode_escape, unicodedata, jinja2.debug)

# Words of the protocol: a role that is one of them was chosen from a list, not written.
ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})
OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Refused(Exception):
    """The template itself said no (`raise_exception`)."""


class Broken(Exception):
    """The template could not be compiled, or failed on these messages."""


class Unread(Exception):
    """An argument that the template does not read, or that is not the client's to set."""


class TooMuch(Exception):
    """The template wrote more than is allowed."""


def render(ask: dict[str, Any]) -> dict[str, Any]:
    """Render `ask["source"]`: its text, and the ranges of it that the template's author wrote."""
    environment, template = compiled(ask["source"])
    check_arguments(environment, ask)
    for message in ask["messages"]:
        if isinstance(role := message.get("role"), str) and role in ROLES:
            message["role"] = trusted(role)
    words = {name: trusted(word) for name, word in ask["words"].items()}
    values = words | ask["arguments"] | {name: ask.get(name) for name in OWN}
    pieces, size = [], 0
    try:
        for piece in template.root_render_func(template.new_context(values)):
            pieces.append(piece)
            if (size := size + len(piece)) > ask["limit"]:
                raise TooMuch(f"the chat template wrote more than {ask['limit']} characters")
    except (TooMuch, MemoryError):
        raise
    except TemplateError as error:
        raise (Refused if type(error) is TemplateError else Broken)(str(error)) from None
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}") from None
    text = joined(pieces)
    return {"text": str.__str__(text), "trusted": ranges(text)}


def check(source: str) -> list[str]:
    """The names that a template reads; Broken if it cannot be compiled."""
    return sorted(compiled(source)[0].reads)


def check_arguments(environment: Environment, ask: dict[str, Any]) -> None:
    """Unread for the first extra argument that this template has no use for."""
    for name in ask["arguments"]:
        if name not in environment.reads or name in OWN or name in ask["words"]:
            raise Unread(name)


@lru_cache(maxsize=4)
def compiled(source: str) -> tuple[Environment, Template]:
    """A template ready to render, with its own environment; it costs some ten milliseconds."""
    environment = Environment()
    try:
        template = environment.from_string(source)
        environment.reads = find_undeclared_variables(environment.parse(source))
    except TemplateSyntaxError as error:
        raise Broken(f"line {error.lineno}: {error.message}") from None
    return environment, template


class Generator(CodeGenerator):
    """Writes the template's program with its literals as trusted `Text`."""

    environment: Environment

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self.environment.literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_TemplateData(node, frame)
        else:
            self.write(self.environment.literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.literal("".join(group))


class Environment(ImmutableSandboxedEnvironment):
    """What one chat template sees."""

    code_generator_class = Generator
    concat = staticmethod(joined)  # type: ignore[assignment]
    reads: set[str] = set()

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False
        )
        self.literals: list[Text] = []
        self.filters["tojson"] = tojson
        self.filters["join"] = join
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = Maker()
        self.globals["namespace"] = Space

    def literal(self, text: str) -> str:
        """The source of an expression whose value is the trusted `text`."""
        self.literals.append(trusted(text))
        return f"environment.literals[{len(self.literals) - 1}]"


class Generation(Extension):
    """`{% generation %}`: marks what a model wrote, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Any) -> str:
        return caller()


class Maker:
    """`dict` without the class's own attributes."""

    def __call__(self, *values: Any, **names: Any) -> dict[Any, Any]:
        return dict(*values, **names)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class Space(Namespace):
    """`namespace` whose names may not start with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:  # `self` may be one of the names
        names = dict(*args[1:], **names)
        for name in names:
            _public(name)
        Namespace.__init__(args[0], names)  # type: ignore[misc]

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_environment
def join(environment: Environment, values: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return Text(d, ranges(d)).join(map(str, values))


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")
