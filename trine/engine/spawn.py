"""An engine process from its very beginning, before anybody knows what it is to do.

What it imports takes longer than all that the face does before it can tell it its orders, so it may be
started first and told later. It reads its orders from its standard input, whose end is its own end. This
file imports next to nothing, and does not know what orders are: engine/life.py does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trine.config import child_environment

COMMAND = (sys.executable, "-P", "-m", "trine.engine.loop")


def spawn(command: tuple[str, ...] = COMMAND) -> subprocess.Popen[bytes]:
    """Call it on a thread that lives as long as the engine should: the kernel takes the end of the
    spawning thread for the parent's death."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,  # a Ctrl-C in the terminal is for the face, which drains first
    )


@contextlib.contextmanager
def early() -> Iterator[subprocess.Popen[bytes]]:
    """A process to be told its orders inside; nothing of it is left behind."""
    process = spawn()
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    """The child imports the same package as we do, whatever its working folder holds (-P)."""
    # Threads that wait sleep: on a busy machine, spinning takes the cores from those that compute
    # (measured with two threads at a load of 8: a step of one row 0.1 s instead of 0.7 s or more).
    environment = {"OMP_WAIT_POLICY": "passive"} | child_environment()
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    return environment
