"""The condition of a run: the same for every method, and fixed before any of them begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsir.condition import Condition
from fedsir.errors import BadInput
from fedsir.models.network import initial_network


def parts(condition: Condition) -> dict[str, Any]:
    return {
        "indices": [i.tolist() for i in condition.federation.indices],
        "observed": [y.tolist() for y in condition.federation.observed],
        "noisy": condition.truth.noisy.tolist(),
        "weights": condition.initial_weights.values.tobytes(),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "oct_fedsir"},
        {"training": {"rounds": 9, "batch_size": 5, "optimizer": {"lr": 0.1}}},
        {"execution": {"actors": 3, "threads": 2}},
        {"evaluation": {"bootstrap_samples": 7}},
        {"name": "another"},
    ],
)
def test_it_does_not_depend_on_what_is_done_with_it(lab: Any, changes: dict[str, Any]) -> None:
    assert parts(lab.condition(lab.config(**changes))) == parts(lab.condition(lab.config()))


def test_another_seed_is_another_federation_from_other_weights(lab: Any) -> None:
    one, other = parts(lab.condition(lab.config())), parts(lab.condition(lab.config(seed=1)))
    assert all(one[name] != other[name] for name in ("indices", "observed", "weights"))


def test_noise_changes_labels_and_nothing_else(lab: Any) -> None:
    noisy, none = (
        parts(lab.condition(lab.config(federation={"noise": {"type": kind}}))) for kind in ("symmetric", "none")
    )
    assert noisy["indices"] == none["indices"]
    assert noisy["weights"] == none["weights"]
    assert noisy["observed"] != none["observed"]
    assert not any(none["noisy"])


def test_the_truth_are_the_labels_of_the_data_set(lab: Any) -> None:
    condition = lab.condition(lab.config())
    labels = condition.dataset.train.labels
    for k, held in enumerate(condition.federation.indices):
        np.testing.assert_array_equal(condition.truth.labels[k], labels[held])
        kept = np.array_equal(condition.federation.observed[k], labels[held])
        assert kept == (not condition.truth.noisy[k])


def test_first_weights_are_those_of_the_initial_network(lab: Any) -> None:
    config = lab.config(seed=4)
    condition = lab.condition(config)
    state = initial_network(config.model, 4, 4).state_dict()
    named = dict(condition.schema.named(condition.initial_weights))
    assert named.keys() == state.keys()
    for name, value in named.items():
        np.testing.assert_array_equal(value, state[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"clients": 100}},
        {"federation": {"noise": {"type": "asymmetric", "label_map": "wake_forest"}}},
        {"model": {"weights": "nowhere.pth"}},
        {"model": {"weights": "imagenet"}},
    ],
)
def test_impossible_conditions_are_bad_input(lab: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        lab.condition(lab.config(**changes))
