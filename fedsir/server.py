"""The server side of one run: sends tasks to an executor and counts what the work costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.executor import Executor, Outcome, WorkItem
from fedsir.clients.parts import in_parts, run_in_parts
from fedsir.clients.runtime import RuntimeSetup, Work
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


@dataclass(frozen=True)
class _Trained:
    """What is reported of a client's training."""

    client: int
    samples: int
    loss: float
    skipped: int


def _trained(client: int, update: object) -> list[_Trained]:
    training = update.training if isinstance(update, WithTraining) else update
    if not isinstance(training, LocalUpdate):
        return []
    return [_Trained(client, training.samples, training.loss, training.skipped)]


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
        items = self._items(tasks, round_)
        return self._take(items, [items], broadcast, lambda _, result: result)

    def fold_clients(
        self,
        tasks: Mapping[int, ClientTask[U]],
        round_: int,
        broadcast: Mapping[str, Any],
        take: Callable[[int, ClientResult[U]], V],
    ) -> dict[int, V]:
        items = self._items(tasks, round_)
        parts = in_parts(items, self.initial_weights.nbytes, self._executor.slots)
        # An array from an actor is a view of the message it came in, which would stay as long as one of them.
        return self._take(items, parts, broadcast, lambda client, result: deepcopy(take(client, result)))

    def _items(self, tasks: Mapping[int, ClientTask[Any]], round_: int) -> list[WorkItem]:
        return [WorkItem(k, round_, tasks[k], int(self._sizes[k])) for k in sorted(tasks)]

    def _take(
        self,
        items: Sequence[WorkItem],
        parts: Sequence[Sequence[WorkItem]],
        broadcast: Mapping[str, Any],
        take: Callable[[int, ClientResult[Any]], V],
    ) -> dict[int, V]:
        """Run `items` in `parts` and keep what `take` makes of each result."""
        taken: dict[int, V] = {}
        trained: list[_Trained] = []
        total, taking, begin = Work(), 0.0, time.perf_counter()
        for outcomes in run_in_parts(self._executor, parts, broadcast):
            started = time.perf_counter()
            for outcome in outcomes:
                client, result, work = items[len(taken)].client, outcome.result, outcome.work
                total.add(work)
                self.costs.bytes_up += nbytes(result.update)
                self.costs.client_epochs += work.trained / int(self._sizes[client])
                self.costs.forward_units += work.forwarded / int(self._sizes[client])
                trained += _trained(client, result.update)
                taken[client] = take(client, result)
            taking += time.perf_counter() - started
            # Let go of before the next part is waited for.
            del outcomes
        self.costs.bytes_down += nbytes(broadcast) * len(items)
        self._book(total, time.perf_counter() - begin - taking)
        self._collect_losses(trained)
        return taken

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

    @property
    def slots(self) -> int:
        """How many items run at the same time."""
        return self._executor.slots

    def outcomes(self, items: Sequence[WorkItem], broadcast: Mapping[str, Any]) -> list[Outcome]:
        """Run items without booking their time."""
        return self._executor.run(items, broadcast)

    def dispatch(self, items: Sequence[WorkItem], broadcast: Mapping[str, Any]) -> list[Outcome]:
        """Run items and book their time."""
        begin, total = time.perf_counter(), Work()
        outcomes = self.outcomes(items, broadcast)
        for outcome in outcomes:
            total.add(outcome.work)
        self._book(total, time.perf_counter() - begin)
        return outcomes

    def _book(self, work: Work, wall: float) -> None:
        """Split the seconds that were waited for workers into data, compute and the rest (ship).

        `data` and `compute` are worker seconds divided by the number of workers, `ship` is what remains of the
        wall time: transfer, scheduling, idle workers, and what the end of the round before took of them.
        """
        data, compute = work.data / self._executor.slots, work.compute / self._executor.slots
        self.costs.seconds["data"] += data
        self.costs.seconds["compute"] += compute
        self.costs.seconds["ship"] += max(0.0, wall - data - compute)

    def _collect_losses(self, trained: Sequence[_Trained]) -> None:
        for update in trained:
            if update.skipped:
                self.note(f"client {update.client} skipped {update.skipped} steps with a non-finite loss")
        finished = [update for update in trained if update.samples > 0]
        if finished:
            self.costs.loss = float(np.average([u.loss for u in finished], weights=[u.samples for u in finished]))


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

    One array of the global model or, where the method has none, one of each client model. Books nothing, so that it
    can go on beside the work of the next round.
    """
    shards = slices_of(images, FORWARD_BATCH)
    if state.client_models is None:
        items = [WorkItem(i, 0, PredictTest(a, b), b - a) for i, (a, b) in enumerate(shards)]
        outcomes = server.outcomes(items, {"weights": state.weights})
        return (np.concatenate([o.result.update for o in outcomes]),)
    # A model travels to one worker only.
    items = [WorkItem(k, 0, PredictTestPrivately(m, shards), images) for k, m in enumerate(state.client_models)]
    return tuple(o.result.update for o in server.outcomes(items, {}))
