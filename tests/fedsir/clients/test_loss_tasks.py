"""Losses of a received model on a client's own images, against a loop over single images."""

from __future__ import annotations

import copy
from math import e, log
from typing import Any

import numpy as np
import pytest
import torch

from fedsir.clients import training
from fedsir.clients.loss_tasks import ClassLosses, sample_losses
from fedsir.clients.runtime import Client, ClientRuntime, Work
from fedsir.data.transforms import normalize


@pytest.fixture(scope="module")
def condition(lab: Any) -> Any:
    return lab.condition(lab.config())


@pytest.fixture(scope="module")
def runtime(lab: Any) -> ClientRuntime:
    return lab.runtime(lab.config())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def weights(lab: Any) -> Any:
    """A model that has seen the classes, so that losses differ."""
    return lab.run(lab.config(training={"optimizer": {"lr": 3e-3}})).weights


def client(runtime: ClientRuntime, number: int = 2) -> Client:
    return Client(number, 0, runtime, Work())


def one_by_one(runtime: ClientRuntime, weights: Any, indices: Any, labels: Any) -> list[tuple[float, float]]:
    """Cross entropy of logits and of softmax outputs, image by image in float64."""
    runtime.binding.load(weights)
    network = copy.deepcopy(runtime.network).eval()
    found = []
    for i, label in zip(indices, labels, strict=True):
        image = normalize(torch.from_numpy(runtime.setup.train_images[[i]]), runtime.setup.transform)
        with torch.no_grad():
            p = torch.softmax(network(image)[0].double(), dim=0)
        again = torch.softmax(p, dim=0)
        found.append((-log(p[label].item()), -log(again[label].item())))
    return found


def test_losses_are_those_of_every_image_in_client_order(
    runtime: ClientRuntime, condition: Any, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "FORWARD_BATCH", 7)
    labels = condition.federation.observed[2]
    expected = one_by_one(runtime, weights, condition.federation.indices[2], labels)
    worker = client(runtime)
    logits = training.exact_logits(worker, weights)
    plain = sample_losses(logits, labels)
    assert plain.dtype == np.float64
    np.testing.assert_allclose(plain, [a for a, _ in expected], rtol=1e-4)
    assert worker.work.forwarded == len(labels)
    bounded = sample_losses(logits, labels, bounded=True)
    assert bounded.dtype == np.float64
    np.testing.assert_allclose(bounded, [b for _, b in expected], rtol=1e-4)
    assert ((bounded >= log(e + 3) - 1) & (bounded <= log(e + 3))).all()
    assert np.ptp(plain) > 0.1


def test_losses_follow_the_labels_given(runtime: ClientRuntime, condition: Any, weights: Any) -> None:
    """They are the log-probabilities of one prediction, whatever label is asked for."""
    size = int(condition.federation.sizes[2])
    logits = training.exact_logits(client(runtime), weights)
    each = [sample_losses(logits, np.full(size, c)) for c in range(4)]
    np.testing.assert_allclose(np.exp(-np.stack(each)).sum(axis=0), 1.0)


def test_the_network_is_evaluated_not_trained(runtime: ClientRuntime, weights: Any) -> None:
    first = training.exact_logits(client(runtime), weights)
    runtime.module.train()
    np.testing.assert_array_equal(training.exact_logits(client(runtime), weights), first)
    after = runtime.binding.read()
    np.testing.assert_array_equal(after.values, weights.values)
    np.testing.assert_array_equal(after.counters, weights.counters)


def test_class_losses_are_means_over_the_images_of_a_label(
    runtime: ClientRuntime, condition: Any, weights: Any
) -> None:
    labels = condition.federation.observed[2].copy()
    labels[labels == 1] = 0
    losses = sample_losses(training.exact_logits(client(runtime), weights), labels)
    result = ClassLosses(labels, 5)(client(runtime), {"weights": weights})
    update = result.update
    assert result.state is None
    assert update.counts.dtype == np.int64
    assert update.counts.tolist() == [int((labels == c).sum()) for c in range(5)]
    for c in range(5):
        if c in labels:
            assert update.mean[c] == pytest.approx(losses[labels == c].mean())
        else:
            assert np.isnan(update.mean[c])
    assert np.isnan(update.mean[[1, 4]]).all()
    assert update.mean.dtype == np.float64


def test_a_single_class_client_has_one_mean(runtime: ClientRuntime, condition: Any, weights: Any) -> None:
    size = int(condition.federation.sizes[0])
    labels = np.full(size, 3)
    update = ClassLosses(labels, 4)(client(runtime, 0), {"weights": weights}).update
    assert np.isnan(update.mean).tolist() == [True, True, True, False]
    assert update.counts.tolist() == [0, 0, 0, size]
