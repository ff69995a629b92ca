"""Any schedule gives the same tokens: random scenarios of the engine core on the fake device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.kit.scenario import Scenario, draw
from tests.kit.simulation import kept, run_seed, simulate

PARTS, STEPS = 40, 5_000  # 200,000 steps in all, in parts that workers share


@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_gives_the_same_tokens(part: int) -> None:
    seen: Counter[str] = Counter()
    seed = part * 100_000
    while seen["steps"] < STEPS:
        seen += run_seed(seed)
        seed += 1


@pytest.mark.parametrize("path", kept(), ids=lambda p: p.stem)
def test_faults_once_found_stay_away(path: Path) -> None:
    """Each is the smallest scenario that showed one."""
    simulate(msgspec.json.decode(path.read_bytes(), type=Scenario))


def test_the_scenarios_reach_every_feature() -> None:
    """A feature that no seed reaches would be tested by nothing."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += run_seed(seed)
    for name in (
        "accepted", "aborts", "cached tokens", "copies", "corrections", "drafts", "flushes", "forced", "joins",
        "losses", "masks", "no free page", "preemptions", "refused", "replays", "resumed", "rows that share",
        "shares", "shares end", "shares in shares", "waits for a sibling", "wholly cached", "with a mix",
    ):  # fmt: skip
        assert seen[name] > 0, f"{name} never happened"


def test_a_scenario_is_the_same_each_time() -> None:
    assert draw(5) == draw(5)
    assert run_seed(5) == run_seed(5)
    assert msgspec.json.decode(msgspec.json.encode(draw(5)), type=Scenario) == draw(5)
