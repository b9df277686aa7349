"""Matching peers on the public pool: the loss by hand, and what an epoch of it does to a model."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsir.clients.alignment import Peers, match_peers, matching_loss, public_predictions
from fedsir.clients.runtime import Client, Work
from fedsir.config.training import OptimizerConfig


def client(lab: Any, number: int = 1, round_: int = 4) -> tuple[Client, Any]:
    config = lab.config(federation={"public_pool": 24})
    condition = lab.condition(config)
    return Client(number, round_, lab.runtime(config, condition), Work()), condition.initial_weights


def certain(classes: int, size: int) -> NDArray[np.float32]:
    """One peer that is nearly sure of class 0 on every image."""
    row = np.full(classes, 0.01, np.float32)
    row[0] = 1.0 - 0.01 * (classes - 1)
    return np.tile(row, (1, size, 1))


def divergence(target: NDArray[np.float32], predicted: NDArray[np.float32]) -> float:
    p, q = target.astype(np.float64), predicted.astype(np.float64)
    return float((p * np.log(p / q)).sum(axis=1).mean())


def test_identical_predictions_match() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 3.0]])
    peers = logits.softmax(dim=1)[:, None].expand(2, 3, 3)
    assert float(matching_loss(logits, peers, torch.full((3,), 0.5))) == pytest.approx(0.0, abs=1e-6)


def test_divergences_are_weighted_by_share_and_not_by_their_number() -> None:
    uniform, sure = [0.5, 0.5], [1.0, 0.0]
    peers = torch.tensor([[uniform, sure], [sure, sure]])
    loss = matching_loss(torch.zeros(2, 2), peers, torch.tensor([0.5, 0.25]))
    assert float(loss) == pytest.approx((0.25 * log(2) + 0.75 * log(2)) / 2, rel=1e-6)


def test_its_gradient_draws_to_the_weighted_mean_of_the_peers() -> None:
    torch.manual_seed(1)
    logits, shares = torch.randn(5, 4, requires_grad=True), torch.tensor([0.2, 0.5, 0.3])
    peers = torch.randn(5, 3, 4).softmax(dim=2)
    matching_loss(logits, peers, shares).backward()
    mean = (peers * shares[:, None]).sum(dim=1)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (logits.softmax(dim=1) - mean).detach() / 5)


def test_saturated_logits_stay_finite() -> None:
    logits = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss = matching_loss(logits, torch.tensor([[[0.0, 1.0]]]), torch.ones(1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1000.0)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_peers_can_be_left_out() -> None:
    peers = Peers(np.arange(6, dtype=np.float32).reshape(3, 1, 2), np.array([0.2, 0.3, 0.5]))
    rest = peers.without(np.array([7, 4, 9]) == 4)
    assert rest.predictions[:, 0, 0].tolist() == [0.0, 4.0]
    assert rest.shares.tolist() == [0.2, 0.5]


def test_public_predictions_are_probabilities_of_every_pool_image(lab: Any) -> None:
    someone, weights = client(lab)
    first = public_predictions(someone, weights)
    assert first.shape == (24, 4)
    np.testing.assert_allclose(first.sum(axis=1), 1.0, rtol=1e-5)
    assert someone.work.forwarded == 24
    other, _ = client(lab, number=3, round_=0)
    np.testing.assert_array_equal(public_predictions(other, weights), first)


def test_an_epoch_of_matching_brings_predictions_nearer(lab: Any) -> None:
    someone, weights = client(lab)
    peers = Peers(certain(4, 24), np.ones(1))
    before = divergence(peers.predictions[0], public_predictions(someone, weights))
    matched = match_peers(someone, weights, peers, 8, OptimizerConfig(lr=1e-2))
    after = divergence(peers.predictions[0], public_predictions(someone, matched))
    assert after < 0.7 * before


def test_matching_depends_on_client_and_round_and_not_on_what_the_runtime_did_before(lab: Any) -> None:
    someone, weights = client(lab)
    peers, adam = Peers(certain(4, 24), np.ones(1)), OptimizerConfig(lr=1e-3)
    first = match_peers(someone, weights, peers, 8, adam)
    again = match_peers(someone, weights, peers, 8, adam)
    np.testing.assert_array_equal(first.values, again.values)
    other, _ = client(lab, number=2)
    assert not np.array_equal(match_peers(other, weights, peers, 8, adam).values, first.values)
    assert someone.work.trained == 0
    assert someone.work.forwarded == 2 * 3 * 24


def test_batches_without_a_finite_loss_take_no_step(lab: Any) -> None:
    someone, weights = client(lab)
    peers = Peers(np.full((1, 24, 4), np.nan, np.float32), np.ones(1))
    matched = match_peers(someone, weights, peers, 8, OptimizerConfig(lr=1.0))
    trained = sum(e.stop - e.start for e in lab.condition(lab.config()).schema.entries if e.trainable)
    np.testing.assert_array_equal(matched.values[:trained], weights.values[:trained])


def test_without_a_peer_nothing_moves(lab: Any) -> None:
    someone, weights = client(lab)
    nobody = Peers(certain(4, 24), np.ones(1)).without(np.array([True]))
    matched = match_peers(someone, weights, nobody, 8, OptimizerConfig(lr=1.0, weight_decay=0.1))
    np.testing.assert_array_equal(matched.values, weights.values)
