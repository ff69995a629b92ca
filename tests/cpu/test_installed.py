"""Optional libraries: one that is missing or broken is a reason in the plan, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trine.chip import CHIPS
from trine.errors import Unsupported
from trine.flags import make
from trine.kernels.installed import missing
from trine.kernels.sampling.triton import Triton as Sampling
from trine.kernels.select import select
from trine.kernels.table.triton import Triton as Table
from trine.plan import Plan, resolve
from trine.plan.kernel import want
from trine.plan.machine import Pretended

BREAKS = {
    "a library it lacks": 'raise ImportError("libcuda.so.1: cannot open shared object file\\nmore")',
    "a module it lacks": "import a_module_that_is_nowhere",
    "a loader's error": 'raise OSError("undefined symbol: _ZN3c10")',
    "no words": "raise RuntimeError",
    "another version": "x = 1\nx.y",
    "half a file": "def f(:",
}
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
ON_A_GPU = SimpleNamespace(device="cuda", capability=(9, 0))


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Triton."""
    _forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture(params=BREAKS)
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is found, and its import fails."""
    _forget(monkeypatch)
    (tmp_path / "site" / "triton").mkdir(parents=True)
    (tmp_path / "site" / "triton" / "__init__.py").write_text(BREAKS[request.param])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)


def planned(folder: Path, here: Any = None, real: bool = False, **options: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = make({"model": str(folder), "load_format": "dummy"} | options)
    return resolve(config, folder, here, real=real)


def test_what_is_there_is_not_missing() -> None:
    assert missing("json") is None
    assert (
        missing("nobody_wrote_this", "pip install it")
        == "nobody_wrote_this is not installed (pip install it)"
    )


def test_a_broken_library_is_missing_and_says_why_in_one_line(broken: None) -> None:
    found = missing("triton")
    assert found and found.startswith("triton is installed and cannot be imported: ") and "\n" not in found
    assert Sampling.cannot(ON_A_GPU) == Table.cannot(ON_A_GPU) == found


def test_a_library_that_is_not_there_says_so(absent: None) -> None:
    assert (
        missing("triton") == Sampling.cannot(ON_A_GPU) == Table.cannot(ON_A_GPU) == "triton is not installed"
    )


def test_a_broken_library_keeps_nobody_from_a_cpu(broken: None, tmp_path: Path) -> None:
    offer = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "device": "cpu"}
    found = select("kernels.attention", want("kernels.attention", offer))
    said = {answer.name: answer.cannot for answer in found.answers}
    assert found.name != "triton" and said["triton"], said
    assert planned(tmp_path, real=True).platform == "cpu"


def test_a_gpu_with_a_broken_library_is_refused_in_words(broken: None, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="triton cannot: triton is installed and cannot be imported"):
        planned(tmp_path, Pretended(CHIPS["h200"]), real=True)


def test_a_backend_that_cannot_be_asked_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        order = 1

        @classmethod
        def cannot(cls, want: Any) -> str | None:
            raise ImportError("no such symbol\nin two lines")

    class Sound(Broken):
        order = 2

        @classmethod
        def cannot(cls, want: Any) -> str | None:
            return None

    monkeypatch.setattr("trine.kernels.select.find", lambda kind: {"broken": Broken, "sound": Sound})
    found = select("kernels.attention", ON_A_GPU)
    assert found.name == "sound"
    assert found.why == "the first that can; broken cannot: it cannot be asked: ImportError: no such symbol"
    with pytest.raises(Unsupported, match="'broken' was asked for and cannot: it cannot be asked"):
        select("kernels.attention", ON_A_GPU, "broken")


@pytest.mark.parametrize("chip", CHIPS)
def test_a_plan_for_another_machine_takes_triton_to_be_there(chip: str, absent: None, tmp_path: Path) -> None:
    _is_as_with_triton(planned(tmp_path, platform=chip), chip, "here triton is not installed")


def test_a_plan_for_another_machine_does_not_ask_what_is_broken_here(broken: None, tmp_path: Path) -> None:
    _is_as_with_triton(planned(tmp_path, platform="h200"), "h200", "here triton is installed and cannot be")


def _is_as_with_triton(plan: Plan, chip: str, hint: str) -> None:
    said = {choice.name: choice for choice in plan.choices}
    assert said["triton"].value == "taken to be there" and hint in said["triton"].why
    assert CHIPS[chip].name in said["triton"].why
    assert (plan.fused, plan.table, plan.sampling) == ("triton",) * 3
    assert "none" not in (plan.product, plan.attention)
    assert not [c for c in plan.choices if "triton cannot: triton is" in c.why]


def test_a_plan_says_nothing_of_triton_where_it_is_here(tmp_path: Path) -> None:
    if reason := missing("triton"):
        pytest.skip(reason)
    plan = planned(tmp_path, platform="h200")
    assert "triton" not in {choice.name for choice in plan.choices}


def test_a_plan_for_another_machine_is_the_same_wherever_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for cores in (1, 4, 64):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        made.append(planned(tmp_path, platform="h200").fingerprint())
    assert len(set(made)) == 1
    assert planned(tmp_path, platform="h200").threads == 8
