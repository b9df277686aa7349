"""The server side of a run: work spread over the workers, work done once, and what is counted."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import ray

from fedsir.clients import parts
from fedsir.clients.executor import Outcome
from fedsir.clients.runtime import Client, Work
from fedsir.clients.tasks import Broadcast, ClientResult, PredictTest
from fedsir.clients.training import LocalUpdate, slices_of
from fedsir.errors import RunFailed
from fedsir.methods import stage_one
from fedsir.methods.fedavg import FedAvg
from fedsir.server import Memory, RoundCosts, RunServer, runtime_setup


@dataclass(frozen=True)
class Position:
    """Reports where it stands and what it was sent."""

    name: str

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[tuple[str, int, int, float]]:
        return ClientResult((self.name, client.id, client.round, broadcast["value"]))


@dataclass(frozen=True)
class Failing:
    """Raises instead of working."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        raise ArithmeticError("no result")


def served(lab: Any, memory: Memory | None = None, executor: Any = None, **changes: Any) -> tuple[RunServer, Any]:
    """A server ready for work, and its condition."""
    config = lab.config(**changes)
    condition = lab.condition(config)
    chosen = executor or lab.executor
    chosen.prepare(runtime_setup(config, condition, "cpu"))
    return RunServer(config, condition, chosen, memory), condition


# -- spread ------------------------------------------------------------------------------------------------------------


def test_spread_work_comes_back_in_the_order_of_its_tasks(lab: Any) -> None:
    """More tasks than clients: no client is meant by the position."""
    server, _ = served(lab)
    names = [f"task {i}" for i in range(9)]
    found = server.spread([Position(name) for name in names], 7, {"value": 0.5})
    assert found == [(name, i, 7, 0.5) for i, name in enumerate(names)]
    assert server.spread([Position("alone")], 0, {"value": 1.0}) == [("alone", 0, 0, 1.0)]


def test_spread_work_is_no_traffic_and_no_training(lab: Any) -> None:
    server, condition = served(lab)
    server.spread([PredictTest(0, 20), PredictTest(20, 60)], 0, {"weights": condition.initial_weights})
    costs = server.costs
    assert (costs.bytes_up, costs.bytes_down) == (0, 0)
    assert (costs.client_epochs, costs.forward_units) == (0, 0)
    assert costs.loss is None
    # The time it takes is time of the round.
    assert costs.seconds["compute"] > 0


@pytest.mark.parametrize("actors", [2, "per-client"])
def test_spread_work_is_the_same_on_actors(lab: Any, lane_of: Callable[..., Any], actors: int | str) -> None:
    tasks = [PredictTest(a, b) for a, b in slices_of(60, 7)]
    assert len(tasks) > 2 * lab.clients
    found = []
    for executor in (lab.executor, lane_of(actors)):
        server, condition = served(lab, executor=executor)
        found.append(server.spread(tasks, 3, {"weights": condition.initial_weights}))
    for here, there in zip(*found, strict=True):
        np.testing.assert_array_equal(here, there)


def test_spread_work_that_fails_is_named(lab: Any) -> None:
    server, _ = served(lab)
    with pytest.raises(RunFailed, match="Failing failed: ArithmeticError: no result"):
        server.spread([Position("fine"), Failing()], 0, {"value": 0.0})


# -- once --------------------------------------------------------------------------------------------------------------


class Costly:
    """Work that books its own cost and counts how often it is done."""

    def __init__(self, server: RunServer, loss: float | None = 0.25) -> None:
        self.server, self.loss, self.done = server, loss, 0

    def __call__(self) -> str:
        self.done += 1
        costs = self.server.costs
        costs.bytes_up += 100
        costs.bytes_down += 10
        costs.client_epochs += 2.5
        costs.forward_units += 1.5
        costs.seconds["compute"] += 3.0
        costs.loss = self.loss
        self.server.note("a guard acted")
        return f"result {self.done}"


def spent(costs: RoundCosts) -> tuple[Any, ...]:
    return costs.bytes_up, costs.bytes_down, costs.client_epochs, costs.forward_units, costs.seconds["compute"]


def test_without_a_memory_work_is_done_each_time(lab: Any) -> None:
    server, _ = served(lab)
    work = Costly(server)
    assert [server.once("work a", work) for _ in range(2)] == ["result 1", "result 2"]
    assert spent(server.costs) == (200, 20, 5.0, 3.0, 6.0)
    assert server.costs.notes == ("a guard acted",) * 2


