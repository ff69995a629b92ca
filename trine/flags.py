"""Flags, and the YAML file of the same names, made from Config: one source for both.

Knows of argparse and yaml, and of Config's annotations; not of what the fields mean.
"""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .chip import CHIPS
from .config import Config
from .errors import ConfigError
from .registry import names, summaries

FILE_BYTES = 1024 * 1024  # of a config file
NAME_CHARS = 1024  # of a model's name or path

# Flags of other engines that ask for nothing here, and what to do instead.
ALWAYS, NEVER, ALONE = (
    "it is always so, leave it out",
    "it cannot be had, leave it out",
    "this is one process on one device, leave it out",
)
PEERS = {
    "--trust-remote-code": "code that comes with a model is never run, leave it out",
    "--enable-prefix-caching": ALWAYS,
    "--no-enable-prefix-caching": "the prefix cache is part of the engine, leave it out",
    "--disable-radix-cache": "the prefix cache is part of the engine, leave it out",
    "--enable-chunked-prefill": ALWAYS,
    "--no-enable-chunked-prefill": "prompts are always computed in chunks, leave it out",
    "--enable-mixed-chunk": ALWAYS,
    "--async-scheduling": "steps overlap by --depth 2, the default on a GPU",
    "--disable-overlap-schedule": "give --depth 1",
    "--cuda-graph-max-bs": "graphs are captured up to --max-num-seqs; --enforce-eager makes none",
    "--cuda-graph-bs": "graphs are captured up to --max-num-seqs; --enforce-eager makes none",
    "--cuda-graph-sizes": "graphs are captured up to --max-num-seqs; --enforce-eager makes none",
    "--compilation-config": "nothing is compiled by torch, leave it out",
    "-O": "nothing is compiled by torch, leave it out",
    "--swap-space": NEVER,
    "--cpu-offload-gb": NEVER,
    "--quantization": "what a checkpoint is stored in is read from it; --dtype int8 quantizes on a CPU",
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--skip-tokenizer-init": "LLM.generate takes token ids; with --load-format dummy no tokenizer is needed",
    "--pipeline-parallel-size": ALONE,
    "-pp": ALONE,
    "--data-parallel-size": ALONE,
    "-dp": ALONE,
    "--dp-size": ALONE,
    "--expert-parallel-size": ALONE,
    "--enable-expert-parallel": ALONE,
    "--disable-log-requests": "requests are not logged, leave it out",
    "--disable-log-stats": "give --log-level warning",
    "--seed": "each request has its own seed; --dummy-seed is that of random weights",
    "--random-seed": "each request has its own seed; --dummy-seed is that of random weights",
    "--enable-auto-tool-choice": NEVER,
    "--tool-call-parser": NEVER,
    "--reasoning-parser": NEVER,
    "--enable-metrics": "GET /metrics is always there",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One field of Config as a flag: `--name`, its other names, its group, its help."""

    name: str
    type: type  # bool, int, float or str
    many: bool  # a tuple: the flag may be repeated
    choices: tuple[str, ...]
    default: Any
    told: str  # its help, before names of plugins are filled in
    alias: tuple[str, ...]
    group: str
    ge: float | None
    le: float | None
    same: dict[str, str]  # other words for its values
    plugins: str  # its values are plugins of this kind

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """With the plugins that there are now; looked up only if asked for."""
        if not self.plugins:
            return self.told
        told = summaries(self.plugins).items()
        each = (f"{name} ({text[:1].lower()}{text[1:].rstrip('.')})" if text else name for name, text in told)
        return self.told.format(
            names=", ".join(names(self.plugins)), summaries=", ".join(each), chips=", ".join(CHIPS)
        )


class Help(str):
    """A flag's help, whose names of plugins are looked up only if somebody reads it."""

    def __new__(cls, field: Field) -> Help:
        made = super().__new__(cls, field.told)
        made.field = field
        return made

    field: Field

    def __mod__(self, values: Any) -> str:  # argparse does this with what it shows
        field = self.field
        shown = f"{field.help} (default: {field.default})" if field.default not in (None, ()) else field.help
        return shown.replace("%", "%%") % values


def fields() -> Iterator[Field]:
    """Every field of Config, in its order."""
    return iter(_fields())


@lru_cache(maxsize=1)
def _fields() -> tuple[Field, ...]:
    return tuple(_read_fields())


def _read_fields() -> Iterator[Field]:
    hints = get_type_hints(Config, include_extras=True)
    for info in msgspec.structs.fields(Config):
        kind, meta = get_args(hints[info.name])[:2]
        many = get_origin(kind) is tuple
        bare = (
            [t for t in get_args(kind) if t not in (type(None), Ellipsis)]
            if get_origin(kind) in (Union, types.UnionType, tuple)
            else [kind]
        )
        choices = get_args(bare[0]) if get_origin(bare[0]) is Literal else ()
        yield Field(
            name=info.name,
            type=str if choices else bare[0],
            many=many,
            choices=choices,
            default=info.default,
            told=meta.description or "",
            alias=meta.extra["alias"],
            group=meta.extra["group"],
            ge=meta.extra["ge"],
            le=meta.extra["le"],
            same=meta.extra["same"],
            plugins=meta.extra["plugins"],
        )


def add_flags(
    parser: argparse.ArgumentParser, *, groups: set[str] | None = None, positional: bool = True
) -> None:
    """Flags of the fields in `groups` (None: all), a config file, and MODEL as a positional."""
    if positional:
        parser.add_argument(
            "model_positional", nargs="?", metavar="MODEL", default=None, help="the same as --model"
        )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="a YAML file with the same names; flags go before it"
    )
    sections: dict[str, Any] = {}
    for field in fields():
        if groups is not None and field.group not in groups:
            continue
        if field.group not in sections:
            sections[field.group] = parser.add_argument_group(field.group)
        _add(sections[field.group], field)


