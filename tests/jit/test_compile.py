"""Every kernel in trine/kernels/jit compiles for every kind of GPU, and none is without a sample."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "trine/kernels/jit").glob("*.py") if path.stem != "__init__")

# Runs in a process of its own, since the interpreter, once it is on, replaces the compiler.
CODE = """
import ast, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from trine.kernels.jit import TARGETS

module = import_module(f"trine.kernels.jit.{sys.argv[1]}")
functions = {k: v for k, v in vars(module).items() if isinstance(v, JITFunction) and v.__module__ == module.__name__}
called = {n.id for v in functions.values() for n in ast.walk(ast.parse(v.src)) if isinstance(n, ast.Name)}
samples = module.samples()
lacking = set(functions) - called - {sample.kernel.fn.__name__ for sample in samples}
assert not lacking, f"kernels without a sample: {sorted(lacking)}"
for sample, target in [(s, t) for t in TARGETS for s in samples if t in s.targets]:
    print(f"for {target}: {sample.kernel.fn.__name__}", file=sys.stderr)
    kernel, names = sample.kernel, sample.kernel.arg_names
    pdl = target[0] == "cuda" and target[1] >= 90 and "PDL" in names
    constants = dict(sample.constants) | ({"PDL": pdl} if "PDL" in names else {})
    types = {name: sample.types.get(name, "constexpr") for name in names}
    assert set(names) == set(sample.types) | set(constants), (kernel, set(names) ^ (set(sample.types) | set(constants)))
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*") or types[name].endswith("/16")}
    types = {name: kind.removesuffix("/16") for name, kind in types.items()}
    options = dict(sample.options) | ({"launch_pdl": True} if pdl else {})
    made = triton.compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget(*target), options=options)
    assert made.metadata.shared <= (227 * 1024 if target[0] == "cuda" and target[1] >= 90 else 163 * 1024 if target[0] == "cuda" else 64 * 1024), (
        kernel, made.metadata.shared)
"""


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile(module: str, pytestconfig: pytest.Config) -> None:
    """One process for all kinds of GPU. What did not change since the last run comes from Triton's own cache, which
    knows sources, options and versions."""
    pytest.importorskip("triton", reason="triton is not installed")
    cache = pytestconfig.rootpath / ".pytest_cache" / "triton"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, module],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_there_are_kernels() -> None:
    assert MODULES
