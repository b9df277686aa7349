"""The server side of one run: sends tasks to an executor and counts what the work costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.executor import Executor, Outcome, WorkItem
from fedsir.clients.spectral_tasks import StageOneUpdate
from fedsir.clients.tasks import ClientResult, ClientTask, PredictTest, nbytes
from fedsir.clients.training import FORWARD_BATCH, LocalUpdate, slices_of
from fedsir.condition import Condition
from fedsir.config.run import RunConfig
from fedsir.config.training import TrainingConfig
from fedsir.methods.base import MethodState
from fedsir.models.flat import FlatWeights

U = TypeVar("U")
S = TypeVar("S", bound=MethodState)

_PARTS = ("data", "compute", "ship", "aggregate", "evaluate", "record")


@dataclass
class RoundCosts:
    """What the rounds' work cost; see `RunServer.run_clients`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float | None = None
    notes: tuple[str, ...] = ()


class RunServer:
    """`fedsir.methods.base.Server` on top of an executor; counts what the work costs."""

    def __init__(self, config: RunConfig, condition: Condition, executor: Executor) -> None:
        self.federation = condition.federation
        self.training: TrainingConfig = config.training
        self.schema = condition.schema
        self.initial_weights = condition.initial_weights
        self.seed = config.seed
        self.costs = RoundCosts()
        self._executor = executor
        self._sizes = condition.federation.sizes

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
        self._collect_losses(results)
        return results

    def dispatch(self, items: Sequence[WorkItem], broadcast: Mapping[str, Any]) -> list[Outcome]:
        """Run items and book their time: wall time splits into data, compute and the rest (ship).

        `data` and `compute` are worker seconds divided by the number of workers, `ship` is what remains of the
        wall time: transfer, scheduling and idle workers.
        """
        begin = time.perf_counter()
        outcomes = self._executor.run(items, broadcast)
        wall = time.perf_counter() - begin
        data = sum(o.seconds.data for o in outcomes) / self._executor.slots
        compute = sum(o.seconds.compute for o in outcomes) / self._executor.slots
        self.costs.seconds["data"] += data
        self.costs.seconds["compute"] += compute
        self.costs.seconds["ship"] += max(0.0, wall - data - compute)
        return outcomes

    def _collect_losses(self, results: Mapping[int, ClientResult[Any]]) -> None:
        updates = {
            k: r.update.training if isinstance(r.update, StageOneUpdate) else r.update for k, r in results.items()
        }
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


def timed(server: RunServer, work: Callable[[], S]) -> S:
    """Run a method's function; its own time, less what clients took, is `aggregate`."""
    before = sum(server.costs.seconds.values())
    begin = time.perf_counter()
    state = work()
    elsewhere = sum(server.costs.seconds.values()) - before
    server.costs.seconds["aggregate"] += max(0.0, time.perf_counter() - begin - elsewhere)
    return state


def predict_test(server: RunServer, weights: FlatWeights, images: int) -> NDArray[np.float32]:
    """Logits (N, C) float32 of the global model on the held-out images, in fixed shards over the workers."""
    shards = slices_of(images, FORWARD_BATCH)
    items = [WorkItem(i, 0, PredictTest(a, b), b - a) for i, (a, b) in enumerate(shards)]
    before = dict(server.costs.seconds)
    outcomes = server.dispatch(items, {"weights": weights})
    server.costs.seconds = before  # evaluation is booked as a whole
    return np.concatenate([o.result.update for o in outcomes])
