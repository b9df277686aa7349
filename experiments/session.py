"""What consecutive runs share: decoded images, warm actors and the MLflow store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from filelock import FileLock, Timeout

from experiments.checks import check_execution, check_model, check_work_dir
from experiments.config import RunFile
from fedsir import coordinator
from fedsir.clients.executor import Executor, InProcessExecutor
from fedsir.condition import Condition, build_condition
from fedsir.config.training import ExecutionConfig
from fedsir.data.dataset import Dataset
from fedsir.data.load import load_dataset
from fedsir.data.progress import Progress
from fedsir.errors import BadInput
from fedsir.events import Recorder, RunResult
from fedsir.server import Memory, RunServer, runtime_setup

if TYPE_CHECKING:
    from mlflow_tracking.store import Store


class RunHeld(BadInput):
    """Another process is working on this very run."""


class Waiting(Protocol):
    """Shows what is being waited for while the context lasts."""

    def __call__(self, what: str) -> AbstractContextManager[object]: ...


def _silently(what: str) -> AbstractContextManager[object]:
    return nullcontext(what)


class Session:
    """Runs run files one after the other; close it to stop the actors."""

    def __init__(self, progress: Progress | None = None, waiting: Waiting = _silently) -> None:
        self._progress = progress
        self._waiting = waiting
        self._datasets: dict[str, Dataset] = {}
        self._executors: dict[tuple[ExecutionConfig, int], tuple[Executor, str]] = {}
        self._stores: dict[tuple[str, str], Store] = {}
        self._memory: tuple[str, Memory] = ("", {})
        self._owns_ray = False

    def dataset(self, config: RunFile) -> Dataset:
        """The checked images of a run, decoded once per session."""
        key = config.data.model_dump_json()
        if key not in self._datasets:
            self._datasets[key] = load_dataset(config.data, self._progress)
        return self._datasets[key]

    def check(self, config: RunFile) -> Condition:
        """Everything that can be found wrong before work starts, the quick checks first.

        Raises BadInput.
        """
        check_execution(config.execution, config.federation.clients)
        check_work_dir(config)
        check_model(config.model, config.data.image_size)
        self.store(config)
        return build_condition(config, self.dataset(config))

    def run(self, config: RunFile, recorders: Sequence[Recorder], fresh: bool = False) -> RunResult:
        """Run to the last round, recorded in MLflow and by `recorders`; continues an interrupted run.

        `fresh` starts over instead. Raises BadInput before anything is changed, RunFailed afterwards.
        """
        from mlflow_tracking.recorder import MlflowRecorder

        condition = self.check(config)
        with _alone(config):
            executor, device = self._executor(config)
            if fresh:
                config.checkpoint_file.unlink(missing_ok=True)
            everyone = [MlflowRecorder(self.store(config)), *recorders]
            return coordinator.run(
                config, condition, executor, everyone, config.checkpoint_file, device, self._shared(config)
            )

    def server(self, config: RunFile) -> tuple[RunServer, Condition]:
        """A server ready for client work outside the rounds of a run, and the condition it serves.

        Nothing is recorded. Raises BadInput as `check` does, apart from the store.
        """
        check_execution(config.execution, config.federation.clients)
        check_model(config.model, config.data.image_size)
        condition = build_condition(config, self.dataset(config))
        executor, device = self._executor(config)
        executor.prepare(runtime_setup(config, condition, device))
        return RunServer(config, condition, executor, self._shared(config)), condition

    def _shared(self, config: RunFile) -> Memory:
        """What runs of one condition and seed share, such as stage I; of the latest condition only."""
        key = config.condition_identity()
        if self._memory[0] != key:
            self._memory = (key, {})
        return self._memory[1]

    def store(self, config: RunFile) -> Store:
        """The store that `config` is recorded in, opened once per session. Raises BadInput."""
        from mlflow_tracking.store import prepare_store

        key = (config.tracking.uri, config.tracking.experiment)
        if key not in self._stores:
            with self._waiting("opening the MLflow store"):
                self._stores[key] = prepare_store(config.tracking)
        return self._stores[key]

    def _executor(self, config: RunFile) -> tuple[Executor, str]:
        key = (config.execution, config.federation.clients)
        if key not in self._executors:
            # One pool at a time: actors of another layout would hold memory for nothing.
            self._stop()
            with self._waiting("starting the workers"):
                self._executors[key] = self._start(config.execution, config.federation.clients)
        return self._executors[key]

    def _start(self, execution: ExecutionConfig, clients: int) -> tuple[Executor, str]:
        if execution.actors == "in-process":
            cuda = execution.device == "cuda" or (execution.device == "auto" and torch.cuda.is_available())
            return InProcessExecutor(), "cuda" if cuda else "cpu"
        import ray

        from fedsir.clients.pool import ActorPool

        self._owns_ray = self._owns_ray or not ray.is_initialized()
        pool = ActorPool(execution, clients)
        return pool, pool.device

    def _stop(self) -> None:
        for executor, _ in self._executors.values():
            executor.close()
        self._executors.clear()

    def release_workers(self) -> None:
        """Stop the actors; the next run starts new ones. For use after a failure that may have harmed them."""
        self._stop()

    def close(self) -> None:
        """Stop the actors, and Ray if this session has started it."""
        self._stop()
        if self._owns_ray:
            import ray

            # Not left to the end of the interpreter, where Ray may crash while actors still start.
            ray.shutdown()
            self._owns_ray = False


@contextmanager
def _alone(config: RunFile) -> Iterator[None]:
    """Two processes on one run would overwrite each other's checkpoint and write into the same MLflow run."""
    lock = FileLock(config.checkpoint_file.with_suffix(".lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunHeld(
            f"another process is working on this very run ({config.name}, {config.method.label}, seed {config.seed}).\n"
            "Wait for its end, or change what this run is: --set seed=..., --set work_dir=..."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()
