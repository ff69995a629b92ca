"""Whether an optional library can be used: a module that is found may still fail when it is imported.

It does not know what a library is for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec


def missing(module: str, hint: str = "") -> str | None:
    """Why `module` cannot be used; None if it can, and then it is imported. `hint`: how to install it."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):  # of a package that is broken itself, or that something else stands for
        found = None
    if found is None:
        return f"{module} is not installed{f' ({hint})' if hint else ''}"
    try:
        import_module(module)
    except (
        Exception
    ) as error:  # whatever a vendor's start may raise: a library it lacks, a driver, another version
        return f"{module} is installed and cannot be imported: {said(error)}"
    return None


def said(error: Exception) -> str:
    """What an error says, in one line."""
    first = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
