"""Simulate the engine core on the fake device, and report. No torch, no model.

    python tools/sim.py --steps 10000000 --save     the long run, on all cores given by --workers
    python tools/sim.py --seed 1234                 one scenario again, with its fault
    python tools/sim.py --seed 1234 --shrink        its smallest form, as JSON for tests/kit/faults

Each worker is a process of its own that takes every n-th seed; a fault does not stop it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.kit.scenario import draw  # noqa: E402
from tests.kit.shrink import shrink  # noqa: E402
from tests.kit.simulation import run_seed, simulate  # noqa: E402
from tests.kit.workload import compare  # noqa: E402

FAULTS = 10  # a worker that has seen so many stops


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000, help="how many to simulate")
    parser.add_argument("--start", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="run one scenario only")
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: find the smallest form of its fault"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/sim.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seed is not None:
        return one(args.seed, args.shrink)
    if args.part is not None:
        print(json.dumps(part(args.start + args.part, args.workers, args.steps)), flush=True)
        return 0
    return report(args)


def one(seed: int, small: bool) -> int:
    scenario = draw(seed)
    if small:
        print(shrink(scenario))
        return 0
    print(dict(simulate(scenario)))
    return 0


def part(first: int, stride: int, steps: int) -> dict[str, Any]:
    """One worker's seeds, until it has done its share of the steps."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    seed, said = first, time.monotonic()
    while seen["steps"] < steps and len(faults) < FAULTS:
        try:
            seen += run_seed(seed)
        except Exception as error:
            faults.append(f"seed {seed}: {type(error).__name__}: {error}")
            print(faults[-1], file=sys.stderr, flush=True)
        seen["seeds"] += 1
        seed += stride
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"  worker at seed {seed}: {seen['steps']:,} steps", file=sys.stderr, flush=True)
    return {"seen": seen, "faults": faults, "last": seed}


def report(args: argparse.Namespace) -> int:
    began = time.monotonic()
    share = -(-args.steps // args.workers)
    command = [sys.executable, __file__, "--steps", str(share), "--start", str(args.start)]
    command += ["--workers", str(args.workers), "--part"]
    running = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(args.workers)
    ]
    parts = [ended(p) for p in running]
    seen: Counter[str] = Counter()
    for p in parts:
        seen += Counter(p["seen"])
    faults = [f for p in parts for f in p["faults"]]
    seconds = time.monotonic() - began
    steps, seeds = seen.pop("steps", 0), seen.pop("seeds", 0)
    compared = compare()
    saved = {
        "steps": steps,
        "seeds": seeds,
        "first_seed": args.start,
        "violations": faults,
        "seconds": round(seconds, 1),
        "covered": dict(sorted(seen.items())),
        "compared": compared,
    }
    show(saved)
    if args.save and steps < args.steps:
        print("not saved: fewer steps than asked for")
    elif args.save:
        path = ROOT / "benchmarks" / "sim.json"
        path.write_text(json.dumps(saved, indent=1) + "\n")
        print(f"saved {path.relative_to(ROOT)}")
    return 1 if faults else 0


def ended(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """What a worker found; one that was killed found nothing, and that is a fault too."""
    text = worker.communicate()[0]
    return json.loads(text) if text else {"seen": {}, "faults": [f"a worker ended with {worker.returncode}"]}


def show(saved: dict[str, Any]) -> None:
    print(f"\n{saved['steps']:,} steps of {saved['seeds']:,} scenarios in {saved['seconds']:,} s")
    print(f"violations: {len(saved['violations'])}")
    for fault in saved["violations"]:
        print(f"  {fault}")
    print("\ncovered (times)")
    for name, count in saved["covered"].items():
        print(f"  {name:24} {count:>14,}")
    for title, rows in saved["compared"].items():
        print(f"\n{title}")
        for name, values in rows.items():
            print(f"  {name:44} " + "  ".join(f"{k} {v}" for k, v in values.items()))


if __name__ == "__main__":
    sys.exit(main())
