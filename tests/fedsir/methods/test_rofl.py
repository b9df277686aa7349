"""RoFL: its loss by hand, the ramps, what travels, and federations at the edge of what it can handle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.methods.rofl import (
    CentroidObjective,
    RoFLConfig,
    RoFLUpdate,
    Terms,
    rofl_loss,
    small_loss_samples,
    terms_of_round,
)
from fedsir.prototypes import merged_centroids

PLAIN = Terms(forget_rate=0.0, lambda_cen=0.0, lambda_e=0.0, cen_grad=True, cen_reduction="mean_per_dim")


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "logits": torch.randn(11, 3),
        "features": torch.rand(11, 5),
        "labels": torch.randint(0, 3, (11,)),
        "centroids": torch.rand(3, 5),
    }


# -- schedule ------------------------------------------------------------------------------------------------------


def test_ramps_of_the_full_budget() -> None:
    config = RoFLConfig()
    terms = [terms_of_round(config, t, 100) for t in range(100)]
    forget = [t.forget_rate for t, _ in terms]
    np.testing.assert_allclose(forget[:10], np.linspace(0.0, 0.2, 10), atol=1e-15)
    assert set(forget[9:]) == {0.2}
    np.testing.assert_allclose([t.lambda_cen for t, _ in terms[:11]], np.linspace(0.0, 1.0, 11), atol=1e-15)
    assert [used for _, used in terms] == [False] * 10 + [True] * 90
    assert {t.lambda_e for t, _ in terms} == {0.8}


def test_a_rehearsal_of_ten_rounds_has_every_stage() -> None:
    terms = [terms_of_round(RoFLConfig(), t, 10) for t in range(10)]
    assert [used for _, used in terms] == [False] + [True] * 9
    assert [t.forget_rate for t, _ in terms] == [0.0] + [0.2] * 9
    assert [t.lambda_cen for t, _ in terms] == [0.0] + [1.0] * 9


# -- selection and loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rate", "kept"), [(10, 0.2, 8), (9, 0.2, 7), (10, 0.9, 1), (3, 0.9, 1), (1, 0.2, 1), (128, 0.2, 102)]
)
def test_the_share_with_small_losses_is_kept_but_never_nobody(size: int, rate: float, kept: int) -> None:
    losses = torch.arange(size, dtype=torch.float32).flip(0)
    assert small_loss_samples(losses, rate).tolist() == list(range(size - kept, size))


def test_of_equal_losses_the_earlier_ones_are_kept() -> None:
    assert small_loss_samples(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), 0.4).tolist() == [0, 1, 2]


def test_with_every_term_off_the_loss_is_the_cross_entropy_of_the_whole_batch(batch: dict[str, Tensor]) -> None:
    loss, chosen = rofl_loss(**batch, terms=PLAIN)
    assert chosen.tolist() == list(range(11))
    assert float(loss) == float(F.cross_entropy(batch["logits"], batch["labels"]))


@pytest.mark.parametrize("reduction", ["mean_per_dim", "sum"])
def test_the_loss_by_hand(reduction: Any) -> None:
    """Four samples; the last has the largest loss, the second disagrees with its nearest centroid."""
    centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    features = torch.tensor([[2.0, 0.0], [3.0, 1.0], [1.0, 3.0], [9.0, 9.0]])
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 2.0], [5.0, 0.0]])
    labels, pseudo = torch.tensor([0, 1, 1, 1]), torch.tensor([1, 0, 0, 0])
    terms = Terms(0.25, 0.5, 0.8, cen_grad=True, cen_reduction=reduction)
    loss, chosen = rofl_loss(logits, features, labels, centroids, terms, pseudo)
    assert chosen.tolist() == [0, 1, 2]

    log_p = logits[:3].log_softmax(dim=1).double().numpy()
    targets = [0, 0, 1]  # label, pseudo-label, label
    ce = -np.mean([log_p[i, y] for i, y in enumerate(targets)])
    distances = 1.0 + 0.0 + (1.0 + 4.0)  # |(2,0)-(1,0)|^2, none for the second, |(1,3)-(0,1)|^2
    cen = distances if reduction == "sum" else distances / 3 / 2
    entropy = -np.mean((np.exp(log_p) * log_p).sum(axis=1))
    assert float(loss) == pytest.approx(ce + 0.5 * cen + 0.8 * entropy, rel=1e-6)


def test_before_pseudo_labels_are_used_the_given_labels_hold(batch: dict[str, Tensor]) -> None:
    given, _ = rofl_loss(**batch, terms=replace(PLAIN, forget_rate=0.2))
    other, _ = rofl_loss(**batch, terms=replace(PLAIN, forget_rate=0.2), pseudo_labels=(batch["labels"] + 1) % 3)
    assert float(given) != float(other)
    same, _ = rofl_loss(**batch, terms=replace(PLAIN, forget_rate=0.2), pseudo_labels=batch["labels"])
    assert float(given) == float(same)


def gradient(batch: dict[str, Tensor], terms: Terms) -> tuple[float, Tensor]:
    """Value, and gradient at the features through a linear head as well as through the centroid loss."""
    features = batch["features"].clone().requires_grad_()
    head = torch.linspace(-1, 1, 15).reshape(5, 3)
    loss, _ = rofl_loss(features @ head, features, batch["labels"], batch["centroids"], terms)
    loss.backward()
    assert features.grad is not None
    return float(loss.detach()), features.grad


@pytest.mark.parametrize("reduction", ["mean_per_dim", "sum"])
def test_detached_features_take_every_gradient_from_the_centroid_loss(batch: dict[str, Tensor], reduction: Any) -> None:
    """What the published codes do: the weight of the loss changes its value and not one gradient entry."""
    weak = replace(PLAIN, lambda_e=0.8, cen_grad=False, cen_reduction=reduction)
    (low, before), (high, after) = gradient(batch, weak), gradient(batch, replace(weak, lambda_cen=5.0))
    assert high > low
    assert torch.equal(before, after)


@pytest.mark.parametrize("reduction", ["mean_per_dim", "sum"])
def test_by_default_the_centroid_loss_pulls_agreeing_samples_to_their_centroid(
    batch: dict[str, Tensor], reduction: Any
) -> None:
    config = RoFLConfig()
    assert config.cen_grad
    terms = replace(PLAIN, cen_grad=config.cen_grad, cen_reduction=reduction)
    _, before = gradient(batch, terms)
    _, after = gradient(batch, replace(terms, lambda_cen=3.0))
    nearest = F.cosine_similarity(batch["features"][:, None], batch["centroids"][None], dim=2).argmax(dim=1)
    agrees = (nearest == batch["labels"])[:, None]
    assert 0 < int(agrees.sum()) < 11
    pull = 2 * (batch["features"] - batch["centroids"][batch["labels"]]) * agrees
    scale = 3.0 if reduction == "sum" else 3.0 / 11 / 5
    torch.testing.assert_close(after - before, scale * pull)


def test_saturated_predictions_leave_the_gradient_finite() -> None:
    logits = torch.tensor([[300.0, 0.0], [0.0, -300.0]], requires_grad=True)
    features = torch.rand(2, 4)
    loss, _ = rofl_loss(logits, features, torch.tensor([0, 0]), torch.rand(2, 4), replace(PLAIN, lambda_e=0.8))
    loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# -- centroids during local training -------------------------------------------------------------------------------


class Fixed:
    """A network whose features are the images and whose logits are given."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def features(self, images: Tensor) -> Tensor:
        return images

    def logits(self, features: Tensor) -> Tensor:  # noqa: ARG002
        return self._logits


