"""Injects faults again and again and prints what came of them as a Markdown table; `make bench-faults`.

Ends with 1 if an outcome was not the stated one.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fault_scene import NotHere
from faults import FAULTS, Bench, Outcome

HEADER = """| fault | stated outcome | as stated | tasks done again: mean (most) | seconds more: mean |
|---|---|---|---|---|"""


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """What came of one fault."""
    count = len(outcomes)
    well = sum(not outcome.problem for outcome in outcomes)
    repeated = [outcome.repeated for outcome in outcomes]
    seconds = sum(outcome.seconds for outcome in outcomes) / count
    return (
        f"| {name} | {FAULTS[name].stated} | {well} of {count} | {sum(repeated) / count:.1f} ({max(repeated)}) "
        f"| {seconds:.0f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(FAULTS), help="names, separated by commas; default: all")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    options = parser.parse_args(argv)
    names = options.faults.split(",")
    unknown = sorted(set(names) - set(FAULTS))
    if unknown or options.repetitions < 1:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAULTS)}" if unknown else "repetitions < 1")
    rows: dict[str, str] = {}
    problems = 0
    with tempfile.TemporaryDirectory(prefix="fedsir-faults-") as folder:
        bench = Bench(Path(folder), options.seed)
        for name in names:
            outcomes: list[Outcome] = []
            for repetition in range(options.repetitions):
                try:
                    outcome = bench.outcome(name, repetition)
                except NotHere as reason:
                    rows[name] = f"| {name} | {FAULTS[name].stated} | not tried: {reason} | | |"
                    break
                outcomes.append(outcome)
                # Progress, and what the table has no room for.
                said = outcome.problem or f"as stated, {outcome.repeated} tasks again"
                print(f"{name} {repetition + 1}/{options.repetitions}: {said}", file=sys.stderr, flush=True)
                problems += bool(outcome.problem)
            else:
                rows[name] = row(name, outcomes)
        print(f"Undisturbed: {bench.calm.tasks} tasks of clients in {bench.calm.seconds:.0f} s; seed {options.seed}.\n")
    print(HEADER, *rows.values(), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    # As Ctrl-C does: the sweeps must be ended, since they have sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Shells let what runs in the background ignore Ctrl-C, and the sweeps would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
