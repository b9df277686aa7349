"""Hundreds of short runs in one `fedsir sweep run`, watched from outside: what grows? Run as a file; Linux.

    python tests/faults/soak.py --runs 500

After each run, memory, open files and threads of the sweep's process, of its actors and of Ray are read from /proc, and
what is in Ray's object store from its own report. Prints a Markdown table of the first runs after a warm-up against the
last ones, and ends with 1 if something has grown beyond its bound or the sweep has not gone well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from processes import PROC, Usage, name, tree, usage

COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()"]
METHODS = ("fedavg", "oct_fedsir", "fedcorr", "fedelc", "rofl")
"""A method that does no more than average, and such with stages, state of clients and shared results."""

COHORTS = 5
"""Sets of images; each is sent to the actors anew where the one before it was another."""

STORE = "Ray's object store"
MIB = 2**20


def grid(runs: int, figures: bool) -> str:
    """A grid of at least so many runs."""
    seeds = -(-runs // (len(METHODS) * COHORTS))
    return f"""
name: soak
base: demo
set:
  - data.image_size=16
  - data.train_images=160
  - data.test_images=40
  - federation.clients=2
  - federation.clean_clients=1
  - training.rounds=2
  - training.batch_size=16
  - evaluation.bootstrap_samples=20
  - execution.actors=2
  - tracking.figures={str(figures).lower()}
axes:
  cohort: {{key: data.seed, values: {list(range(COHORTS))}}}
