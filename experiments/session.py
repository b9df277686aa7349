"""What consecutive runs share: decoded images, warm actors and the MLflow store."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch

from experiments.config import RunFile
from fedsir import coordinator
from fedsir.clients.executor import Executor, InProcessExecutor
from fedsir.condition import Condition, build_condition
from fedsir.config.data import ImageSource
from fedsir.config.training import ExecutionConfig
from fedsir.data.dataset import Dataset
from fedsir.data.load import load_dataset
from fedsir.data.progress import Progress
from fedsir.errors import BadInput
from fedsir.events import Recorder, RunResult

if TYPE_CHECKING:
    from mlflow_tracking.store import Store


class Session:
    """Runs run files one after the other; close it to stop the actors."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._datasets: dict[ImageSource, Dataset] = {}
        self._executors: dict[tuple[ExecutionConfig, int], tuple[Executor, str]] = {}
        self._stores: dict[tuple[str, str], Store] = {}

    def dataset(self, config: RunFile) -> Dataset:
        """The checked images of a run, decoded once per session."""
        if config.data not in self._datasets:
            dataset = load_dataset(config.data, self._progress)
            self._datasets[config.data] = dataset
        return self._datasets[config.data]

    def condition(self, config: RunFile) -> Condition:
        """Federation, truth and first weights of a run."""
        return build_condition(config, self.dataset(config))

    def check(self, config: RunFile) -> Condition:
        """Everything that can be found wrong before work starts: store, data, federation, weights, workers.

        Raises BadInput.
        """
        self._store(config)
        _check_device(config.execution)
        condition = self.condition(config)
        self._executor(config)
        return condition

    def run(self, config: RunFile, recorders: Sequence[Recorder]) -> RunResult:
        """Run to the last round, recorded in MLflow and by `recorders`; continues an interrupted run."""
        from mlflow_tracking.recorder import MlflowRecorder

        condition = self.check(config)
        executor, device = self._executor(config)
        everyone = [MlflowRecorder(self._store(config)), *recorders]
        with terminated_like_interrupted():
            return coordinator.run(config, condition, executor, everyone, config.checkpoint_file, device)

    def _store(self, config: RunFile) -> Store:
        from mlflow_tracking.store import prepare_store

        key = (config.tracking.uri, config.tracking.experiment)
        if key not in self._stores:
            self._stores[key] = prepare_store(config.tracking)
        return self._stores[key]

    def _executor(self, config: RunFile) -> tuple[Executor, str]:
        key = (config.execution, config.federation.clients)
        if key not in self._executors:
            # One pool at a time: actors of another layout would hold memory for nothing.
            self.close()
            self._executors[key] = _start_executor(config.execution, config.federation.clients)
        return self._executors[key]

    def close(self) -> None:
        """Stop the actors; data and stores stay usable."""
        for executor, _ in self._executors.values():
            executor.close()
        self._executors.clear()


def _start_executor(execution: ExecutionConfig, clients: int) -> tuple[Executor, str]:
    if execution.actors == "in-process":
        cuda = execution.device == "cuda" or (execution.device == "auto" and torch.cuda.is_available())
        return InProcessExecutor(), "cuda" if cuda else "cpu"
    from fedsir.clients.pool import ActorPool

    pool = ActorPool(execution, clients)
    return pool, pool.device


def _check_device(execution: ExecutionConfig) -> None:
    here = execution.ray_address is None
    if execution.device == "cuda" and here and not torch.cuda.is_available():
        raise BadInput(
            "execution.device is cuda, but torch sees no GPU on this machine.\n"
            "Set execution.device to auto or cpu, join a cluster with execution.ray_address, or see `fedsir doctor`."
        )


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM (batch systems, `kill`) ends a run as Ctrl-C does, so that its record gets a terminal status."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
