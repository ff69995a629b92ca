"""The teeth of the simulation: each mutant still applies, and some are killed here; `make mutants` kills all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "mutants.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


mutants = load()
ALL = mutants.mutants()


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 40
    assert len({m.what for m in ALL}) == len({(m.file, m.old, m.new) for m in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.what)
def test_it_still_applies(mutant: object) -> None:
    assert mutant.why_not() is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "what", ["release does not unlock", "rows are swapped at commit", "a window page is given back one early"]
)
def test_it_is_killed(what: str) -> None:
    mutant = next(m for m in ALL if m.what == what)
    assert mutants.killed(mutant, steps=2000)


def test_a_mutant_that_no_longer_applies_is_told() -> None:
    stale = mutants.Mutant("stale", "trine/core/types.py", "no such text", "")
    assert stale.why_not() == "its text occurs 0 times in trine/core/types.py"
    assert mutants.Mutant("vague", "trine/core/types.py", "self", "").why_not()
