"""The smallest scenario that still fails the same way: what a person wants to read."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from trine.core.types import Group

from .scenario import Ask, Scenario
from .simulation import Simulation


def fault(scenario: Scenario) -> str | None:
    """What kind of fault a run ends with; None: it ends well."""
    try:
        Simulation(scenario).run()
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        where = f"{trace.tb_frame.f_code.co_name}" if trace else ""
        return f"{type(error).__name__} in {where}"
    return None


def shrink(scenario: Scenario, tries: int = 3000) -> str:
    """As JSON. Takes any single step down that keeps the fault, until none does."""
    kind = fault(scenario)
    if kind is None:
        return "no fault"
    again = True
    while again:
        again = False
        for smaller in _smaller(scenario):
            tries -= 1
            if tries < 0:
                break
            if fault(smaller) == kind:
                scenario, again = smaller, True
                break
    return msgspec.json.encode(scenario).decode()


def _smaller(s: Scenario) -> Iterator[Scenario]:
    for index in range(len(s.asks)):
        if len(s.asks) > 1:
            yield replace(s, asks=s.asks[:index] + s.asks[index + 1 :])
    for name, value in (
        ("losses", []),
        ("flushes", []),
        ("hostile", []),
        ("wire", False),
        ("poll", False),
        ("lazy", False),
    ):
        if getattr(s, name) != value:
            yield replace(s, **{name: value})
    plain = {"drafts": 0, "policy": "fcfs", "capacity": "max-use", "eos": [], "shortest": 1, "mix": None}
    for name, value in plain.items():
        if getattr(s, name) != value:
            yield replace(s, **{name: value})
    for name in ("losses", "flushes"):
        for index in range(len(getattr(s, name))):
            yield replace(s, **{name: getattr(s, name)[:index] + getattr(s, name)[index + 1 :]})
    for name in ("depth", "slots", "budget"):
        if getattr(s, name) > 1:
            yield replace(s, **{name: getattr(s, name) - 1})
    for index, group in enumerate(s.groups):
        if len(s.groups) > 1:
            yield replace(s, groups=s.groups[:index] + s.groups[index + 1 :])
        if group.window:
            yield replace(s, groups=[*s.groups[:index], Group(group.pages), *s.groups[index + 1 :]])
    for index, ask in enumerate(s.asks):
        for smaller in _less(ask):
            yield replace(s, asks=[*s.asks[:index], smaller, *s.asks[index + 1 :]])


def _less(ask: Ask) -> Iterator[Ask]:
    plain = {"rule": 0, "priority": 0, "abort": -1, "patience": -1, "space": 0, "at": 0}
    for name, value in plain.items():
        if getattr(ask, name) != value:
            changed = replace(ask, **{name: value})
            if name == "space":
                changed = replace(changed, sampling=replace(ask.sampling, top_k=0))
            yield changed
    if ask.at > 1:
        yield replace(ask, at=ask.at // 2)
        yield replace(ask, at=ask.at - 1)
    for cut in {len(ask.tokens) // 2, 1}:
        if cut < len(ask.tokens):
            yield replace(ask, tokens=ask.tokens[cut:])
            yield replace(ask, tokens=ask.tokens[:-cut])
    sampling = ask.sampling
    for name, value in (
        ("min_tokens", 0),
        ("stop_ids", ()),
        ("temperature", 0.0),
        ("logprobs", None),
        ("seed", 0),
    ):
        if getattr(sampling, name) != value:
            yield replace(ask, sampling=replace(sampling, **{name: value}))
    if sampling.max_tokens > 1:
        yield replace(ask, sampling=replace(sampling, max_tokens=sampling.max_tokens // 2))
        yield replace(ask, sampling=replace(sampling, max_tokens=sampling.max_tokens - 1))
