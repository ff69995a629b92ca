"""Every error that Trine raises on purpose.

    TrineError
    ├── ConfigError         a wish that makes no sense; names the field and the fix
    ├── Unsupported         nothing can serve it; lists who was asked and each answer
    ├── CheckpointError     missing, extra or misshapen tensors, or a hostile file, by name
    ├── RequestError        the client's fault; carries an HTTP status and the field
    ├── Overloaded          try again; carries how long to wait
    └── EngineDead          the worker's own traceback is inside

A message says what was found, what was wanted, and what to do.
"""

from __future__ import annotations


class TrineError(Exception):
    """The root: catch this to catch everything Trine raises on purpose."""


class ConfigError(TrineError):
    """A wish that makes no sense. `field` is the Config field."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Unsupported(TrineError):
    """Nothing can serve it; the message lists who was asked and each answer."""


class CheckpointError(TrineError):
    """A checkpoint that cannot be read: names the file and the tensor or field."""


class RequestError(TrineError):
    """The client's fault. `field` is the JSON path of what was wrong."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


class Overloaded(TrineError):
    """Over capacity. `seconds` is an honest guess of when to try again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineDead(TrineError):
    """The engine process is gone and did not come back; its traceback is the message."""
