"""What a person types becomes a path, or an error that says what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from trine import catalog
from trine.errors import CheckpointError, ConfigError
from trine.loader import hub
from trine.loader.fetch import locate


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the hub and the catalog were asked for; neither is reached."""
    seen: list[Any] = []

    def fetch(name: str, revision: str | None) -> Path:
        seen.append((name, revision))
        return Path("/hub")

    def pull(name: str, progress: Any) -> Path:
        seen.append((name, progress))
        return Path("/cache")

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(catalog, "pull", pull)
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_local_path_comes_first(asked: list[Any], tmp_path: Path) -> None:
    for folder in (tmp_path / "smollm2", tmp_path / "org/name", tmp_path / "here"):
        folder.mkdir(parents=True)
    (tmp_path / "m.GGUF").write_bytes(b"x")
    assert locate("smollm2") == Path("smollm2")
    assert locate("org/name") == Path("org/name")
    assert locate(str(tmp_path / "m.GGUF")) == tmp_path / "m.GGUF"
    assert locate("../" + tmp_path.name + "/here") == Path(f"../{tmp_path.name}/here")
    assert asked == []


def test_then_the_catalog_then_the_hub(asked: list[Any]) -> None:
    def progress(done: int, total: int) -> None: ...

    assert locate("smollm2", None, progress) == Path("/cache")
    assert locate("org/name") == Path("/hub")
    assert locate("Org-1/na.me_2", "v1.0/x") == Path("/hub")
    assert asked == [("smollm2", progress), ("org/name", None), ("Org-1/na.me_2", "v1.0/x")]


def test_a_file_with_the_name_of_the_catalog_does_not_hide_it(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "smollm2").write_bytes(b"notes")
    assert locate("smollm2") == Path("/cache")


NAMES = [
    "../x",
    "..\\x",
    "/no/such/place",
    "./x",
    "~/no-such-model",
    "~no-such-user/x",
    "a/b/c",
    "org/../name",
    "org/",
    "/name",
    "org//name",
    "-org/name",
    "org/name-",
    "org/na..me",
    "org/na--me",
    "org/n%2fme",
    "no.gguf",
    "org/no.gguf",
    "CON",
    "org/name:latest",
    "https://x.org/y",
]


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *("org/name\0", "\0", "", "org/na me", "org/naḿe", "‥/x", "org/na\nme", "x\udc80y"),
        *("x" * 4096, "o" * 97 + "/x", "x/" + "y" * 4096),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_names_that_are_refused_before_anything_is_asked(asked: list[Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(name)
    assert caught.value.field == "model" and len(str(caught.value)) < 1500
    assert asked == []


def test_a_name_like_one_of_the_catalog(asked: list[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"no model is called 'smolm2': did you mean smollm2\?.* hub id org/name"
    ):
        locate("smolm2")


def test_a_file_that_is_no_model(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"notes\.txt is a file, but not a \.gguf file"):
        locate("notes.txt")


def test_a_revision_is_for_the_hub(asked: list[Any], tmp_path: Path) -> None:
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(ConfigError, match="a revision is for hub ids") as caught:
            locate(name, "main")
        assert caught.value.field == "revision"


@pytest.mark.parametrize("revision", ["../x", "a/../b", "", "-x", "/x", "x\0", "x" * 200, "a b"])
def test_revisions_that_are_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="is not a branch, tag or commit") as caught:
        hub.fetch("org/name", revision)
    assert caught.value.field == "revision"


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (
            errors.LocalEntryNotFoundError("no connection\nmore"),
            CheckpointError,
            "no connection. Is this machine online",
        ),
        (ConnectionError("unreachable"), CheckpointError, "unreachable. Is this machine online"),
        (errors.HfHubHTTPError("502 Bad Gateway", response=RESPONSE), CheckpointError, "502 Bad Gateway"),
        (
            errors.RepositoryNotFoundError("404", response=RESPONSE),
            ConfigError,
            "the hub has no model org/name",
        ),
        (errors.GatedRepoError("403", response=RESPONSE), CheckpointError, "asks for an agreement"),
        (
            errors.RevisionNotFoundError("404", response=RESPONSE),
            ConfigError,
            "org/name has no revision 'v9'",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_goes_wrong_at_the_hub(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: Any, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=reason):
        hub.fetch("org/name", "v9")


def test_only_some_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        wanted.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="publishes no safetensors weights"):
        hub.fetch("org/name", None)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert hub.fetch("org/name", None) == tmp_path
    good = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    bad = [
        "pytorch_model.bin",
        "modeling.py",
        "onnx/config.json",
        "x/model.safetensors",
        "tf_model.h5",
        "m.gguf",
    ]
    patterns = {key: wanted[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(good + bad, **patterns)) == good


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub's cache with one model of weights and one of something else."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, file, commit in (
        ("models--org--name", "model.safetensors", "a" * 40),
        ("models--org--other", "model.bin", "b" * 40),
    ):
        snapshot = tmp_path / name / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (tmp_path / name / "blobs").mkdir()
        (tmp_path / name / "blobs" / "b1").write_bytes(bytes(1000))
        (snapshot / file).symlink_to(tmp_path / name / "blobs" / "b1")
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text(commit)
    return tmp_path


def test_models_in_the_hubs_cache_are_listed_and_removed(cache: Path) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / ("a" * 40)
    assert hub.cached() == [hub.Cached("org/name", 1000, snapshot)]
    assert catalog.installed()[-1] == catalog.Installed("org/name", 1000, snapshot, "")
    assert catalog.remove("org/name") == 1000
    assert hub.cached() == [] and not snapshot.exists()
    with pytest.raises(ConfigError, match="org/name is not in the hub's cache"):
        catalog.remove("org/name")
    assert (cache / "models--org--other").exists()


def test_without_a_cache_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "absent"))
    assert hub.cached() == []
    with pytest.raises(ConfigError, match="is not in the hub's cache"):
        hub.remove("org/name")


def test_a_model_of_the_cache_is_found_offline(cache: Path) -> None:
    assert hub.fetch("org/name", None) == cache / "models--org--name" / "snapshots" / ("a" * 40)
    with pytest.raises(CheckpointError, match="Is this machine online"):
        hub.fetch("org/absent", None)
