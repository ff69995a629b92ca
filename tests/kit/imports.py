"""What a process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Each takes a tenth of a second to import, or a good deal more, and a server has no use for it.
HEAVY = {
    "IPython", "PIL", "httpx", "huggingface_hub", "jinja2", "matplotlib", "numpy", "pandas", "requests", "rich",
    "safetensors", "scipy", "sympy", "torch", "transformers", "triton", "yaml",
}  # fmt: skip


def modules(program: str, *flags: str) -> set[str]:
    """What a process that ran `program` has imported."""
    show = "import sys; print('\\n'.join(['', *sys.modules]))"
    done = subprocess.run(
        [sys.executable, *flags, "-c", f"{program}\n{show}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())