def test_with_a_memory_work_is_done_once_and_paid_for_by_everybody(lab: Any) -> None:
    memory = Memory()
    first, _ = served(lab, memory)
    first.costs.bytes_up = 7
    first.note("before")
    work = Costly(first)
    assert first.once("work a", work) == "result 1"
    assert spent(first.costs) == (107, 10, 2.5, 1.5, 3.0)
    assert first.costs.loss == 0.25
    assert first.costs.notes == ("before", "a guard acted")

    second, _ = served(lab, memory)
    later = Costly(second)
    assert second.once("work a", later) == "result 1"
    assert later.done == 0
    assert spent(second.costs) == (100, 10, 2.5, 1.5, 3.0)
    assert second.costs.notes == ("a guard acted",)
    # What one run books later is not booked in the memory.
    second.costs.bytes_up += 1000
    second.costs.seconds["compute"] += 1000.0
    third, _ = served(lab, memory)
    third.once("work a", Costly(third))
    assert spent(third.costs) == (100, 10, 2.5, 1.5, 3.0)
    assert spent(first.costs) == (107, 10, 2.5, 1.5, 3.0)


def test_another_key_is_other_work(lab: Any) -> None:
    server, _ = served(lab, Memory())
    work = Costly(server)
    assert [server.once(key, work) for key in ("work a", "work b", "work a")] == ["result 1", "result 2", "result 1"]
    assert spent(server.costs) == (300, 30, 7.5, 4.5, 9.0)


def test_work_without_a_loss_leaves_the_loss_alone(lab: Any) -> None:
    server, _ = served(lab, Memory())
    server.costs.loss = 0.75
    server.once("work a", Costly(server, loss=None))
    assert server.costs.loss == 0.75


def test_work_that_fails_is_not_remembered_and_leaves_the_costs(lab: Any) -> None:
    memory = Memory()
    server, _ = served(lab, memory)
    server.costs.bytes_up = 7
    before = replace(server.costs, seconds=dict(server.costs.seconds))
    work = Costly(server)

    def fail() -> str:
        work()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.once("work a", fail)
    assert server.costs == before
    assert memory.results == {}
    assert server.once("work a", work) == "result 2"
    assert spent(server.costs) == (107, 10, 2.5, 1.5, 3.0)


# -- what a round costs ------------------------------------------------------------------------------------------------


def counted(lab: Any, method: Any, **changes: Any) -> list[tuple[float, float]]:
    """Client-epochs and forward units of each round."""
    recorder = lab.collector()
    lab.run(lab.config(method, **changes), recorder=recorder)
    return [(r.metrics["cost/client_epochs"], r.metrics["cost/forward_units"]) for r in recorder.rounds]


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_round_of_fedavg_is_its_epochs_per_client_and_nothing_else(lab: Any, epochs: int) -> None:
    found = counted(lab, "fedavg", training={"rounds": 2, "local_epochs": epochs})
    assert found == [pytest.approx((epochs * lab.clients, 0.0))] * 2


