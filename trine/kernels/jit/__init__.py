"""The kernels in Triton: the only modules that import it. Families import them when they need them.

Every module here has a function

    def samples() -> list[Sample]: ...

with at least one Sample for each kernel (a `@triton.jit` function that no other one calls): what types and
constants a caller really uses. A test compiles all of them, without a GPU, for each kind of GPU there is; a
kernel without a sample fails it. It does not know what the kernels do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# (backend, architecture, lanes of a warp) as Triton names its targets: A100, H100/H200, B200, MI300.
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))


class Sample(NamedTuple):
    """One way to call a kernel.

        Sample(add_norm, {"X": "*bf16", "eps": "fp32", "rows": "i32"}, {"BLOCK": 4096}, {"num_warps": 8})

    Types are Triton's: "*bf16", "*fp16", "*fp32", "*fp8e4nv", "*i32", "*i64", "i32", "fp32". All pointers are
    taken to be multiples of 16; "i32/16" is a number that is one. The constant PDL, if the kernel has it, is set by the test: on for sm_90 and
    later, off elsewhere. A target that Triton itself cannot serve (fp8 has other types there) is left out
    with `targets`."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any] = {}
    options: dict[str, Any] = {}  # num_warps, num_stages
    targets: tuple[tuple[str, Any, int], ...] = TARGETS
