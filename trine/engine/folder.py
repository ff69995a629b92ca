"""Run folders: where the Unix sockets of one server live. Mode 0700, a name that cannot be guessed.

The owner holds a lock on a file in it as long as it lives, so a folder whose lock is free is a
dead one's, whatever its process number was and in whichever container it ran. Dead ones are
removed when the next server starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "trine-run-"
LOCK = "lock"
ADDRESS_BYTES = 100  # a Unix address holds 107, macOS 103
YOUNG_SECONDS = 3600  # a folder without a lock this young may be just being made


class RunFolder:
    """A fresh folder of our own; gone after `close`, and after a normal exit without it."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _roomy(Path(tempfile.gettempdir()))
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        self._lock = _locked(self.path)
        self._gone = weakref.finalize(self, _close, self.path, self._lock)

    def close(self) -> None:
        self._gone()


def sweep(parent: Path) -> list[Path]:
    """Remove the folders whose owners are dead; other users' are left alone."""
    return [path for path in parent.glob(f"{PREFIX}*") if _dead(path) and not shutil.rmtree(path, True)]


def _locked(folder: Path) -> int:
    """The lock is taken under another name first: nobody ever sees ours unlocked."""
    fresh = folder / f"{LOCK}.new"
    descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / LOCK)
    return descriptor


def _dead(folder: Path) -> bool:
    try:
        facts = folder.lstat()
        if facts.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            return False
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return folder.exists() and time.time() - facts.st_mtime > YOUNG_SECONDS
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """The lock goes last: whoever is interrupted leaves a folder that the next sweep knows."""
    for entry in path.glob("*"):
        if entry.name != LOCK:
            with contextlib.suppress(OSError):
                entry.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _close(path: Path, lock: int) -> None:
    remove(path)
    os.close(lock)


def _roomy(parent: Path) -> Path:
    """A Unix address is short: with a deep temporary folder, the system's own."""
    return parent if len(os.fsencode(parent)) + 60 <= ADDRESS_BYTES else Path("/tmp")
