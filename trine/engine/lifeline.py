"""Rule S8: an engine process does not outlive its parent, whatever either of them is doing.

Two ties: standard input is a pipe that only the parent holds open, and the kernel is asked for
SIGKILL at the parent's death (Linux). The second also works while a library holds the interpreter, or
when this process is stopped. This file knows nothing of engines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from .folder import remove

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Lifeline:
    """Watches standard input. The parent's death also removes the run folder: surely until `tie`,
    after it if there is time."""

    def __init__(self, parent: int, folder: Path) -> None:
        self._parent, self._folder = parent, folder
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def tie(self) -> None:
        """Ask the kernel too. Only when no socket file is left: SIGKILL leaves no time to tidy."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:  # it died before we asked
            self._end()

    def _watch(self) -> None:
        while os.read(0, 1):
            pass
        self._end()

    def _end(self) -> None:
        remove(self._folder)
        os._exit(0)