def _add(section: Any, field: Field) -> None:
    names = [field.flag, *field.alias]
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": Help(field)}
    if field.type is bool:
        section.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
    elif field.many:
        section.add_argument(*names, action="append", metavar=field.name.upper(), **common)
    elif field.choices:
        words = [word for word, value in field.same.items() if value in field.choices]
        metavar = "{" + ",".join(field.choices) + "}"
        section.add_argument(*names, choices=(*field.choices, *words), metavar=metavar, **common)
    else:
        section.add_argument(*names, type=field.type, metavar=field.name.upper(), **common)


def read(arguments: argparse.Namespace) -> Config:
    """The Config of parsed flags over the file of `--config`; ConfigError names the field."""
    given = dict(vars(arguments))
    values = _file(Path(given["config"])) if given.get("config") else {}
    known = {field.name for field in fields()}
    values |= {name: value for name, value in given.items() if name in known}
    if positional := given.get("model_positional"):
        if given.get("model") not in (None, positional):
            raise ConfigError(f"two models: {positional!r} and --model {given['model']!r}; give one", "model")
        values["model"] = positional
    return make(values)


def make(values: dict[str, Any]) -> Config:
    """A Config of plain values; ConfigError names the field, and the near name of an unknown one."""
    known = [field.name for field in fields()]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
            raise ConfigError(f"no option is called {name!r}{hint}", name)
    words = {field.name: field.same for field in fields()}
    values = {k: words[k].get(v, v) if isinstance(v, str) else v for k, v in values.items()}
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0] or "config"
        raise ConfigError(f"{name}: {what}, found {values.get(name)!r}", name) from None
    for field in fields():
        _bounded(field, getattr(config, field.name))
        _plugged(field, getattr(config, field.name))
    if not all(config.api_key):
        raise ConfigError("api_key: a key that is not empty is wanted", "api_key")
    for name in ("model", "served_model_name"):
        if (value := getattr(config, name)) is not None and not (
            0 < len(value) <= NAME_CHARS and value.isprintable()
        ):
            raise ConfigError(
                f"{name}: 1 to {NAME_CHARS} characters that can be printed are wanted, found {value[:40]!r}",
                name,
            )
    return config


def _bounded(field: Field, value: Any) -> None:
    if value is None or isinstance(value, (str, tuple)):
        return
    low, high = field.ge, field.le
    if not ((low is None or value >= low) and (high is None or value <= high)):  # false for NaN too
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{field.name}: {wanted} is wanted, found {value}", field.name)


def _plugged(field: Field, value: str) -> None:
    """Names of plugins are known without importing them, and so without torch."""
    if not field.plugins or value == field.default:
        return
    known = names(field.plugins)
    if field.name == "platform":
        known += CHIPS
    if field.default == "auto":
        known = ["auto", *known]
    if value not in known:
        near = difflib.get_close_matches(value, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{field.name}: there is no {value!r}; there are: {', '.join(known)}{hint}", field.name
        )


def _file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", "config") from None
    if len(text) > FILE_BYTES:
        raise ConfigError(f"--config {path}: larger than {FILE_BYTES} bytes", "config")
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}", "config") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: names and values are wanted, found {type(values).__name__}", "config"
        )
    return {_canonical(str(name)): value for name, value in values.items()}


def _canonical(name: str) -> str:
    """A field's name from the name or alias of a flag, with or without dashes."""
    flag = "--" + name.lstrip("-").replace("_", "-")
    return next((f.name for f in fields() if flag in (f.flag, *f.alias)), name)
