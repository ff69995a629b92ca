"""What the CPU platform says of a machine, and a mesh of one."""

from __future__ import annotations

import pytest
import torch

from trine.errors import Unsupported
from trine.parallel.mesh import Axis, Mesh
from trine.platforms import cpu
from trine.registry import find

GIB = 2**30
MACHINE = {
    "/proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n",
    "/proc/cpuinfo": "processor : 0\nmodel name\t: A Chip\nflags\t\t: fpu avx2 avx512_vnni amx_int8\n",
}


def machine(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> cpu.Cpu:
    monkeypatch.setattr(cpu, "_read", lambda path: (MACHINE | files).get(path, ""))
    return cpu.Cpu()


def test_facts_of_this_machine() -> None:
    facts, (free, total) = cpu.Cpu().facts(), cpu.Cpu().memory()
    assert facts.kind == "cpu" and facts.cores >= 1 and 0 <= free <= total == facts.memory


def test_facts_are_read_from_the_files_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine(monkeypatch, {}).facts()
    assert (facts.chip, facts.memory) == ("A Chip", 16 * GIB)
    assert set(facts.features) == {"avx2", "vnni", "amx"}


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({}, 8, 16),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, 8, 16),
        ({"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"}, 3, 4),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{12 * GIB}"}, 8, 12),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, 8, 16),
    ],
)
def test_a_container_has_what_it_may_use(monkeypatch, files: dict[str, str], free: int, total: int) -> None:
    assert machine(monkeypatch, files).memory() == (free * GIB, total * GIB)


def test_cores_that_a_container_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for text, cores in (("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1)):
        assert machine(monkeypatch, {"/sys/fs/cgroup/cpu.max": text}).facts().cores == cores


def test_every_platform_keeps_the_contract() -> None:
    for name, platform in find("platforms").items():
        assert platform.name == name and isinstance(platform.order, int)
        if platform.cannot() is None:
            assert isinstance(platform().device(), torch.device)


def test_every_platform_that_is_here_orders_and_measures() -> None:
    for platform in (kind() for kind in find("platforms").values() if kind.cannot() is None):
        first, second, side = platform.event(), platform.event(), platform.stream()
        first.record()
        with side.fork():
            x = torch.ones(3, device=platform.device()) * 2
        side.join()
        second.record()
        second.wait()
        platform.synchronize()
        assert first.done() and second.done() and second.since(first) >= 0 and x.sum().item() == 6
        buffer = platform.host_buffer((2, 3), torch.int32)
        assert (buffer.shape, buffer.dtype, buffer.device.type) == ((2, 3), torch.int32, "cpu")
        assert platform.asynchronous == (platform.graph() is not None)


def test_a_platform_that_is_not_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in (find("platforms")["cuda"].cannot() or "")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "without ROCm" in (find("platforms")["rocm"].cannot() or "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in (find("platforms")["cuda"].cannot() or "")


def test_a_mesh_of_one_does_nothing() -> None:
    x = torch.ones(2)
    axis = Mesh().tensor
    assert axis.sum(x) is x and axis.gather(x) is x and axis.share(6) == range(6) and Mesh().size == 1


def test_a_larger_mesh_is_refused() -> None:
    with pytest.raises(Unsupported, match="only one"):
        Axis("tensor", 0, 2).sum(torch.ones(1))
    with pytest.raises(Unsupported, match="5 cannot be divided"):
        Axis("tensor", 0, 2).share(5)
