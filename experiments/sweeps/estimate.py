"""What the runs of a grid ask of a machine, before any of them begins: shared work, time, disk and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from experiments.checks import device_of
from experiments.config import RunFile
from experiments.expansion import PlannedRun
from experiments.sweeps.calibration import Speed, Workload, workload
from experiments.sweeps.images import ImageFacts, image_facts
from fedsir.clients.machine import machine_limits, visible_gpus
from fedsir.config.training import BackboneName
from fedsir.federation.build import MAX_AUTO_POOL
from fedsir.federation.participation import number_of_participants
from fedsir.methods.cost import STEP_FORWARDS, Cost, Scale, training_alone
from fedsir.methods.registry import find_method
from fedsir.methods.spectral_settings import LogitAdjustment, SpectralConfig
from fedsir.methods.stage_one import SIMILARITY_SETTINGS, IdentifyingConfig, stage_one_cost

STATE_VALUES: Mapping[BackboneName, int] = {
    "squeezenet1_1": 722_496,
    "shufflenet_v2_x1_0": 1_269_840,
    "regnet_y_400mf": 3_930_349,
    "tiny": 97_785,
}
"""Numbers in a backbone's state; the head adds a few thousand at most."""

RECORD_BYTES, LABEL_BYTES, ROUND_BYTES = 800_000, 45, 6_000
"""A run's files without labels and weights, most of it figures of the spectral methods; a line of labels.csv for each
training image; the rows of one round's metrics in MLflow's tables. Measured on tiny runs."""

WORKER_BYTES = 700_000_000
"""Memory of one worker process with torch and Lightning, without the images, which all of them share."""

TASK_SECONDS, RUN_SECONDS = 0.004, 0.5
"""Core time beside the networks: of one client's task (weights in and out) and of one run (federation, figures)."""

RELATIVE: Mapping[BackboneName, float] = {
    "tiny": 0.3,
    "squeezenet1_1": 1.0,
    "shufflenet_v2_x1_0": 1.0,
    "regnet_y_400mf": 3.5,
}
"""Time of one image on a CPU relative to SqueezeNet's; orders runs where nothing has been measured."""

UNKNOWN_IMAGES = 2_000
"""Training images assumed where none are known, to order runs."""


@dataclass(frozen=True)
class Work:
    """Images that the networks of one run see in training steps and in forward passes alone, and its client tasks."""

    trained: float
    forwarded: float
    tasks: float

    def seconds(self, speed: Speed) -> float:
        """Core or GPU seconds of one run."""
        networks = self.trained * speed.step + self.forwarded * speed.forward
        return networks + self.tasks * TASK_SECONDS + RUN_SECONDS


@dataclass(frozen=True)
class RunEstimate:
    """facts, work: of the images; `work` is None where their numbers are unknown."""

    run: PlannedRun
    facts: ImageFacts
    work: Work | None

    @property
    def pool(self) -> int:
        """Images of the public pool; 0 where unknown."""
        return _pool(self.run.config, self.facts.train or 0)

    @property
    def image_bytes(self) -> int:
        """The images as they lie in memory; 0 where unknown."""
        return ((self.facts.train or 0) + (self.facts.test or 0)) * self.run.config.data.image_size**2

    @property
    def flight_bytes(self) -> int:
        """Memory of the run in flight, see `flight_bytes`."""
        return flight_bytes(self.run.config)

    @property
    def workload(self) -> Workload:
        """What decides the speed of its networks; the number of classes hardly does, and is 4 where unknown."""
        config = self.run.config
        images = ((self.facts.train or UNKNOWN_IMAGES) - self.pool) / config.federation.clients
        return workload(config, len(self.facts.classes) if self.facts.classes else 4, images)


@dataclass(frozen=True)
class SharedWork:
    """federations: distinct draws. decoded: distinct sets of images. stage_one_runs: runs that begin with stage I.
    stage_one: computations of it that serve them all."""

    federations: int
    decoded: int
    stage_one_runs: int
    stage_one: int


