"""Models of the HuggingFace hub, through its own library and in its own cache, which other programs share.

Only JSON, safetensors and template files at the top of a repository are fetched. The library is imported
when a hub id is really wanted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, ConfigError

WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["*/*"]  # folders: other formats, other precisions

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)


class Cached(NamedTuple):
    """A model in the hub's cache."""

    name: str
    size: int  # bytes
    path: Path


def is_id(name: str) -> bool:
    """Whether `name` has the form org/name; nothing else is ever sent to the hub or made a path."""
    return bool(ID.fullmatch(name)) and ".." not in name and "--" not in name


def fetch(name: str, revision: str | None) -> Path:
    """The folder of a model of the hub, fetched if it is not in the cache. The library shows the progress."""
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(
            f"revision {revision[:100]!r} is not a branch, tag or commit of a hub id", "revision"
        )
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name} asks for an agreement on huggingface.co: accept it there, then run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{name} has no revision {revision!r}", "revision") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no model {name}, or it is private (then run `hf auth login`)", "model"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name} is not in the cache and could not be fetched from the hub: {reason[0][:300]}. Is this machine "
            "online? If not, copy the model folder here and give its path, or serve a name of the catalog"
        ) from None
    folder = Path(str(found))
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name} publishes no safetensors weights, and pickles are never loaded. If it has a .gguf file, "
            "download that and give its path"
        )
    return folder


def cached() -> list[Cached]:
    """Models in the hub's cache that have weights Trine may read."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return []
    return sorted(
        Cached(
            repo.repo_id, repo.size_on_disk, max(repo.revisions, key=lambda r: r.last_modified).snapshot_path
        )
        for repo in repositories
        if repo.repo_type == "model"
        and any(file.file_name.endswith(".safetensors") for r in repo.revisions for file in r.files)
    )


def remove(name: str) -> int:
    """Delete a model from the hub's cache; how many bytes that freed."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    absent = ConfigError(f"{name} is not in the hub's cache, so there is nothing to remove")
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError, ValueError):
        raise absent from None
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.repo_id == name:
            plan = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
            plan.execute()
            return plan.expected_freed_size
    raise absent
