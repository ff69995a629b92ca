"""Run folders: private, unlike each other, gone when their owner is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from trine.engine import folder as folders
from trine.engine.folder import RunFolder, sweep

OWNER = "import sys; from pathlib import Path; from trine.engine.folder import RunFolder; f = RunFolder(Path(sys.argv[1])); print(f.path, flush=True); sys.stdin.read()"


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_a_folder_is_private_and_goes_when_closed(tmp_path: Path) -> None:
    one, two = RunFolder(tmp_path), RunFolder(tmp_path)
    assert one.path != two.path and one.path.stat().st_mode & 0o777 == 0o700
    one.close(), one.close()
    assert not one.path.exists() and two.path.exists()
    two.close()


def test_it_goes_with_a_normal_exit(tmp_path: Path) -> None:
    process, path = owner(tmp_path)
    assert path.exists()
    end(process)
    assert not path.exists()


def test_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    (dead, lost), (living, kept) = owner(tmp_path), owner(tmp_path)
    os.kill(dead.pid, signal.SIGKILL)
    end(dead)
    (lost / "admin").touch()
    stranger = tmp_path / "trine-other"
    stranger.mkdir()
    fresh = tmp_path / f"{folders.PREFIX}fresh"  # just made: its owner has not locked it yet
    fresh.mkdir()
    assert lost.exists() and sweep(tmp_path) == [lost]
    assert kept.exists() and stranger.exists() and fresh.exists() and not lost.exists()
    os.utime(fresh, (1, 1))
    (tmp_path / f"{folders.PREFIX}link").symlink_to(stranger)
    assert sweep(tmp_path) == [fresh] and stranger.exists()
    end(living)


def test_a_deep_temporary_folder_is_too_long_for_a_socket(tmp_path: Path) -> None:
    assert folders._roomy(Path("/tmp")) == Path("/tmp")
    assert folders._roomy(tmp_path / ("x" * 80)) == Path("/tmp")
