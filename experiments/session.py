"""What runs share, one after the other or at the same time: decoded images, warm actors and the MLflow store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

from experiments.checks import check_execution, check_model, check_work_dir, device_of
from experiments.claims import ClaimGuard, claim_run
from experiments.conditions import Conditions
from experiments.config import RunFile
from fedsir import checkpoint, coordinator
from fedsir.beside import begin
from fedsir.clients.executor import Executor, InProcessExecutor
from fedsir.condition import Condition, build_condition
from fedsir.config.training import ExecutionConfig
from fedsir.data.dataset import Dataset
from fedsir.data.load import load_dataset
from fedsir.data.progress import Progress
from fedsir.errors import FedsirError, StoreUnreachable
from fedsir.events import Recorder, RunResult
from fedsir.server import Memory, RunServer, runtime_setup
from mlflow_tracking.store import check_place

if TYPE_CHECKING:
    from fedsir.clients.pool import ActorPool
    from mlflow_tracking.store import Store


STORE_PATIENCE_S = 5.0
"""How long a command that ends waits for a store that is being opened."""


class FinishedElsewhere(FedsirError):
    """The store has a finished run of this identity already."""


class Waiting(Protocol):
    """Shows what is being waited for while the context lasts."""

    def __call__(self, what: str) -> AbstractContextManager[object]: ...


def _silently(what: str) -> AbstractContextManager[object]:
    return nullcontext(what)


def _nothing() -> None:
    """Nothing."""


@contextmanager
def _saying_what_is_kept(config: RunFile, fresh: bool) -> Iterator[None]:
    """Complete what is said of a store that is out of reach."""
    try:
        yield
    except StoreUnreachable as error:
        file = config.checkpoint_file
        if file.exists() or checkpoint.previous(file).exists():
            command = "The same command without --fresh" if fresh else "The same command"
            kept = f"The rounds of this run are kept in {file}.\n{command} continues there and records them."
        else:
            kept = "No round of this run has been made, so nothing is lost.\nThe same command begins it again."
        raise StoreUnreachable(f"{error}\n{kept}") from error.__cause__


def _require_unfinished(store: Store, config: RunFile, stopping: threading.Event | None) -> None:
    """Raise FinishedElsewhere if the store has the result of a run, StoreUnreachable if it cannot be asked."""
    from mlflow_tracking.delivery import patiently
    from mlflow_tracking.states import recorded_state

    identity = config.identity()
    look = partial(recorded_state, store, identity)
    # The runs of a long queue must not wait for a store that is gone one after the other.
    known = patiently(store, look, config.tracking.patience_s, stopping, since_lost=True)
    if known is not None and known.status == "finished":
        raise FinishedElsewhere(f"{config.name} ({config.method.label}, seed {config.seed}) is finished")


def _store_key(config: RunFile) -> tuple[str, str]:
    return config.tracking.uri, config.tracking.experiment


class Session:
    """Runs run files; threads may run several at once. Close it to stop the actors.

    most_clients: the pool of actors is made for federations of up to so many clients, so that smaller ones need no
    other pool. started: called whenever workers have been started; nearly everything is imported by then.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        waiting: Waiting = _silently,
        most_clients: int | None = None,
        started: Callable[[], object] = _nothing,
    ) -> None:
        self._progress = progress
        self._waiting = waiting
        self._most_clients = most_clients
        self._started = started
        self._lock = threading.RLock()
        self._datasets: dict[str, Dataset] = {}
        self._stores: dict[tuple[str, str], Store] = {}
        self._checked: set[str] = set()
        self._conditions = Conditions()
        self._workers: tuple[tuple[ExecutionConfig, int], ActorPool | InProcessExecutor] | None = None
        self._owns_ray = False

    def dataset(self, config: RunFile) -> Dataset:
        """The checked images of a run, decoded once per session."""
        key = config.data.model_dump_json()
        with self._lock:
            if key not in self._datasets:
                self._datasets[key] = load_dataset(config.data, self._progress)
            return self._datasets[key]

    def check(self, config: RunFile) -> Condition:
        """Everything that can be found wrong before work starts, the quick checks first.

        Raises BadInput.
        """
        self._check_quickly(config)
        self.store(config)
        with self._condition(config) as (condition, _):
            return condition

    def run(
        self,
        config: RunFile,
        recorders: Sequence[Recorder],
        fresh: bool = False,
        unless_finished: bool = False,
        parent: str | None = None,
        stopping: threading.Event | None = None,
    ) -> RunResult:
        """Run to the last round, recorded in MLflow and by `recorders`; continues an interrupted run.

        `fresh` starts over instead. parent: id of the MLflow run of the sweep that it belongs to. stopping: ends
        waiting for a store that is out of reach. Raises BadInput before anything is changed (RunHeld where another
        process is at it), RunFailed afterwards (StoreUnreachable where the checkpoint keeps what the store lacks);
        with `unless_finished` FinishedElsewhere where the store has its result already.
        """
        self._check_quickly(config)
        with claim_run(config) as claims, _saying_what_is_kept(config, fresh):
            self._begin(config)
            store = self.store(config)
            if unless_finished:
                # Looked up under the claim: before it, another process could still finish the run.
                _require_unfinished(store, config, stopping)
            checkpoint.remove_partial(config.checkpoint_file)
            with self._condition(config) as (condition, memory), self.executor(config) as (executor, device):
                if fresh:
                    checkpoint.remove(config.checkpoint_file)
                # With MLflow, which `_begin` imports while Ray starts.
                from mlflow_tracking.recorder import MlflowRecorder

                recorder = MlflowRecorder(store, config.tracking, parent, stopping)
                everyone = [ClaimGuard(claims, [recorder]), *recorders]
                return coordinator.run(config, condition, executor, everyone, config.checkpoint_file, device, memory)

    @contextmanager
    def server(self, config: RunFile) -> Iterator[tuple[RunServer, Condition]]:
        """A server ready for client work outside the rounds of a run, and the condition it serves.

        Nothing is recorded. Raises BadInput as `check` does, apart from the store.
        """
        self.check_machine(config)
        with self._condition(config) as (condition, memory), self.executor(config) as (executor, device):
            executor.prepare(runtime_setup(config, condition, device))
            yield RunServer(config, condition, executor, memory), condition

    def check_machine(self, config: RunFile) -> None:
        """Whether this machine can hold workers and network, looked at once per session. Raises BadInput."""
        execution, clients = config.execution, config.federation.clients
        model, size = config.model, config.data.image_size
        with self._lock:
            self._once(f"{clients} {execution.model_dump_json()}", partial(check_execution, execution, clients))
            self._once(f"{size} {model.model_dump_json()}", partial(check_model, model, size))

    def _check_quickly(self, config: RunFile) -> None:
        with self._lock:
            # First, since networks take longer to look at than folders.
            self._once(f"work_dir {config.work_dir}", partial(check_work_dir, config))
            self.check_machine(config)
            if _store_key(config) not in self._stores:
                with self._waiting("opening the MLflow store"):
                    check_place(config.tracking)

    def _once(self, key: str, check: Callable[[], None]) -> None:
        """These depend on the machine and on little else, so they are made once per session."""
        if key not in self._checked:
            check()
            self._checked.add(key)

    def _condition(self, config: RunFile) -> AbstractContextManager[tuple[Condition, Memory]]:
        return self._conditions.using(
            config.condition_identity(), lambda: build_condition(config, self.dataset(config))
        )

    def store(self, config: RunFile) -> Store:
        """The store that `config` is recorded in, opened once per session. Raises BadInput."""
        key = _store_key(config)
        with self._lock:
            if key not in self._stores:
                with self._waiting("opening the MLflow store"):
                    self._open_store(config)
            return self._stores[key]

    def _open_store(self, config: RunFile) -> None:
        from mlflow_tracking.store import prepare_store

        self._stores[_store_key(config)] = prepare_store(config.tracking)

    def _begin(self, config: RunFile) -> None:
        """Open the store while Ray and the workers start, where neither has been done: each of them takes seconds."""

        def begun() -> bool:
            in_process = config.execution.actors == "in-process"
            return in_process or self._workers is not None or _store_key(config) in self._stores

        if begun():
            return
        # What is wrong with the data is said before a store is made or workers are started. Reading them takes the lock
        # by itself: whoever held it would wait for one that builds a condition, and that one for the lock.
        with self._condition(config), self._lock:
            if not begun():
                with self._waiting("starting the workers, opening the MLflow store"):
                    opening = begin(partial(self._open_store, config), "opening of the store")
                    try:
                        self._start(config, meanwhile=opening.result)
                    finally:
                        # Where there are no workers or nobody waits any more: a store that is being made should be
                        # finished, but a server that does not answer must not keep anybody.
                        wait([opening], timeout=STORE_PATIENCE_S)

    @contextmanager
    def executor(self, config: RunFile) -> Iterator[tuple[Executor, str]]:
        """Workers for one run and their device: a lane of the warm pool, or this process."""
        workers = self.workers(config)
        if isinstance(workers, InProcessExecutor):
            yield workers, device_of(config.execution)
            return
        lane = workers.lane()
        try:
            yield lane, workers.device
        finally:
            lane.close()

    def workers(self, config: RunFile) -> ActorPool | InProcessExecutor:
        """What serves runs with this configuration's execution settings, started where it is not running yet.

        One pool at a time: actors of another layout would hold memory for nothing. Threads must not ask for
        different layouts at once.
        """
        with self._lock:
            if self._workers is None or self._workers[0] != self._layout(config):
                self._stop()
                with self._waiting("starting the workers"):
                    return self._start(config)
            return self._workers[1]

    def _layout(self, config: RunFile) -> tuple[ExecutionConfig, int]:
        """What the workers are made for: execution settings and the largest federation."""
        return config.execution, self._most_clients or config.federation.clients

    def _start(self, config: RunFile, meanwhile: Callable[[], None] | None = None) -> ActorPool | InProcessExecutor:
        workers = InProcessExecutor() if config.execution.actors == "in-process" else self._pool(config, meanwhile)
        self._workers = (self._layout(config), workers)
        self._started()
        return workers

    def _pool(self, config: RunFile, meanwhile: Callable[[], None] | None) -> ActorPool:
        import ray

        from fedsir.clients.memory_probe import Demand
        from fedsir.clients.pool import ActorPool

        # Runs that follow on these actors share the execution settings; the first of a queue is the most demanding.
        measured = config.execution.gpus_per_client == "auto"
        demand = Demand.of(config, self.dataset(config)) if measured else None
        self._owns_ray = self._owns_ray or not ray.is_initialized()
        return ActorPool(*self._layout(config), demand, meanwhile)

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers[1].close()
            self._workers = None

    def close(self) -> None:
        """Stop the actors, and Ray if this session has started it."""
        self._stop()
        if self._owns_ray:
            from fedsir.clients.local_ray import stop_ray

            # Not left to the end of the interpreter, where Ray may crash while actors still start.
            stop_ray()
            self._owns_ray = False
