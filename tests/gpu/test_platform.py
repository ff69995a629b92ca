"""The platform of a GPU: events, a second stream, graphs that share memory, and captures that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trine.registry import find


@pytest.fixture(scope="module")
def platform() -> Any:
    return next(kind for name, kind in find("platforms").items() if name != "cpu" and kind.cannot() is None)()


@pytest.fixture(scope="module")
def device(platform: Any) -> torch.device:
    return platform.device()


def test_facts_and_memory(platform: Any, device: torch.device) -> None:
    facts, (free, total) = platform.facts(), platform.memory()
    assert facts.kind == platform.name and facts.cores > 1 and facts.capability > (0, 0)
    assert 0 < free <= total == facts.memory


def test_events_say_when(platform: Any, device: torch.device) -> None:
    first, last = platform.event(), platform.event()
    x = torch.rand(2048, 2048, device=device)
    first.record()
    for _ in range(20):
        x = x @ x.clamp(-1, 1)
    last.record()
    last.wait()
    assert last.done() and 0 < last.since(first) < 60


def test_pinned_memory_is_copied_without_waiting(platform: Any, device: torch.device) -> None:
    buffer = platform.host_buffer((1000,), torch.int32)
    assert buffer.is_pinned()
    buffer.copy_(torch.arange(1000, dtype=torch.int32))
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = buffer.to(device, non_blocking=True)
        event = platform.event()
        event.record()
        event.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.sum().item() == 499_500


def test_graphs_of_one_pool_are_filled_anew_and_lend_their_memory(
    platform: Any, device: torch.device
) -> None:
    graph, x = platform.graph(), torch.zeros(1000, 1000, device=device)

    def add(n: int) -> torch.Tensor:
        return (x + n) * torch.ones_like(x)

    before = []
    captured = []
    for n in range(6):
        add(n)
        captured.append(graph.capture(lambda n=n: add(n)))
        before.append(torch.cuda.memory_allocated())
    assert max(before) - min(before) < 4_000_000, "each graph keeps a result of its own"
    for value in (1.0, 7.0):
        x.fill_(value)
        for n, one in enumerate(captured):
            one.replay()
            assert one.value.shape == x.shape and (one.value == value + n).all()


def test_a_second_stream_is_captured_with_the_first(platform: Any, device: torch.device) -> None:
    graph, side = platform.graph(), platform.stream()
    x = torch.ones(1 << 16, device=device)

    def both() -> torch.Tensor:
        with side.fork():
            a = x * 2
        b = x * 3
        side.join()
        return a + b

    both()
    captured = graph.capture(both)
    x.fill_(2)
    captured.replay()
    assert (captured.value == 10).all()


@pytest.mark.parametrize("kind", ["python", "waits"])
def test_a_capture_that_fails_says_why_and_harms_nothing(
    platform: Any, device: torch.device, kind: str
) -> None:
    graph, x = platform.graph(), torch.ones(1000, device=device)

    def broken() -> torch.Tensor:
        y = x * 2
        if kind == "python":
            raise ValueError("no")
        return y.sum().item()  # type: ignore[return-value]

    stream = torch.cuda.current_stream()
    with pytest.raises(ValueError if kind == "python" else RuntimeError):
        graph.capture(broken)
    assert torch.cuda.current_stream() == stream
    assert (x * 3).sum().item() == 3000
    captured = graph.capture(lambda: x + 1)
    captured.replay()
    assert (captured.value == 2).all()
    x.fill_(5)
    captured.replay()
    assert (captured.value == 6).all()
