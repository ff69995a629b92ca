"""What the service tells metrics of each sequence: when its tokens came, and how it ended.

The meter is `trine.metrics.Metrics`; this file only knows what it calls on it.
"""

from __future__ import annotations

import time
from typing import Protocol

from trine.core.messages import Ready
from trine.core.types import Usage


class Meter(Protocol):
    """Seconds are from the request's arrival, or between tokens."""

    def first_token(self, seconds: float) -> None: ...
    def tokens(self, count: int) -> None: ...
    def token(self, seconds: float, count: int = 1) -> None: ...
    def finished(
        self, reason: str, seconds: float, usage: Usage | None = None, first: float = 0.0
    ) -> None: ...
    def rejected(self, reason: str) -> None: ...
    def started(self, ready: Ready) -> None: ...
    def text(self) -> bytes: ...


class Timing:
    """Of one sequence. `finished` counts once, whoever says it first."""

    def __init__(self, meter: Meter | None, arrived: float) -> None:
        self.meter, self.arrived = meter, arrived
        self.first = self.last = 0.0
        self.ended = False

    def tokens(self, count: int) -> None:
        if self.meter is None or not count:
            return
        now = time.monotonic()
        self.meter.tokens(count)
        if self.first:
            self.meter.token(now - self.last, count)
        else:
            self.first = now - self.arrived
            self.meter.first_token(self.first)
        self.last = now

    def finished(self, reason: str, usage: Usage | None = None) -> None:
        if self.meter is None or self.ended:
            return
        self.ended = True
        self.meter.finished(reason, time.monotonic() - self.arrived, usage, self.first)
