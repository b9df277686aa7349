"""From the command to the first training step, and from the end of a run to the first step of the next."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from experiments.bench.cases import settings
from experiments.bench.federated import WORK, Clock, federated
from experiments.bench.programs import Say
from fedsir.errors import RunFailed
from mlflow_tracking.config import TrackingConfig
from mlflow_tracking.store import prepare_store

COMMAND = [sys.executable, "-c", "from experiments.cli import main; main()", "run", "demo"]
DEMO = ("method.name=fedavg", "training.rounds=1", "execution.actors=2")
FIRST_ROUND = re.compile(r"round 1/")
SMALL = ("data.train_images=160", "data.test_images=40", "data.image_size=32", "federation.clients=4")


@dataclass(frozen=True)
class Startup:
    """Seconds, medians.

    first_step: from the start of `fedsir run` to the first training step, images drawn on the way. first_round: to
    the end of the round that begins with it. next_run: from the end of a run to the first step of the next one in the
    same session, which has another seed.
    """

    first_step: float
    first_round: float
    next_run: float

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return dict(vars(self))


def startup(quick: bool, say: Say) -> Startup:
    """Start the demo with FedAvg on two actors several times, then runs one after the other in one session."""
    starts = []
    # The first one fills the file cache.
    for number in range(1 if quick else 4):
        starts.append(_start(SMALL if quick else ()))
        say(f"start {number + 1}: first step after {starts[-1][0]:.1f} s")
    counted = starts[1:] or starts
    gap = _gap(runs=2 if quick else 6)
    say(f"next run: first step after {gap:.2f} s")
    return Startup(median(s[0] for s in counted), median(s[1] for s in counted), gap)


def start_demo(
    folder: str, changes: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`fedsir run demo` for a round of FedAvg on two actors; it writes everything to `stdout` as it comes."""
    words = [word for setting in (*DEMO, *changes) for word in ("--set", setting)]
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},
    )


def _start(changes: tuple[str, ...]) -> tuple[float, float]:
    """Seconds to the first step and to the end of the first round of `fedsir run demo` in an empty folder."""
    with TemporaryDirectory(prefix="fedsir-bench-") as folder:
        begin = time.perf_counter()
        process = start_demo(folder, changes)
        output, first_round = "", 0.0
        for line in process.stdout or ():
            output += line
            if not first_round and FIRST_ROUND.match(line):
                first_round = time.perf_counter() - begin
        if process.wait() or not first_round:
            raise RunFailed(f"`fedsir run demo` failed while its start was measured:\n{output}")
        (run,) = prepare_store(TrackingConfig(uri=f"sqlite:///{Path(folder) / 'fedsir-runs' / 'mlflow.db'}")).runs()
        return first_round - sum(run.data.metrics[f"seconds/{part}"] for part in WORK), first_round


def _gap(runs: int) -> float:
    """Median seconds from the end of a run to the first step of the next."""
    clocks = []
    with federated() as warm:
        for seed in range(runs):
            clocks.append(Clock())
            config = warm.config({**settings("tiny", 32, 4, 160, rounds=1, actors=2), "seed": seed})
            warm.session.run(config, [clocks[-1]], fresh=True)
    return median(b.first_step - a.finished for a, b in pairwise(clocks))