def test_only_selected_samples_move_the_centroids_of_their_given_label() -> None:
    objective = CentroidObjective(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]]), replace(PLAIN, forget_rate=0.25))
    features = torch.tensor([[0.0, 2.0], [2.0, 0.0], [4.0, 4.0], [100.0, -7.0]])
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    network: Any = Fixed(logits)
    objective(network, Batch(features, torch.tensor([0, 1, 0, 0]), {}))
    # Class 0: mean (2, 3) of the first and third, squared cosine 4/13. Class 1: orthogonal. Class 2: absent.
    torch.testing.assert_close(objective.centroids[0], torch.tensor([9 / 13 + 8 / 13, 12 / 13]))
    assert objective.centroids[1:].tolist() == [[0.0, 1.0], [3.0, 3.0]]


def test_a_batch_with_a_non_finite_loss_moves_no_centroid() -> None:
    start = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    objective = CentroidObjective(start, replace(PLAIN, lambda_cen=1.0))
    network: Any = Fixed(torch.zeros(2, 2))
    loss = objective(network, Batch(torch.tensor([[float("inf"), 0.0], [1.0, 1.0]]), torch.tensor([0, 1]), {}))
    assert not torch.isfinite(loss)
    assert torch.equal(objective.centroids, start)


# -- through the coordinator ---------------------------------------------------------------------------------------


def test_with_every_term_off_it_is_fedavg_to_the_bit(lab: Any) -> None:
    off = {"name": "rofl", "lambda_cen": 0.0, "lambda_e": 0.0, "forget_rate": 0.0, "pseudo_label_start": 1.0}
    assert lab.run(lab.config(off)).weights_hash == lab.run(lab.config()).weights_hash


