"""FedAvg: what the server does with what the clients return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedsir.clients.training import LocalUpdate
from fedsir.models.flat import FlatWeights


@dataclass(frozen=True)
class Returning:
    """A client that returns a prepared update instead of training."""

    value: float
    samples: int
    count: int = 0

    def __call__(self, client: Any, broadcast: Any) -> Any:  # noqa: ARG002
        from fedsir.clients.tasks import ClientResult

        weights = broadcast["weights"]
        values = np.full_like(weights.values, self.value)
        update = LocalUpdate(FlatWeights(values, np.full_like(weights.counters, self.count)), self.samples, 1.0, 1, 0)
        return ClientResult(update)


def averaged(lab: Any, *updates: Returning) -> Any:
    """One round at as many clients as updates; result and notes."""
    config = lab.config(training={"rounds": 1})
    condition = lab.federation_of(config, np.array_split(np.arange(160), len(updates)))

    def prepared(items: list[Any]) -> list[Any]:
        if type(items[0].task).__name__ != "LocalTraining":
            return items
        return [replace(i, task=updates[i.client]) for i in items]

    recorder = lab.collector()
    executor = lab.dispatching(lab.executor, change=prepared)
    result = lab.run(config, condition=condition, executor=executor, recorder=recorder)
    return result, condition.initial_weights, recorder.rounds[0]


def test_clients_weigh_by_their_images(lab: Any) -> None:
    result, _, _ = averaged(lab, Returning(0.0, 1), Returning(4.0, 3))
    np.testing.assert_array_equal(result.weights.values, 3.0)


def test_equal_clients_give_their_state(lab: Any) -> None:
    result, _, _ = averaged(lab, *[Returning(0.1, n) for n in (1, 7, 13)])
    np.testing.assert_array_equal(result.weights.values, np.float32(0.1))


def test_counters_take_the_maximum(lab: Any) -> None:
    result, _, _ = averaged(lab, Returning(1.0, 5, count=3), Returning(1.0, 50, count=2))
    np.testing.assert_array_equal(result.weights.counters, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_clients_that_diverged_are_left_out_and_named(lab: Any, value: float) -> None:
    result, _, record = averaged(lab, Returning(1.0, 10), Returning(value, 90), Returning(2.0, 30))
    np.testing.assert_array_equal(result.weights.values, 1.75)
    assert record.notes == ("client 1 returned non-finite weights and was left out of the average",)


def test_clients_without_finished_steps_are_left_out(lab: Any) -> None:
    result, _, _ = averaged(lab, Returning(1.0, 10), Returning(5.0, 0))
    np.testing.assert_array_equal(result.weights.values, 1.0)


def test_without_a_usable_update_the_model_stays(lab: Any) -> None:
    result, initial, record = averaged(lab, Returning(float("nan"), 10), Returning(5.0, 0))
    np.testing.assert_array_equal(result.weights.values, initial.values)
    np.testing.assert_array_equal(result.weights.counters, initial.counters)
    assert record.notes[-1] == "no client returned a usable update; the global model stays as it was"


def test_it_identifies_nobody_and_changes_no_label(lab: Any) -> None:
    result = lab.run(lab.config())
    assert result.labels is None
    assert result.identification is None
    assert result.predicted_noisy is None
    assert not any(k.startswith(("ident/", "relabel/")) for k in result.final)


def test_every_client_trains_every_round_on_its_observed_labels(lab: Any) -> None:
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    config = lab.config(training={"local_epochs": 2, "optimizer": {"lr": 1e-4}})
    lab.run(config, executor=watched, recorder=recorder)
    rounds = watched.tasks("LocalTraining")
    assert [d.round for d in rounds] == [0, 1, 2]
    for dispatch in rounds:
        assert [i.client for i in dispatch.items] == [0, 1, 2, 3]
        for item in dispatch.items:
            np.testing.assert_array_equal(item.task.labels, recorder.started.federation.observed[item.client])
            assert (item.task.recipe.epochs, item.task.recipe.batch_size) == (2, 16)
            assert item.task.recipe.optimizer == config.training.optimizer
