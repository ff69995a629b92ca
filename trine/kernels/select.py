"""Which backend serves a wish: ask each in order, keep every answer.

A backend is asked by its own `cannot`, so there is no table of what supports what. One that cannot even be asked,
as what it stands on is broken, declines with that. It does not know what is asked for.
"""

from __future__ import annotations

import logging
from typing import Any

from msgspec import Struct

from trine.errors import Unsupported
from trine.registry import find

from .installed import said

log = logging.getLogger(__name__)


class Answer(Struct, frozen=True):
    """What one backend said."""

    name: str
    cannot: str | None  # None: it can


class Selection(Struct, frozen=True):
    """The chosen backend, and what all of them said, in the order they were asked."""

    name: str
    why: str
    answers: list[Answer]

    def lines(self) -> list[str]:
        """For people: one line a backend, the chosen one first."""
        others = [answer for answer in self.answers if answer.name != self.name]
        return [f"{self.name}: {self.why}"] + [
            f"{answer.name}: {f'cannot: {answer.cannot}' if answer.cannot else 'can too'}"
            for answer in others
        ]


def select(kind: str, want: Any, forced: str = "auto", granted: str | None = None) -> Selection:
    """Choose a backend of `kind` (such as "kernels.attention") for `want`, or for all of a list of wants.

    A forced choice that cannot is Unsupported, with its reason; so is a wish that nobody serves. `granted`: a reason
    that does not count, as what it misses is taken to be there."""
    backends = sorted(find(kind).items(), key=lambda pair: (pair[1].order, pair[0]))
    wants = want if isinstance(want, list) else [want]
    answers = [Answer(name, _cannot(name, backend, wants, granted)) for name, backend in backends]
    able = [answer.name for answer in answers if answer.cannot is None]
    if forced != "auto":
        asked = [answer for answer in answers if answer.name == forced]
        if not asked:
            names = ", ".join(answer.name for answer in answers)
            raise Unsupported(f"no {kind} is called {forced!r}; there are: {names}")
        if asked[0].cannot:
            raise Unsupported(f"{kind} {forced!r} was asked for and cannot: {asked[0].cannot}")
        return Selection(forced, "because it was asked for", answers)
    if not able:
        said = "; ".join(f"{answer.name} cannot: {answer.cannot}" for answer in answers)
        raise Unsupported(f"nothing in {kind} can: {said}")
    return Selection(able[0], _why(answers, able), answers)


def _cannot(name: str, backend: Any, wants: list[Any], granted: str | None) -> str | None:
    """Its first reason against any of the wants."""
    try:
        return next((reason for reason in map(backend.cannot, wants) if reason and reason != granted), None)
    except Exception as error:
        log.debug("%s cannot be asked", name, exc_info=True)
        return f"it cannot be asked: {said(error)}"


def _why(answers: list[Answer], able: list[str]) -> str:
    """One line for the plan: the rank of the choice, and the reasons of those before it."""
    if len(answers) == 1:
        return "the only one there is"
    before = answers[: [answer.name for answer in answers].index(able[0])]
    reasons = "".join(f"; {answer.name} cannot: {answer.cannot}" for answer in before)
    after = f"; {', '.join(able[1:])} can too" if able[1:] else ""
    return f"the first that can{reasons}{after}"
