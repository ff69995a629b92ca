"""Rule S8: kill -9 of the parent leaves no engine and no socket, whatever both were doing."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 3.0  # the promise


@contextmanager
def family(phase: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A parent that has reached `phase`, its engine's process id, its run folder."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.parent_process", phase],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    folder = ""
    try:
        assert parent.stdout
        pid, folder = parent.stdout.readline().split()
        assert parent.stdout.readline() == "reached\n"
        yield parent, int(pid), Path(folder)
    finally:
        parent.kill()
        parent.communicate()
        shutil.rmtree(folder, ignore_errors=True)  # the next server would do it


def gone(descriptor: int) -> bool:
    """Waits for the end of a process that is not ours."""
    return bool(select.select([descriptor], [], [], SECONDS)[0])


@pytest.mark.parametrize("phase", ["spawned", "hold", "idle", "busy"])
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_no_orphan(phase: str, stopped: bool) -> None:
    with family(phase) as (parent, engine, folder):
        end = os.pidfd_open(engine)
        try:
            if stopped and phase != "spawned":  # before it could ask the kernel, only the pipe ties it
                os.kill(engine, signal.SIGSTOP)
            parent.kill()
            assert gone(end), f"the engine outlived its parent in phase {phase}"
        finally:
            os.close(end)
        assert not any(path.is_socket() for path in folder.glob("*"))


def test_a_parent_that_ends_without_closing_takes_the_engine_along() -> None:
    with family("busy") as (parent, engine, _):
        end = os.pidfd_open(engine)
        parent.terminate()
        assert gone(end)
        os.close(end)
