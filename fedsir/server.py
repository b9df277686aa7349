"""The server side of one run: sends tasks to an executor and counts what the work costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.executor import Executor, Outcome, WorkItem
from fedsir.clients.runtime import RuntimeSetup
from fedsir.clients.tasks import ClientResult, ClientTask, PredictTest, PredictTestPrivately, nbytes
from fedsir.clients.training import FORWARD_BATCH, LocalUpdate, WithTraining, slices_of
from fedsir.condition import Condition
from fedsir.config.run import RunConfig
from fedsir.config.training import TrainingConfig
from fedsir.methods.base import MethodState

U = TypeVar("U")
V = TypeVar("V")
S = TypeVar("S", bound=MethodState)

_PARTS = ("data", "compute", "ship", "aggregate", "evaluate", "record")


@dataclass
class RoundCosts:
    """What the rounds' work cost; see `RunServer.run_clients`.

    client_epochs: passes of training over a client's images, summed over clients. forward_units: forward-only passes.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    bytes_up: int = 0
    bytes_down: int = 0
    client_epochs: float = 0.0
    forward_units: float = 0.0
    loss: float | None = None
    notes: tuple[str, ...] = ()

    def add(self, other: RoundCosts) -> None:
        """Count the cost of `other` as well; its loss replaces the one here."""
        for part, spent in other.seconds.items():
            self.seconds[part] += spent
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down
        self.client_epochs += other.client_epochs
        self.forward_units += other.forward_units
        self.loss = self.loss if other.loss is None else other.loss
        self.notes += other.notes


class Memory:
    """Results that runs of one condition and seed share, by what determines them; see `Server.once`.

    Runs may ask at the same time: the first computes, the others wait for it.
    """

    def __init__(self) -> None:
        self._results: dict[str, tuple[Any, RoundCosts]] = {}
        self._locks: dict[str, threading.Lock] = {}

    @property
    def results(self) -> Mapping[str, tuple[Any, RoundCosts]]:
        """What is remembered, and what it took."""
        return self._results

    @contextmanager
    def only_one(self, key: str) -> Iterator[None]:
        """Whoever computes or reads a result is alone with it."""
        # In one step, so that no two runs get locks of their own.
        with self._locks.setdefault(key, threading.Lock()):
            yield

    def keep(self, key: str, result: Any, costs: RoundCosts) -> None:
        """Remember a result and what it took."""
        self._results[key] = (result, costs)


