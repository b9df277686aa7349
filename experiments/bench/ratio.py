"""Floor ratio: seconds of a federated run over those that the bare loop needs for the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from experiments.bench.cases import settings
from experiments.bench.federated import PARTS, Federated, RunTime, federated
from experiments.bench.floor import Floor, FloorTime
from experiments.bench.plan import count_steps, floor_plan
from experiments.bench.processes import niceness_of, require_proc
from experiments.bench.programs import Say, in_a_program
from experiments.config import RunFile
from fedsir.coordinator import weights_hash
from fedsir.models.flat import FlatWeights

CASES = (("squeezenet1_1", 64, 20), ("tiny", 32, 100))
"""Backbone, pixels, rounds: a hundred as in the paper's runs, fewer where that takes minutes."""

PAIRS = 5

CLIENTS, IMAGES = 30, 1000


@dataclass(frozen=True)
class Pair:
    """The bare loop and the federated run, one right after the other."""

    floor: FloorTime
    run: RunTime


@dataclass(frozen=True)
class Comparison:
    """Pairs of one case. steps: optimisation steps of each. same_bits: whether all ended with equal weights."""

    name: str
    clients: int
    images: int
    rounds: int
    steps: int
    processes: int
    pairs: tuple[Pair, ...]
    same_bits: bool

    def ratio(self, of: Callable[[RunTime], float], to: Callable[[FloorTime], float]) -> float:
        """Median over pairs, so that what slows the machine down for a while touches both sides."""
        return median(of(pair.run) / to(pair.floor) for pair in self.pairs)

    @property
    def ratios(self) -> dict[str, float]:
        """The floor ratio, and those of its parts.

        run: the whole run, evaluated every round and recorded, over the loop with the same evaluation. rounds: its
        rounds alone, without beginning and end, whose cost does not grow with the rounds. training: what the workers
        took for it over what the loop took. unevaluated: the whole run over the loop less evaluation. processor:
        processor time of all processes during the whole run.
        """
        return {
            "run": self.ratio(lambda run: run.wall, lambda floor: floor.wall),
            "rounds": self.ratio(lambda run: run.rounds, lambda floor: floor.wall),
            "training": self.ratio(lambda run: run.training, lambda floor: floor.training),
            "unevaluated": self.ratio(lambda run: run.wall, lambda floor: floor.training + floor.averaging),
            "processor": self.ratio(lambda run: run.cpu, lambda floor: floor.cpu),
        }

    def as_json(self) -> dict[str, object]:
        """Ratios, medians of seconds, and every pair."""
        return {
            "case": self.name,
            "clients": self.clients,
            "images": self.images,
            "rounds": self.rounds,
            "steps": self.steps,
            "processes": self.processes,
            "same_bits": self.same_bits,
            "ratios": self.ratios,
            "floor_seconds": self.floor_seconds,
            "run_seconds": self.run_seconds,
            "pairs": [
                {"floor": _floor_parts(p.floor), "run": _run_parts(p.run), "ratio": p.run.wall / p.floor.wall}
                for p in self.pairs
            ],
        }

    @property
    def floor_seconds(self) -> dict[str, float]:
        """Medians by part."""
        return _medians([_floor_parts(pair.floor) for pair in self.pairs])

    @property
    def run_seconds(self) -> dict[str, float]:
        """Medians by part."""
        return _medians([_run_parts(pair.run) for pair in self.pairs])


def floor_ratios(quick: bool, say: Say) -> list[Comparison]:
    """Compare the two networks of `CASES`. Raises BadInput where the system does not tell processor time."""
    require_proc()
    # Each in a program of its own, as the loop's processes are: a user's run begins in a fresh one.
    return [in_a_program(partial(_case, *case, quick), say) for case in (CASES[-1:] if quick else CASES)]


def _case(backbone: str, pixels: int, rounds: int, quick: bool, say: Say) -> Comparison:
    sizes = (6, 120, 1) if quick else (CLIENTS, IMAGES, rounds)
    with federated() as warm:
        config = warm.config(settings(backbone, pixels, *sizes))
        return compare(warm, config, f"{backbone}, {pixels} px", 2 if quick else PAIRS, say)


def compare(warm: Federated, config: RunFile, name: str, pairs: int, say: Say) -> Comparison:
    """Time the loop and the federated run in turn, after one of each that does not count."""
    condition = warm.condition(config)
    workers = warm.session.workers(config)
    plan = floor_plan(config, condition)
    floor = Floor(plan, workers.slots, niceness_of(warm.actors(config)))
    found: list[Pair] = []
    hashes: set[str] = set()
    try:
        for number in range(pairs + 1):
            # By turns also in who goes first: a machine that becomes slower must not count against one side.
            if number % 2:
                run, loop = warm.run(config), floor.run()
            else:
                loop, run = floor.run(), warm.run(config)
            hashes |= {run.result.weights_hash, weights_hash(FlatWeights(*floor.weights()))}
            if number:
                found.append(Pair(loop, run))
                say(f"{name}: {number} of {pairs}, ratio {run.wall / loop.wall:.3f}")
    finally:
        floor.close()
    return Comparison(
        name=name,
        clients=config.federation.clients,
        images=len(condition.dataset.train),
        rounds=config.training.rounds,
        steps=count_steps(plan),
        processes=workers.slots,
        pairs=tuple(found),
        same_bits=len(hashes) == 1,
    )


def _floor_parts(time: FloorTime) -> dict[str, float]:
    parts = {"training": time.training, "averaging": time.averaging, "evaluation": time.evaluation}
    return {"wall": time.wall, "processor": time.cpu, **parts}


def _run_parts(time: RunTime) -> dict[str, float]:
    cpus = {f"processor, {kind}": seconds for kind, seconds in time.cpus.items()}
    parts = {part: time.parts[part] for part in PARTS}
    return {"wall": time.wall, "processor": time.cpu, **cpus, "rounds": time.rounds, **parts, "other": time.other}


def _medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(p[name] for p in parts) for name in parts[0]}