@pytest.mark.parametrize(
    "setting",
    [
        {"lambda_cen": 1.0},
        {"lambda_e": 0.8},
        {"forget_rate": 0.2},
        {"pseudo_label_start": 0.1},
        {"lambda_cen": 1.0, "cen_reduction": "sum"},
    ],
)
def test_every_term_alone_makes_a_difference(lab: Any, setting: dict[str, Any]) -> None:
    off = {"name": "rofl", "lambda_cen": 0.0, "lambda_e": 0.0, "forget_rate": 0.0, "pseudo_label_start": 1.0}
    assert lab.run(lab.config({**off, **setting})).weights_hash != lab.run(lab.config()).weights_hash


def test_models_centroids_and_once_the_counts_travel(lab: Any) -> None:
    watched, recorder = lab.dispatching(lab.executor), lab.collector()
    lab.run(lab.config("rofl"), executor=watched, recorder=recorder)
    rounds = watched.tasks("RoFLTraining")
    assert [sorted(d.broadcast) for d in rounds] == [["weights"], *[["centroids", "weights"]] * 2]
    counts = recorder.started.federation.observed_counts()
    np.testing.assert_array_equal([u.counts for u in rounds[0].updates.values()], counts)
    assert all(u.counts is None for d in rounds[1:] for u in d.updates.values())
    current = np.zeros_like(rounds[1].broadcast["centroids"])
    for dispatch, following in pairwise(rounds):
        current = merged_centroids(current, np.stack([u.centroids for u in dispatch.updates.values()]), counts)
        np.testing.assert_array_equal(following.broadcast["centroids"], current)
    assert current.dtype == np.float32
    first, later = (r.metrics for r in recorder.rounds[:2])
    assert first["bytes/up"] - later["bytes/up"] == counts.nbytes
    assert later["bytes/down"] - first["bytes/down"] == lab.clients * current.nbytes


def test_forward_passes_are_those_of_centroids_and_pseudo_labels(lab: Any) -> None:
    recorder = lab.collector()
    lab.run(lab.config("rofl"), recorder=recorder)
    assert [r.metrics["cost/forward_units"] for r in recorder.rounds] == [lab.clients] * 3


def broken(value: float) -> Any:
    """Client 2 returns centroids that are `value` in the first round."""

    class Breaking:
        def __init__(self, task: Any) -> None:
            self._task = task

        def __call__(self, client: Any, broadcast: Any) -> Any:
            result = self._task(client, broadcast)
            update: RoFLUpdate = result.update
            return replace(result, update=replace(update, centroids=np.full_like(update.centroids, value)))

    def change(items: list[Any]) -> list[Any]:
        if items[0].round > 0 or type(items[0].task).__name__ != "RoFLTraining":
            return items
        return [replace(i, task=Breaking(i.task)) if i.client == 2 else i for i in items]

    return change


def test_centroids_that_are_not_finite_are_left_out(lab: Any) -> None:
    watched = lab.dispatching(lab.executor, change=broken(float("nan")))
    lab.run(lab.config("rofl"), executor=watched)
    first, second = (d for d in watched.log if "RoFL" in type(d.items[0].task).__name__ and d.round < 2)
    counts = np.stack([u.counts for u in first.updates.values()])
    returned = np.stack([u.centroids for u in first.updates.values()])
    kept = [0, 1, 3]
    expected = merged_centroids(np.zeros_like(returned[0]), returned[kept], counts[kept])
    np.testing.assert_array_equal(second.broadcast["centroids"], expected)


def test_clients_with_one_class_and_classes_that_nobody_observes(lab: Any) -> None:
    config = lab.config("rofl")
    true = lab.condition(config).dataset.train.labels
    classes = [np.flatnonzero(true == c) for c in (0, 1)]
    indices = [classes[0][:20], classes[1][:1], np.sort(np.concatenate([classes[0][20:], classes[1][1:]]))]
    watched = lab.dispatching(lab.executor)
    result = lab.run(config, condition=lab.federation_of(config, indices), executor=watched)
    assert np.isfinite(result.weights.values).all()
    centroids = watched.tasks("RoFLTraining")[-1].broadcast["centroids"]
    assert np.isfinite(centroids).all()
    assert centroids[:2].any(axis=1).all()
    assert not centroids[2:].any()


def test_it_repeats_itself_and_survives_an_interruption(lab: Any, tmp_path: Path) -> None:
    config, file = lab.config("rofl"), tmp_path / "run.safetensors"
    expected = lab.essence(lab.run(config))
    assert lab.essence(lab.run(config)) == expected
    for at in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            lab.run(config, recorder=lab.interrupter(at=at), checkpoint=file)
    assert lab.essence(lab.run(config, checkpoint=file)) == expected


@pytest.mark.parametrize(
    "settings",
    [{"forget_rate": 1.0}, {"forget_rate": -0.1}, {"lambda_cen": -1.0}, {"cen_reduction": "mean"}, {"T_k": 10}],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RoFLConfig.model_validate(settings)