class RunServer:
    """`fedsir.methods.base.Server` on top of an executor; counts what the work costs."""

    def __init__(
        self, config: RunConfig, condition: Condition, executor: Executor, memory: Memory | None = None
    ) -> None:
        self.federation = condition.federation
        self.training: TrainingConfig = config.training
        self.schema = condition.schema
        self.initial_weights = condition.initial_weights
        self.seed = config.seed
        self.costs = RoundCosts()
        self._executor = executor
        self._sizes = condition.federation.sizes
        self._memory = memory

    def note(self, message: str) -> None:
        self.costs.notes += (message,)

    def run_clients(
        self, tasks: Mapping[int, ClientTask[U]], round_: int, broadcast: Mapping[str, Any]
    ) -> dict[int, ClientResult[U]]:
        order = sorted(tasks)
        items = [WorkItem(k, round_, tasks[k], int(self._sizes[k])) for k in order]
        outcomes = self.dispatch(items, broadcast)
        results: dict[int, ClientResult[U]] = {k: o.result for k, o in zip(order, outcomes, strict=True)}
        self.costs.bytes_down += nbytes(broadcast) * len(order)
        self.costs.bytes_up += sum(nbytes(r.update) for r in results.values())
        for client, outcome in zip(order, outcomes, strict=True):
            self.costs.client_epochs += outcome.work.trained / int(self._sizes[client])
            self.costs.forward_units += outcome.work.forwarded / int(self._sizes[client])
        self._collect_losses(results)
        return results

    def spread(self, tasks: Sequence[ClientTask[U]], round_: int, broadcast: Mapping[str, Any]) -> list[U]:
        items = [WorkItem(i, round_, task, 1) for i, task in enumerate(tasks)]
        return [o.result.update for o in self.dispatch(items, broadcast)]

    def once(self, key: str, work: Callable[[], V]) -> V:
        if self._memory is None:
            return work()
        with self._memory.only_one(key):
            known: tuple[V, RoundCosts] | None = self._memory.results.get(key)
            if known is None:
                before, self.costs = self.costs, RoundCosts()
                try:
                    result = work()
                finally:
                    own, self.costs = self.costs, before
                self._memory.keep(key, result, own)
            else:
                # Booked as if it had been done here: a record must not depend on which run came first.
                result, own = known
        self.costs.add(own)
        return result

    def dispatch(self, items: Sequence[WorkItem], broadcast: Mapping[str, Any]) -> list[Outcome]:
        """Run items and book their time: wall time splits into data, compute and the rest (ship).

        `data` and `compute` are worker seconds divided by the number of workers, `ship` is what remains of the
        wall time: transfer, scheduling and idle workers.
        """
        begin = time.perf_counter()
        outcomes = self._executor.run(items, broadcast)
        wall = time.perf_counter() - begin
        data = sum(o.work.data for o in outcomes) / self._executor.slots
        compute = sum(o.work.compute for o in outcomes) / self._executor.slots
        self.costs.seconds["data"] += data
        self.costs.seconds["compute"] += compute
        self.costs.seconds["ship"] += max(0.0, wall - data - compute)
        return outcomes

    def _collect_losses(self, results: Mapping[int, ClientResult[Any]]) -> None:
        updates = {k: r.update.training if isinstance(r.update, WithTraining) else r.update for k, r in results.items()}
        trained = []
        for client, update in updates.items():
            if not isinstance(update, LocalUpdate):
                continue
            if update.skipped:
                self.note(f"client {client} skipped {update.skipped} steps with a non-finite loss")
            if update.samples > 0:
                trained.append(update)
        if trained:
            self.costs.loss = float(np.average([u.loss for u in trained], weights=[u.samples for u in trained]))


def runtime_setup(config: RunConfig, condition: Condition, device: str) -> RuntimeSetup:
    """What workers must know to serve the clients of a run."""
    dataset, federation = condition.dataset, condition.federation
    return RuntimeSetup(
        model=config.model,
        num_classes=dataset.num_classes,
        transform=config.data.transform,
        train_images=dataset.train.images,
        test_images=dataset.test.images,
        indices=federation.indices,
        public_pool=federation.public_pool,
        seed=config.seed,
        threads=config.execution.threads,
        device=device,
        precision=config.execution.precision,
        deterministic=config.execution.deterministic,
        compile=config.execution.compile,
    )


def timed(server: RunServer, work: Callable[[], S]) -> S:
    """Run a method's function; its own time, less what clients took, is `aggregate`."""
    before = sum(server.costs.seconds.values())
    begin = time.perf_counter()
    state = work()
    elsewhere = sum(server.costs.seconds.values()) - before
    server.costs.seconds["aggregate"] += max(0.0, time.perf_counter() - begin - elsewhere)
    return state


def predict_test(server: RunServer, state: MethodState, images: int) -> tuple[NDArray[np.float32], ...]:
    """Logits (N, C) float32 on the held-out images, in fixed shards over the workers.

    One array of the global model or, where the method has none, one of each client model.
    """
    shards = slices_of(images, FORWARD_BATCH)
    before = dict(server.costs.seconds)
    if state.client_models is None:
        items = [WorkItem(i, 0, PredictTest(a, b), b - a) for i, (a, b) in enumerate(shards)]
        outcomes = server.dispatch(items, {"weights": state.weights})
        logits: tuple[NDArray[np.float32], ...] = (np.concatenate([o.result.update for o in outcomes]),)
    else:
        # A model travels to one worker only.
        items = [WorkItem(k, 0, PredictTestPrivately(m, shards), images) for k, m in enumerate(state.client_models)]
        logits = tuple(o.result.update for o in server.dispatch(items, {}))
    server.costs.seconds = before  # evaluation is booked as a whole
    return logits
