"""Uncertainty by Monte Carlo dropout: against its definition, and on the public pool."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch

from fedsir.clients import uncertainty
from fedsir.clients.runtime import Client, ClientRuntime, Work
from fedsir.clients.training import forward
from fedsir.clients.uncertainty import PoolUncertainty, mc_dropout_entropy
from fedsir.models.flat import FlatWeights

POOL = 12
POSITIONS = np.array([0, 3, 4, 7, 11])


@pytest.fixture(scope="module")
def condition(lab: Any) -> Any:
    return lab.condition(lab.config(federation={"public_pool": POOL}))


@pytest.fixture
def runtime(lab: Any) -> ClientRuntime:
    return lab.runtime(lab.config(federation={"public_pool": POOL}))  # type: ignore[no-any-return]


def client(runtime: ClientRuntime, number: int = 0, round_: int = 5) -> Client:
    return Client(number, round_, runtime, Work())


def features_of(runtime: ClientRuntime, weights: Any) -> torch.Tensor:
    runtime.binding.load(weights)
    return forward(client(runtime), runtime.pool_images(0, POOL), "features")


def test_it_is_the_entropy_of_the_mean_over_thinned_features(runtime: ClientRuntime, condition: Any) -> None:
    features = features_of(runtime, condition.initial_weights)
    found = mc_dropout_entropy(runtime.network, features, 10, 0.3, np.random.default_rng(4))
    rng, mean = np.random.default_rng(4), np.zeros((POOL, 4))
    weight = runtime.network.head.weight.detach().numpy().astype(np.float64)
    bias = runtime.network.head.bias.detach().numpy().astype(np.float64)
    for _ in range(10):
        kept = rng.random(features.shape, dtype=np.float32) >= 0.3
        logits = (features.numpy() * kept / 0.7) @ weight.T + bias
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        mean += powers / powers.sum(axis=1, keepdims=True) / 10
    np.testing.assert_allclose(found, -(mean * np.log(mean)).sum(axis=1), rtol=1e-4)
    assert (found > 0).all()
    assert (found < log(4)).all()


def test_without_dropout_it_is_the_entropy_of_the_prediction(runtime: ClientRuntime, condition: Any) -> None:
    features = features_of(runtime, condition.initial_weights)
    p = torch.softmax(runtime.network.logits(features).double(), dim=1).detach().numpy()
    found = mc_dropout_entropy(runtime.network, features, 3, 0.0, np.random.default_rng(4))
    np.testing.assert_allclose(found, -(p * np.log(p)).sum(axis=1), rtol=1e-12)


def test_certain_predictions_have_no_entropy(runtime: ClientRuntime, condition: Any) -> None:
    features = features_of(runtime, condition.initial_weights)
    with torch.no_grad():
        runtime.network.head.bias.copy_(torch.tensor([1e6, 0.0, 0.0, 0.0]))
    found = mc_dropout_entropy(runtime.network, features, 5, 0.3, np.random.default_rng(4))
    np.testing.assert_array_equal(found, np.zeros(POOL))


def test_the_backbone_runs_once_in_eval_mode(
    runtime: ClientRuntime, condition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def counted(at: Client, images: torch.Tensor, what: str) -> torch.Tensor:
        out = forward(at, images, what)
        passes.append((what, len(images), runtime.module.training))
        return out

    monkeypatch.setattr(uncertainty, "forward", counted)
    runtime.module.train()
    PoolUncertainty(condition.initial_weights, POSITIONS, 10, 0.3)(client(runtime), {})
    assert passes == [("features", 5, False)]
    # Running statistics are what was loaded.
    np.testing.assert_array_equal(runtime.binding.read().values, condition.initial_weights.values)
    np.testing.assert_array_equal(runtime.binding.read().counters, condition.initial_weights.counters)


def test_it_sums_over_the_images_asked_for(runtime: ClientRuntime, condition: Any) -> None:
    features = features_of(runtime, condition.initial_weights)[POSITIONS]
    task = PoolUncertainty(condition.initial_weights, POSITIONS, 4, 0.0)
    expected = mc_dropout_entropy(runtime.network, features, 4, 0.0, np.random.default_rng(0)).sum()
    assert task(client(runtime), {}).update == pytest.approx(expected, rel=1e-5)


def test_models_of_a_round_are_judged_under_the_same_masks(runtime: ClientRuntime, condition: Any) -> None:
    task = PoolUncertainty(condition.initial_weights, POSITIONS, 3, 0.3)
    assert task(client(runtime, 0), {}).update == task(client(runtime, 3), {}).update
    assert task(client(runtime, 0, 5), {}).update != task(client(runtime, 0, 6), {}).update


def test_a_diverged_model_has_no_uncertainty(runtime: ClientRuntime, condition: Any) -> None:
    weights = condition.initial_weights
    broken = FlatWeights(np.full_like(weights.values, np.nan), weights.counters)
    task = PoolUncertainty(weights, POSITIONS, 3, 0.3)
    assert np.isnan(replace(task, weights=broken)(client(runtime), {}).update)