class Estimate:
    """The work of runs in the order in which they are run; stage I is counted for the first of those that share it."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        facts: dict[tuple[str, str], ImageFacts] = {}
        seen: set[tuple[str, ...]] = set()
        found = []
        for run in runs:
            of_images = (run.source, run.config.data.model_dump_json())
            if of_images not in facts:
                facts[of_images] = image_facts(run)
            key = stage_one_key(run.config)
            found.append(RunEstimate(run, facts[of_images], _work(run.config, facts[of_images], key in seen)))
            if key is not None:
                seen.add(key)
        self.runs: tuple[RunEstimate, ...] = tuple(found)

    @cached_property
    def shared(self) -> SharedWork:
        """What is done once for several runs."""
        configs = [e.run.config for e in self.runs]
        keys = [key for key in map(stage_one_key, configs) if key is not None]
        return SharedWork(
            federations=len({(c.data.model_dump_json(), c.federation.model_dump_json(), c.seed) for c in configs}),
            decoded=len({c.data.model_dump_json() for c in configs}),
            stage_one_runs=len(keys),
            stage_one=len(set(keys)),
        )

    @property
    def unknown_images(self) -> list[str]:
        """Bases whose images would have to be known."""
        return sorted({e.run.source for e in self.runs if e.work is None})

    @property
    def unknown_costs(self) -> list[str]:
        """Methods that do not say what they cost."""
        names = {e.run.config.method.name for e in self.runs}
        return sorted(name for name in names if find_method(name).cost is None)

    @property
    def origins(self) -> Counter[tuple[str, str]]:
        """Runs by base and how the numbers of its images are known."""
        return Counter((e.run.source, _numbers(e.facts)) for e in self.runs)

    def seconds(self, speeds: Mapping[Workload, Speed]) -> dict[str, float]:
        """Core or GPU seconds by identity, of runs whose images are known."""
        return {e.run.identity: e.work.seconds(speeds[e.workload]) for e in self.runs if e.work is not None}

    def record_bytes(self) -> int:
        """Disk that the record takes: files of the runs and MLflow's tables."""
        return sum(
            RECORD_BYTES
            + LABEL_BYTES * (e.facts.train or 0)
            + state_bytes(e.run.config)
            + ROUND_BYTES * e.run.config.training.rounds
            for e in self.runs
        )

    @property
    def placements(self) -> list[RunFile]:
        """A run for each way of execution."""
        return list({e.run.config.execution: e.run.config for e in self.runs}.values())


def relative_costs(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Expected cost of each run by identity, in a unit of its own; measures nothing.

    For the order of runs and the time left. Runs whose images are unknown count as if they had a few thousand.
    """
    costs = {}
    for e in Estimate(runs).runs:
        config = e.run.config
        work = e.work or _work(config, ImageFacts(UNKNOWN_IMAGES, 0, None, ""), False)
        assert work is not None  # the number of images was given
        pixel = RELATIVE[config.model.backbone] * config.data.image_size**2
        costs[e.run.identity] = pixel * ((STEP_FORWARDS + 1) * work.trained + work.forwarded)
    return costs


def slots(config: RunFile) -> int:
    """Runs' tasks that this machine works on at the same time: one for each GPU or for `threads` cores."""
    execution = config.execution
    if execution.actors == "in-process":
        return 1
    if device_of(execution) == "cuda":
        return visible_gpus()
    cores = max(1, machine_limits().usable_cpus // execution.threads)
    return min(cores, execution.actors) if isinstance(execution.actors, int) else cores


def stage_one_key(config: RunFile) -> tuple[str, ...] | None:
    """What decides stage I of a run, None for methods without: runs with one key compute it once."""
    method = config.method
    if not isinstance(method, IdentifyingConfig):
        return None
    adjustment = method.logit_adjustment if isinstance(method, SpectralConfig) else LogitAdjustment()
    loss = adjustment.model_dump_json(include={"beta", "eps", "floor"}) if adjustment.stage_one else "cross entropy"
    sections = (config.data, config.federation, config.model, config.execution)
    return (
        *(section.model_dump_json() for section in sections),
        config.training.model_dump_json(exclude={"rounds", "participation"}),
        str(config.seed),
        method.stage_one.model_dump_json(),
        method.identification.model_dump_json(include=SIMILARITY_SETTINGS),
        loss,
    )


def state_bytes(config: RunFile) -> int:
    """Size of one model's weights."""
    return 4 * STATE_VALUES[config.model.backbone]


def flight_bytes(config: RunFile) -> int:
    """Memory of a run in flight at most: every client's weights as sent, received and kept by the method.

    Methods that keep a sum only need less (fedsir/methods/README.md).
    """
    return 3 * config.federation.clients * state_bytes(config)


def _pool(config: RunFile, images: int) -> int:
    demand = config.federation.public_pool
    return min(MAX_AUTO_POOL, images // 100) if demand == "auto" else demand


def _numbers(facts: ImageFacts) -> str:
    if facts.train is None:
        return "unknown"
    return f"{facts.train:,} to train on, {facts.test or 0:,} to test on ({facts.origin})"


def _work(config: RunFile, facts: ImageFacts, stage_one_done: bool) -> Work | None:
    if facts.train is None:
        return None
    federation, training = config.federation, config.training
    pool = _pool(config, facts.train)
    dealt = max(0, facts.train - pool)
    clean = 1.0 if federation.noise.type == "none" else federation.clean_clients / federation.clients
    scale = Scale(training, federation.clients, clean, dealt / federation.clients or None, pool)
    cost: Cost = (find_method(config.method.name).cost or training_alone)(config.method, scale)
    trained, forwarded = cost.trained, cost.forwarded
    if stage_one_done and isinstance(config.method, IdentifyingConfig):
        shared = stage_one_cost(config.method.stage_one, scale)
        trained, forwarded = trained - shared.trained, forwarded - shared.forwarded
    evaluated = (facts.test or 0) * training.rounds * cost.models
    participants = number_of_participants(federation.clients, training.participation)
    return Work(trained * dealt, forwarded * dealt + evaluated, float(participants * training.rounds))
