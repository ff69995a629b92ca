"""Compiles the sources in `src` to a library for each instruction set: `python -m trine.kernels.native.build`.

It runs when Trine is installed, where there is a compiler. A library's name holds a hash of its sources: one that
is older than they are is not loaded. It imports nothing of Trine, so that a bare machine can run it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
MADE = HERE / "lib"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-Wno-psabi", "-pthread")

# Instruction sets, the best first: words of /proc/cpuinfo that must all be there, and what the compiler is told.
SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512": (
        ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_vnni", "fma", "f16c"),
        ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
    ),
    "avxvnni": (("avx_vnni", "avx2", "fma", "f16c"), ("-mavxvnni", "-mavx2", "-mfma", "-mf16c")),
    "avx2": (("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
    "portable": ((), ()),
}


def fingerprint() -> str:
    """Of the sources and how they are compiled."""
    found = hashlib.sha256(repr((FLAGS, SETS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def path(name: str, mark: str) -> Path:
    return MADE / f"{name}-{mark}.so"


def build(names: list[str], say: bool = True) -> list[str]:
    """Compile for these instruction sets; which could not be, and why."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return [f"no C++ compiler was found (looked for {', '.join(COMPILERS)})"]
    MADE.mkdir(exist_ok=True)
    mark, failed = fingerprint(), []
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    for name in names:
        made = path(name, mark)
        if made.exists():
            continue
        part = made.with_suffix(f".{os.getpid()}")
        done = subprocess.run([compiler, *FLAGS, *SETS[name][1], *sources, "-o", str(part)], capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            failed.append(f"{name}: {' '.join((done.stderr or 'the compiler failed').split())[:300]}")
            continue
        part.replace(made)
        for old in MADE.glob(f"{name}-*.so"):
            if old != made:
                old.unlink()
        if say:
            sys.stdout.write(f"compiled {made.name}\n")
    return failed


def wanted() -> list[str]:
    """For which instruction sets a library is made here: on other processors than x86-64 the portable one is all."""
    return list(SETS) if platform.machine().lower() in ("x86_64", "amd64") else ["portable"]


if __name__ == "__main__":
    sys.exit("\n".join(build(sys.argv[1:] or wanted())) or None)
