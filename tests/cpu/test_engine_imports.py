"""What the engine's process must not import, because the first answer waits for it: torch is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.test_worker import write_model
from tests.kit.imports import HEAVY, modules

# Compilers, and what comes with them: nothing here is compiled by torch.
COMPILERS = {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.onnx"}
ENGINE = """
import sys, threading
from pathlib import Path
from trine.config import Config
from trine.engine import lean, loop
from trine.engine.start import start
lean.install()
imports = threading.Thread(target=loop._import)
imports.start()
engine, ready = start(Config(model="one", platform="cpu", **{OPTIONS}), Path({PATH!r}), imports=imports)
engine.executor.close()
"""


def started(path: Path, **options: str) -> set[str]:
    """What an engine has imported that started as its process does."""
    return modules(ENGINE.replace("{OPTIONS}", repr(options)).replace("{PATH!r}", repr(str(path))))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", 1)


def test_an_engine_imports_torch_and_nothing_else_that_is_heavy(path: Path) -> None:
    found = started(path)
    allowed = {"torch", "numpy", "safetensors"}  # numbers, and the file of this model
    assert "torch" in found
    assert not (HEAVY - allowed) & found
    assert not COMPILERS & found


def test_random_weights_have_all_of_torch(path: Path) -> None:
    assert "torch._prims.rng_prims" in started(path, load_format="dummy")


COMPILER = """
from trine.engine import lean
lean.install()
import sys, torch
before = len(vars(sys.modules[lean.PUT_OFF]))
import torch._dynamo
after = len(vars(sys.modules[lean.PUT_OFF]))
assert before < 20 < 200 < after, (before, after)
assert not any(isinstance(finder, lean.Later) for finder in sys.meta_path)
"""


def test_a_compiler_finds_what_was_put_off() -> None:
    assert "torch._dynamo" in modules(COMPILER)


def test_what_was_put_off_is_there_where_nobody_puts_off() -> None:
    """Its name is still what torch imports: else it would be in vain, and nobody would notice."""
    assert "torch._meta_registrations" in modules("import torch")
