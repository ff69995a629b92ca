"""Logging, set up once for a process, in one place: text lines on standard error.

Under load one line a second says how the engine does, from StepStats; there is none when it
is idle. Prompts and answers are never logged. Messages may quote what came from outside, so control
characters are escaped: nobody can forge a line.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from trine.core.stats import StepStats

LINE_SECONDS = 1.0
FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
# Tracebacks are ours and keep their lines; a message keeps none.
ESCAPES_OF_A_LINE = ESCAPES | {10: "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Lines(logging.Formatter):
    """One message, one line; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(ESCAPES_OF_A_LINE)
        return super().formatMessage(record)

    def formatException(self, ei) -> str:  # type: ignore[no-untyped-def]
        return super().formatException(ei).translate(ESCAPES)


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Of Trine's own loggers only; a second call replaces the first."""
    logger = logging.getLogger("trine")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines(FORMAT))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class StatsLine:
    """One line a second while there is work."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._log = logger or logging.getLogger("trine.engine")
        self._last: StepStats | None = None
        self._when = 0.0

    def feed(self, stats: StepStats, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        if not (stats.running or stats.waiting):
            self._last = None  # the next rate is not to count the idle time
            return
        if self._last is None:
            self._last, self._when = stats, now
            return
        if now - self._when >= LINE_SECONDS:
            self._log.info("%s", line(self._last, stats, now - self._when))
            self._last, self._when = stats, now


def line(before: StepStats, after: StepStats, seconds: float) -> str:
    """What happened between two StepStats, for a person."""
    prompt = after.prompt_tokens - before.prompt_tokens
    hit = after.hit_tokens - before.hit_tokens
    return (
        f"{after.running} running, {after.waiting} waiting; "
        f"{(after.output_tokens - before.output_tokens) / seconds:.0f} tokens/s out, "
        f"{(after.computed_tokens - before.computed_tokens) / seconds:.0f} computed; "
        f"KV {100 * after.held / max(1, after.pages):.0f} % held, {100 * after.cached / max(1, after.pages):.0f} % cached; "
        f"prompt cache {100 * hit / prompt if prompt else 0:.0f} %; "
        f"{after.preemptions - before.preemptions} preempted"
    )
