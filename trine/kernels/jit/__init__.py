"""The kernels in Triton: the only modules that import it. Families import them when they need them.

Every module here has a function

    def samples() -> list[Sample]: ...

with at least one Sample for each kernel (a `@triton.jit` function that no other one calls): what types and
constants a caller really uses. A test compiles all of them, without a GPU, for each kind of GPU there is; a
kernel without a sample fails it. It does not know what the kernels do.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

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


def quick(module: ModuleType) -> Any:
    """Its kernels by name, to be launched on one device as ever, `kernels.name[grid](...)`, but quickly. Under Triton's
    interpreter the module itself."""
    from triton.runtime.jit import JITFunction

    mine = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return SimpleNamespace(**{name: Quick(kernel) for name, kernel in mine.items()}) if mine else module


class Quick:
    """A kernel that is asked only once which of its compiled forms serves a kind of call.

    Triton decides that anew on each launch, which takes several times as long as the launch. What it looks at is
    compared here (`kind`). Arguments that are no constants must be given by place."""

    def __init__(self, kernel: Any) -> None:
        from triton import knobs

        self.kernel = kernel
        self.hooks = knobs.runtime  # of who watches launches
        self.fixed: list[bool] = [param.is_constexpr for param in kernel.params]
        self.forms: dict[
            tuple[Any, ...], tuple[Any, tuple[Any, ...]]
        ] = {}  # compiled, and constants behind `args`

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
        key = (
            tuple(more),
            *more.values(),
            *[a if c else kind(a) for a, c in zip(args, self.fixed, strict=False)],
        )
        form = self.forms.get(key)
        if form is None or _watched(self.hooks.launch_enter_hook):
            compiled = self.kernel[grid](*args, **more)
            names = self.kernel.arg_names[len(args) :]
            assert all(self.fixed[len(args) :]), f"{names} must be given by place, but for constants"
            self.forms[key] = compiled, tuple(more[name] for name in names)
            return
        compiled, rest = form
        x, y, z = (*grid, 1, 1)[:3]
        compiled.run(
            x, y, z, _stream(), compiled.function, compiled.packed_metadata, None, None, None, *args, *rest
        )


def kind(value: Any) -> Any:
    """What Triton's choice of a compiled form depends on."""
    if isinstance(value, Tensor):
        return value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,)
    if isinstance(value, bool):
        return bool
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return 1 if value == 1 else (wide, value >= 2**63, value % 16 == 0)
    if hasattr(value, "block_shape"):
        return value.base.dtype, *value.block_shape
    return type(value)


def _watched(hook: Any) -> bool:
    """Whether a profiler wants to hear of launches."""
    return bool(getattr(hook, "calls", hook))


def _stream() -> int:
    from triton.runtime import driver

    return driver.active.get_current_stream(driver.active.get_current_device())
