"""Where a worker's processor time goes: each part of local training in one process, beside the bare loop's."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.bench.cases import settings
from experiments.bench.federated import Federated, federated
from experiments.bench.floor import Floor
from experiments.bench.plan import count_steps, floor_plan
from experiments.bench.programs import Say
from experiments.bench.ratio import CASES, CLIENTS, IMAGES
from experiments.config import RunFile
from fedsir.clients.executor import InProcessExecutor, WorkItem
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.tasks import LocalTraining
from fedsir.clients.training import Recipe
from fedsir.condition import Condition
from fedsir.server import runtime_setup

SHOWN = 25
"""Functions that are listed."""


@dataclass(frozen=True)
class Function:
    """Seconds inside one function without what it calls, and how often it was called, in one round."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """One round of local training in one process.

    floor, worker: seconds of processor time, medians. functions: of the worker under a profiler, which makes
    short functions look dearer than they are.
    """

    name: str
    clients: int
    steps: int
    floor: float
    worker: float
    functions: tuple[Function, ...]

    @property
    def per_step(self) -> float:
        """Milliseconds that the worker takes per step beyond the bare loop."""
        return 1000 * (self.worker - self.floor) / self.steps

    def as_json(self) -> dict[str, object]:
        """Figures and functions."""
        return {
            "case": self.name,
            "clients": self.clients,
            "steps": self.steps,
            "floor_processor_seconds": self.floor,
            "worker_processor_seconds": self.worker,
            "ratio": self.worker / self.floor,
            "beyond_floor_ms_per_step": self.per_step,
            "functions": [vars(f) for f in self.functions],
        }


def breakdowns(quick: bool, say: Say) -> list[Breakdown]:
    """Take the two networks of the floor ratio apart."""
    found = []
    with federated() as warm:
        for backbone, pixels, _ in CASES[-1:] if quick else CASES:
            clients, images = (6, 120) if quick else (CLIENTS, IMAGES)
            # Nothing of the pool is used, so none is started.
            config = warm.config(settings(backbone, pixels, clients, images, rounds=1, actors="in-process"))
            found.append(breakdown(warm, config, f"{backbone}, {pixels} px", 2 if quick else 7))
            say(f"{found[-1].name}: {found[-1].worker / found[-1].floor:.3f} of the bare loop's processor time")
    return found


def breakdown(warm: Federated, config: RunFile, name: str, times: int) -> Breakdown:
    """Measure one round `times` times, in turn with the bare loop, then once under the profiler."""
    condition = warm.condition(config)
    plan = floor_plan(config, condition)
    work = training_round(config, condition)
    floor = Floor(plan, processes=1)
    loops: list[float] = []
    workers: list[float] = []
    try:
        work()
        floor.run()
        for _ in range(times):
            loops.append(floor.run().training_cpu)
            begin = time.process_time()
            work()
            workers.append(time.process_time() - begin)
    finally:
        floor.close()
    return Breakdown(
        name=name,
        clients=config.federation.clients,
        steps=count_steps(plan),
        floor=median(loops),
        worker=median(workers),
        functions=profiled(work),
    )


def training_round(config: RunFile, condition: Condition) -> Callable[[], object]:
    """What a worker does in the first round, as a function to be timed."""
    executor = InProcessExecutor()
    executor.prepare(runtime_setup(config, condition, "cpu"))
    recipe = Recipe.within(config.training, CrossEntropy())
    items = [WorkItem(k, 0, LocalTraining(y, recipe), 1) for k, y in enumerate(condition.federation.observed)]
    broadcast: Mapping[str, object] = {"weights": condition.initial_weights}
    return lambda: executor.run(items, broadcast)


def profiled(work: Callable[[], object]) -> tuple[Function, ...]:
    """The dearest functions of `work`."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(work)
    rows = []
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        place = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        rows.append(Function(place, calls, own))
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:SHOWN])
