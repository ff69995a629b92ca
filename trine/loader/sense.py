"""What of a config.json can be seen to make no sense, whatever the family: said before anything is read or drawn.

It does not know families (they check what they read themselves) nor tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError, Unsupported

QUANTIZATIONS = ("quantization_config", "compression_config")  # the second as older checkpoints say it


def check(config: dict[str, Any], path: Path, *, dummy: bool) -> None:
    """CheckpointError names the field that makes no sense; Unsupported what a quantized checkpoint needs."""
    for name in ("torch_dtype", "dtype"):
        value = config.get(name)
        if value is not None and not isinstance(value, str):
            raise _bad(path, name, value, "the name of a type such as bfloat16 is wanted, or leave it out")
    for name, value in config.items():
        if name.endswith(("norm_eps", "norm_epsilon")) and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < 1:
                raise _bad(path, name, value, "a number between 0 and 1 is wanted, such as 1e-05")
    for name in QUANTIZATIONS:
        if (value := config.get(name)) is not None:
            _refuse_quantized(name, value, path, dummy)


def _refuse_quantized(name: str, value: Any, path: Path, dummy: bool) -> None:
    """There are no products for such weights; plain ones in their place would be another model, and another speed."""
    if not isinstance(value, dict):
        raise _bad(path, name, value, "an object is wanted, or leave it out")
    told = value.get("quant_method") or value.get("quant_type") or "a method that it does not name"
    method = str(told)[:40]
    needs = f"which needs products for weights in {method}, and there are none"
    fix = (
        f"random weights would be plain ones, and their speed another; remove {name} to measure these"
        if dummy
        else "take the model as it was published before, in 16 or 32 bits, or as a .gguf file"
    )
    raise Unsupported(f"{path}: has {name} ({method}), {needs}; {fix}")


def _bad(path: Path, name: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name} is {value!r:.60}; {wanted}")