methods: [{", ".join(METHODS)}]
seeds: {list(range(seeds))}
"""


@dataclass(frozen=True)
class Sample:
    """What there was when a run had ended. done: runs so far. figures: by the name of what they are about."""

    done: int
    seconds: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Bound:
    """Most that a figure may grow from its first to its last runs: by a share of it, or by an amount if that is more.

    unit: what it is shown in.
    """

    share: float
    amount: float
    unit: str = ""

    def allows(self, first: float, last: float) -> bool:
        return last <= first + max(self.share * first, self.amount)

    @property
    def text(self) -> str:
        amount = f"{self.amount / MIB if self.unit else self.amount:g}"
        share = f"{100 * self.share:g} %" if self.share else ""
        return " or ".join(part for part in (share, f"{amount} {self.unit}".strip()) if part)


# Single numbers jump by a few, as runs overlap; a leak of one per run would be hundreds.
MEMORY, HANDLES, FEW = Bound(0.1, 8 * MIB, "MiB"), Bound(0.0, 5), Bound(0.0, 3)
BOUNDS: Mapping[str, Bound] = {
    "sweep: resident memory": MEMORY,
    "sweep: open files": HANDLES,
    "sweep: threads": FEW,
    "actors: resident memory": MEMORY,
    "actors: open files": HANDLES,
    "actors: threads": FEW,
    "actors: number": Bound(0.0, 0),
    "Ray: resident memory": MEMORY,
    "Ray: open files": HANDLES,
    "Ray: threads": FEW,
    "Ray: processes": FEW,
    f"{STORE}: memory touched": MEMORY,
    f"{STORE}: bytes of objects in use": Bound(0.1, 2 * MIB, "MiB"),
    f"{STORE}: objects": Bound(0.1, 20),
}


def sampled(root: int) -> dict[str, float]:
    """Figures of a sweep's process, its actors and everything else that it has started, which is Ray's."""
    names = {pid: name(pid) for pid in tree(root)}
    kinds: dict[str, list[Usage]] = {"sweep": [], "actors": [], "Ray": []}
    for pid, title in names.items():
        kind = "sweep" if pid == root else "actors" if title.startswith("ray::ClientActor") else "Ray"
        if (taken := usage(pid)) is not None:
            kinds[kind].append(taken)
    found = {"actors: number": float(len(kinds["actors"])), "Ray: processes": float(len(kinds["Ray"]))}
    for kind, usages in kinds.items():
        found[f"{kind}: resident memory"] = sum(taken.memory for taken in usages)
        found[f"{kind}: open files"] = sum(taken.handles for taken in usages)
        found[f"{kind}: threads"] = sum(taken.threads for taken in usages)
    for raylet in (pid for pid, title in names.items() if title == "raylet"):
        found |= _store(raylet)
    return found


def _store(raylet: int) -> dict[str, float]:
    """Of the object store what its file takes, and what the raylet reports of it every ten seconds."""
    found: dict[str, float] = {}
    with suppress(OSError):
        for handle in (PROC / str(raylet) / "fd").iterdir():
            # It has no name any more, so it is looked at through the handle.
            if "/plasma" in str(handle.readlink()):
                found[f"{STORE}: memory touched"] = 512.0 * handle.stat().st_blocks
        words = (PROC / str(raylet) / "cmdline").read_text().split("\0")
        session = next(Path(word.split("=", 1)[1]) for word in words if word.startswith("--session_dir="))
        report = (session / "logs" / "debug_state.txt").read_text()
        for key, label in (("pinned objects size", "bytes of objects in use"), ("num local plasma objects", "objects")):
            shown = re.search(rf"^- {key}: (\d+)", report, re.MULTILINE)
            if shown is not None:
                found[f"{STORE}: {label}"] = float(shown[1])
    return found


def swept(folder: Path, runs: int, figures: bool, report: Callable[[Sample], None]) -> list[Sample]:
    """Run the grid in `folder` and sample after each run. Raises SystemExit where the sweep does not go well."""
    (folder / "soak.yaml").write_text(grid(runs, figures), encoding="utf-8")
    log = folder / "errors"
    samples: list[Sample] = []
    begin = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*COMMAND, "sweep", "run", "soak.yaml", "--limit", str(runs)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        text = ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                text += line
                if ended := re.match(rf" *(\d+)/{runs} ", line):
                    samples.append(Sample(int(ended[1]), time.monotonic() - begin, sampled(process.pid)))
                    report(samples[-1])
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    left = [path for part in ("checkpoints", "claims") for path in (folder / "fedsir-runs" / part).glob("*")]
    if code or log.read_text() or len(samples) != runs or left:
        raise SystemExit(
            f"the sweep ended with code {code} after {len(samples)} runs and left {left}:\n{text}{log.read_text()}"
        )
    return samples


@dataclass(frozen=True)
class Growth:
    """Of one figure the means over the first and the last runs, and the slope per 100 runs."""

    what: str
    first: float
    last: float
    slope: float

    @property
    def bound(self) -> Bound:
        return BOUNDS[self.what]

    @property
    def is_allowed(self) -> bool:
        return self.bound.allows(self.first, self.last)

    @property
    def row(self) -> str:
        unit = self.bound.unit
        first, last, slope = (value / (MIB if unit else 1) for value in (self.first, self.last, self.slope))
        change = f"{100 * (self.last / self.first - 1):+.1f} %" if self.first else "-"
        well = "yes" if self.is_allowed else "**no**"
        shown = (f"{first:.1f} {unit}", f"{last:.1f} {unit}", change, f"{slope:+.2f} {unit}", self.bound.text, well)
        return f"| {self.what} | {' | '.join(cell.strip() for cell in shown)} |"


def growths(samples: Sequence[Sample], warm_up: int, window: int) -> list[Growth]:
    """Of every figure that has a bound. Raises SystemExit where one was not to be had after most of the runs."""
    later = samples[warm_up:]
    found = []
    for what in BOUNDS:
        points = [(sample.done, sample.figures[what]) for sample in later if what in sample.figures]
        # Ray's report may be in the middle of being written.
        if len(points) < 0.9 * len(later):
            raise SystemExit(f"{what}: to be had after {len(points)} of {len(later)} runs only")
        runs, values = np.array(points, dtype=np.float64).T
        slope = 100 * np.polyfit(runs, values, 1)[0]
        begin, end = runs < later[window].done, runs >= later[-window].done
        found.append(Growth(what, float(values[begin].mean()), float(values[end].mean()), float(slope)))
    return found


def table(found: Iterable[Growth], runs: int, warm_up: int, window: int) -> str:
    head = f"| | runs {warm_up + 1}-{warm_up + window} | runs {runs - window + 1}-{runs} | change | per 100 runs"
    return "\n".join([f"{head} | may grow by | within |", "|---|---|---|---|---|---|---|", *(g.row for g in found)])


def main(argv: Sequence[str]) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=20, help="runs that are not looked at")
    parser.add_argument("--window", type=int, default=50, help="runs whose mean is taken at the beginning and the end")
    parser.add_argument("--figures", action="store_true", help="draw the figures as well, which takes most of the time")
    parser.add_argument("--json", type=Path, help="write all samples there")
    given = parser.parse_args(argv)
    if given.warm_up + 2 * given.window > given.runs:
        parser.error("the warm-up and both windows have more runs than there are")
    with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
        samples = swept(Path(folder), given.runs, given.figures, _progress(given.runs))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(sample) for sample in samples]), encoding="utf-8")
    found = growths(samples, given.warm_up, given.window)
    print(f"{given.runs} runs in one sweep, {samples[-1].seconds:.0f} s\n")
    print(table(found, given.runs, given.warm_up, given.window))
    return int(not all(growth.is_allowed for growth in found))


def _progress(runs: int) -> Callable[[Sample], None]:
    def show(sample: Sample) -> None:
        if sample.done % 50 == 0:
            print(f"{sample.done}/{runs} runs, {sample.seconds:.0f} s", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
