"""Break the engine core on purpose, and see that the simulation notices: its teeth.

    python tools/mutants.py             all of tools/mutants.toml; exit status 1 if one survives
    python tools/mutants.py --only border --only abort      those whose words match

A mutant is data: a file, a piece of its text that occurs once, what it becomes, and what that is.
Each is applied to a copy of the package in a temporary folder, never to the working tree, and
the copy is first simulated and then, if that found nothing, put through the named properties.
The unbroken copy goes first: it must pass, or a "kill" would mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutants.toml")
STEPS = 20_000  # simulated, at most, for each mutant
SECONDS = 180  # a mutant that hangs is noticed too
SIMULATE = "import sys; from tests.kit.simulation import hunt; hunt(int(sys.argv[1]), int(sys.argv[2]))"
PROPERTIES = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/host/test_sim_properties.py"]


@dataclass(frozen=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str

    def why_not(self, root: Path = ROOT) -> str | None:
        """Why it cannot be applied; None if it can."""
        count = (root / self.file).read_text().count(self.old)
        return None if count == 1 else f"its text occurs {count} times in {self.file}"

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def mutants() -> list[Mutant]:
    return [Mutant(**m) for m in tomllib.loads(LIST.read_text())["mutant"]]


def killed(mutant: Mutant | None, steps: int = STEPS) -> str | None:
    """How the tests noticed; None if they did not. Without a mutant: the code as it is."""
    with tempfile.TemporaryDirectory(prefix="trine-mutant-") as folder:
        root = Path(folder)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "trine", root / "trine", ignore=ignore)
        shutil.copytree(ROOT / "tests" / "kit", root / "tests" / "kit", ignore=ignore)
        (root / "tests" / "host").mkdir()
        shutil.copy(ROOT / PROPERTIES[-1], root / PROPERTIES[-1])
        if mutant:
            mutant.apply(root)
        return _run(root, ["-c", SIMULATE, "0", str(steps)], "simulation") or _run(
            root, PROPERTIES, "property"
        )


def _run(root: Path, arguments: list[str], by: str) -> str | None:
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{by}: hangs"
    if done.returncode == 0:
        return None
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "Error" in x or x.startswith("FAILED")]
    return f"{by}: {lines[-1][:100] if lines else 'failed'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="words of what a mutant is")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    chosen = [m for m in mutants() if not args.only or any(w in m.what for w in args.only)]
    stale = [f"{m.what}: {why}" for m in chosen if (why := m.why_not())]
    if stale:
        print("these no longer apply:", *stale, sep="\n  ")
        return 1
    if why := killed(None):
        print(f"the code as it is fails: {why}")
        return 1
    began = time.monotonic()
    dead = 0
    with ThreadPoolExecutor(args.workers) as pool:
        for mutant, how in zip(chosen, pool.map(killed, chosen), strict=True):
            dead += how is not None
            print(f"{'killed  ' if how else 'SURVIVED'}  {mutant.what:55}  {how or ''}", flush=True)
    print(f"\n{dead}/{len(chosen)} killed in {time.monotonic() - began:.0f} s")
    return 0 if dead == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
