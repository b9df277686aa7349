"""Timed runs of the system itself, with everything that `fedsir run` does: pool, checkpoints, MLflow record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from experiments.bench.processes import family, processor_seconds
from experiments.commands import open_session
from experiments.config import RunFile
from experiments.console import new_console
from fedsir.clients.executor import InProcessExecutor
from fedsir.condition import Condition
from fedsir.events import Event, RoundFinished, RunFinished, RunResult, RunStarted

if TYPE_CHECKING:
    from experiments.session import Session

PARTS = ("data", "compute", "ship", "aggregate", "evaluate", "record")
"""Into what a round's seconds are divided; see `fedsir.server.RunServer.dispatch`."""

WORK = ("data", "compute", "aggregate", "evaluate")
"""Those of them that a round consists of once its first training step has begun."""


@dataclass
class Clock:
    """Recorder that notes when the run and its rounds began and ended."""

    started: float = 0.0
    rounds: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    finished: float = 0.0

    def record(self, event: Event) -> None:
        now = time.perf_counter()
        match event:
            case RunStarted():
                self.started = now
            case RoundFinished(record=record):
                self.rounds.append(now)
                self.parts.append({part: record.metrics[f"seconds/{part}"] for part in PARTS})
            case RunFinished():
                self.finished = now

    @property
    def first_step(self) -> float:
        """When the first local training began, at the latest: the end of the first round less its work."""
        return self.rounds[0] - sum(self.parts[0][part] for part in WORK)


@dataclass(frozen=True)
class RunTime:
    """Seconds of one run.

    wall: by the clock. rounds: from the recorded start to the last round's end, a method's first stage included. cpus:
    of processor time, by kind of process. parts: by part, over all rounds; those of a round's end pass beside the next
    round's training.
    """

    wall: float
    rounds: float
    cpus: Mapping[str, float]
    parts: Mapping[str, float]
    result: RunResult

    @property
    def cpu(self) -> float:
        """Seconds of processor time of all processes."""
        return sum(self.cpus.values())

    @property
    def training(self) -> float:
        """Seconds that the workers had work, each: their own over their number."""
        return self.parts["data"] + self.parts["compute"]

    @property
    def other(self) -> float:
        """Seconds that no round accounts for: beginning and end of the run."""
        return self.wall - self.rounds


class Federated:
    """Runs in one warm session. folder: where its store and checkpoints are."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder

    @property
    def session(self) -> Session:
        """The session that runs share."""
        return self._session

    @property
    def folder(self) -> Path:
        """Where files may be written for as long as the session lasts."""
        return self._folder

    def config(self, settings: Mapping[str, Any]) -> RunFile:
        """A run file with the store and checkpoints of this session."""
        places = {"tracking": {"uri": f"sqlite:///{self._folder / 'mlflow.db'}"}, "work_dir": str(self._folder)}
        return RunFile.model_validate({**settings, **places})

    def condition(self, config: RunFile) -> Condition:
        """Federation and first weights of a run. Raises BadInput."""
        return self._session.check(config)

    def run(self, config: RunFile) -> RunTime:
        """Run once, from the first round."""
        clock = Clock()
        actors = self.actors(config)
        kinds = {"program": [os.getpid()], "actors": actors}
        kinds["Ray"] = [pid for pid in family() if pid not in actors and pid != os.getpid()]
        before, begin = {kind: processor_seconds(pids) for kind, pids in kinds.items()}, time.perf_counter()
        result = self._session.run(config, [clock], fresh=True)
        wall = time.perf_counter() - begin
        cpus = {kind: processor_seconds(pids) - before[kind] for kind, pids in kinds.items()}
        parts = {part: sum(parts[part] for parts in clock.parts) for part in PARTS}
        return RunTime(wall, clock.rounds[-1] - clock.started, cpus, parts, result)

    def actors(self, config: RunFile) -> list[int]:
        """Process ids of the actors that serve a run; none where it needs none."""
        workers = self._session.workers(config)
        return [] if isinstance(workers, InProcessExecutor) else workers.pids()


@contextmanager
def federated() -> Iterator[Federated]:
    """A session of its own, in a temporary folder."""
    with TemporaryDirectory(prefix="fedsir-bench-") as folder, open_session(new_console(stderr=True)) as session:
        yield Federated(session, Path(folder))