def test_oct_fedsir_costs_what_its_stages_cost(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage I: five epochs and one forward pass each; teacher: one per noisy client; a checkpoint: one each."""
    real = stage_one.identify

    def decide(*arguments: Any) -> Any:
        return replace(real(*arguments), clean=np.array([True, False, False, False]))

    monkeypatch.setattr(stage_one, "identify", decide)
    method = lab.oct(stage_one={"epochs": 5}, relabeling={"first": 1, "every": 50})
    clients, noisy = lab.clients, 3
    assert counted(lab, method) == [
        pytest.approx((5 * clients + clients, clients + noisy)),
        pytest.approx((clients, clients + noisy)),
        pytest.approx((clients, noisy)),
    ]


# -- results taken in as they come -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Returns an update of its own without training, and something for the client."""

    samples: int
    skipped: int = 0

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        client.work.trained += client.size
        values = broadcast["weights"].values + np.float32(client.id)
        weights = replace(broadcast["weights"], values=values)
        return ClientResult(
            LocalUpdate(weights, self.samples, float(client.id), 1, self.skipped), np.full(3, client.id)
        )


MANY = {"federation": {"clients": 9, "clean_clients": 9, "partition": {"min_client_size": 1}}}
TRAINED = {k: Trained(0 if k == 4 else 5, skipped=int(k == 4)) for k in (7, 2, 4, 0, 8, 3)}


def fold(server: RunServer, condition: Any) -> tuple[list[int], dict[int, Any]]:
    """The order in which results came, and what was kept of them."""
    order: list[int] = []

    def take(client: int, result: Any) -> Any:
        order.append(client)
        return result.update.weights.values[:2], result.state

    return order, server.fold_clients(TRAINED, 3, {"weights": condition.initial_weights}, take)


@pytest.mark.parametrize("actors", [None, 2])
@pytest.mark.parametrize("clients", [1, 2, 100])
def test_results_are_taken_in_client_order_and_cost_what_they_cost_together(
    lab: Any, lane_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, clients: int, actors: int | None
) -> None:
    executor = None
    if actors is not None:
        executor = lane_of(actors)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    server, condition = served(lab, **MANY)
    expected = server.run_clients(TRAINED, 3, {"weights": condition.initial_weights})
    for name, value in (("PART_BYTES", 0), ("PART_CLIENTS", clients), ("PART_PER_SLOT", 0)):
        monkeypatch.setattr(parts, name, value)
    folding, _ = served(lab, executor=executor, **MANY)
    order, kept = fold(folding, condition)
    assert order == list(kept) == list(expected) == sorted(TRAINED)
    for client, (values, state) in kept.items():
        np.testing.assert_array_equal(values, expected[client].update.weights.values[:2])
        np.testing.assert_array_equal(state, expected[client].state)
    assert replace(folding.costs, seconds={}) == replace(server.costs, seconds={})
    assert folding.costs.notes == ("client 4 skipped 1 steps with a non-finite loss",)
    assert folding.costs.loss == pytest.approx(np.mean([0, 2, 3, 7, 8]))


def test_parts_of_a_fold_are_consecutive_clients(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = lab.dispatching(lab.executor)
    server, condition = served(lab, executor=watched, **MANY)
    for name, value in (("PART_BYTES", 0), ("PART_CLIENTS", 2), ("PART_PER_SLOT", 0)):
        monkeypatch.setattr(parts, name, value)
    fold(server, condition)
    assert [[i.client for i in d.items] for d in watched.log] == [[0, 2], [3, 4], [7, 8]]


def test_what_is_kept_of_a_result_holds_on_to_nothing_else(lab: Any) -> None:
    """A view of a message from an actor would keep the whole message, with the models of several clients."""
    server, condition = served(lab, **MANY)
    seen = {}

    def take(client: int, result: Any) -> Any:
        seen[client] = result.update.weights.values
        return result.update.weights.values[:2]

    kept = server.fold_clients(TRAINED, 0, {"weights": condition.initial_weights}, take)
    for client, values in kept.items():
        assert values.base is None
        assert not np.shares_memory(values, seen[client])


def test_folding_nobody_is_nothing(lab: Any) -> None:
    server, condition = served(lab)
    assert server.fold_clients({}, 0, {"weights": condition.initial_weights}, lambda *_: None) == {}
    assert server.costs.loss is None


class Answering:
    """An executor of as many slots as told that makes up updates of the size of the model at once."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def prepare(self, setup: Any) -> None: ...

    def close(self) -> None: ...

    def run(self, items: Any, broadcast: Any) -> list[Outcome]:
        weights = broadcast["weights"]
        updates = [
            LocalUpdate(replace(weights, values=weights.values + np.float32(i.client)), 1, 0.5, 1, 0) for i in items
        ]
        return [Outcome(ClientResult(update), Work()) for update in updates]


@pytest.mark.parametrize("slots", [1, 2])
def test_memory_of_a_round_of_fedavg_does_not_grow_with_the_clients(lab: Any, slots: int) -> None:
    peaks = {}
    for clients in (250, 1000):
        config = lab.config()
        condition = lab.federation_of(config, [[k % 160] for k in range(clients)])
        server = RunServer(config, condition, Answering(slots))
        state = FedAvg().begin(server)
        tracemalloc.start()
        try:
            state = FedAvg().round(server, state, 0)
            peaks[clients] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert np.isfinite(state.weights.values).all()
    together = 1000 * condition.initial_weights.nbytes
    assert peaks[1000] < 1.2 * peaks[250]
    assert peaks[1000] < 0.4 * together
