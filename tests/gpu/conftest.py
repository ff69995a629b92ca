"""These tests need a GPU that this torch can use; without one each is skipped, with the platforms' own reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from trine.registry import find

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    said = {name: kind.cannot() for name, kind in find("platforms").items() if name != "cpu"}
    if None in said.values():
        return
    why = "no GPU: " + "; ".join(f"{name}: {reason}" for name, reason in said.items())
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))
