"""The house rules hold, and each of them can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _check():
    spec = importlib.util.spec_from_file_location("check", ROOT / "tools" / "check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = _check()


@pytest.mark.parametrize(
    "name,text", list(check.sources()), ids=lambda value: value if value.endswith(".py") else ""
)
def test_a_file_keeps_the_house_rules(name: str, text: str) -> None:
    assert check.broken(name, text) == []


@pytest.mark.parametrize(
    "name,text,word",
    [
        ("trine/x.py", '"""x"""\nimport pickle', "S1"),
        ("trine/x.py", '"""x"""\nfrom multiprocessing import Pool', "S1"),
        ("tools/x.py", '"""x"""\neval("1")', "S1"),
        ("trine/x.py", '"""x"""\ntorch.load("a")', "S1"),
        ("trine/x.py", '"""x"""\nsocket.recv_pyobj()', "S1"),
        ("trine/x.py", '"""x"""\nrun("a", shell=True)', "shell"),
        ("trine/x.py", '"""x"""\nimport httpx', "outwards"),
        ("trine/x.py", '"""x"""\nfrom huggingface_hub import snapshot_download', "outwards"),
        ("trine/x.py", '"""x"""\nfrom urllib import request', "outwards"),
        ("trine/catalog.py", '"""x"""\nimport urllib.request', "outwards"),
        ("trine/x.py", '"""x"""\nos.environ["A"]', "environment"),
        ("trine/x.py", '"""x"""\ntorch.cuda.is_available()', "platforms/cuda.py"),
        ("trine/x.py", '"""x"""\nfrom torch import cuda', "platforms/cuda.py"),
        ("trine/x.py", '"""x"""\nimport torch.cuda', "platforms/cuda.py"),
        ("trine/x.py", '"""x"""\ndef f():\n    import triton', "kernels/jit"),
        ("trine/x.py", '"""x"""\ndef f():\n    global a\n    a = 1', "global"),
        ("trine/x.py", '"""x"""\n' + "a = 1\n" * 600, "at most 500"),
        ("trine/x.py", '"""x"""\ndef f():\n' + "    a = 1\n" * 61, "at most 60"),
        ("trine/x.py", "a = 1", "header"),
        ("trine/utils.py", '"""x"""', "file name"),
        ("trine/cache/x.py", '"""The prefill."""', "gap"),
        ("trine/models/x.py", '"""Of this rank."""', "ranks"),
        ("trine/x.py", '"""x"""\n# TODO later', "TODO"),
    ],
)
def test_a_broken_rule_is_seen(name: str, text: str, word: str) -> None:
    assert any(word in fault for fault in check.broken(name, text))


def test_every_module_imports_without_torch_or_a_vendor_library_until_it_is_needed() -> None:
    """The faces never load torch: `trine serve` answers health while the engine process loads it."""
    code = (
        "import sys\n"
        "import trine, trine.cli, trine.flags, trine.engine.client, trine.server.app, trine.text.tokenizer\n"
        "import trine.catalog, trine.loader.fetch, trine.core.messages, trine.cache.manager, trine.scheduler.scheduler\n"
        "bad = [m for m in ('torch', 'transformers', 'triton', 'xgrammar', 'numba', 'scipy') if m in sys.modules]\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_public_namespace_is_exactly_what_it_says() -> None:
    import trine

    assert set(trine.__all__) == {"LLM", "AsyncLLM", "Sampling"}
    for name in trine.__all__:
        assert getattr(trine, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = trine.nothing
