"""FedNed's work: pseudo-labels, the two models of an extremely noisy client, negative distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsir.clients.fedned_tasks import (
    ConfidentCrossEntropy,
    DistilNegatively,
    TrainTwice,
    inverse_distribution,
    negative_distillation,
    pseudo_labels,
)
from fedsir.clients.module import Batch
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.runtime import Client, ClientRuntime, Work
from fedsir.clients.training import Recipe, forward, forward_pass, train_locally
from fedsir.config.training import OptimizerConfig
from fedsir.models.flat import FlatWeights

POOL = 24
# Weight decay on purpose: it moves weights whose gradient is 0.
RECIPE = Recipe(CrossEntropy(), 2, 8, OptimizerConfig(lr=1e-3, weight_decay=5e-2))


@pytest.fixture(scope="module")
def condition(lab: Any) -> Any:
    return lab.condition(lab.config(federation={"public_pool": POOL}))


@pytest.fixture(scope="module")
def runtime(lab: Any) -> ClientRuntime:
    return lab.runtime(lab.config(federation={"public_pool": POOL}))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def teachers(runtime: ClientRuntime, condition: Any) -> tuple[FlatWeights, ...]:
    """Two models trained on labels that are all one class."""
    weights, observed = condition.initial_weights, condition.federation.observed
    return tuple(
        train_locally(client(runtime, k), weights, np.full_like(observed[k], c), RECIPE).weights
        for k, c in ((0, 1), (2, 3))
    )


def client(runtime: ClientRuntime, number: int = 1, round_: int = 3) -> Client:
    return Client(number, round_, runtime, Work())


def same(a: FlatWeights, b: FlatWeights) -> bool:
    return np.array_equal(a.values, b.values) and np.array_equal(a.counters, b.counters)


# -- pure parts ----------------------------------------------------------------------------------------------------


def test_worked_inversions() -> None:
    z = torch.tensor([[3.0, 1.0, 0.5, 2.0]])
    ours, theirs = (inverse_distribution(z, 2.0, form) for form in ("neg_logits", "reciprocal"))  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, [[0.112901, 0.306896, 0.394062, 0.186142]], atol=1e-6)
    np.testing.assert_allclose(theirs, [[0.106117, 0.206687, 0.561834, 0.125362]], atol=1e-6)


def test_the_reciprocal_breaks_the_order_where_signs_differ() -> None:
    z = torch.tensor([[3.0, 1.0, -0.5, 0.01]])
    np.testing.assert_allclose(inverse_distribution(z, 2.0, "reciprocal"), [[0, 0, 0, 1]], atol=1e-9)
    assert inverse_distribution(z, 2.0, "neg_logits").argsort().tolist() == [[0, 1, 3, 2]]


def test_the_reciprocal_of_a_logit_of_zero_is_finite() -> None:
    for zero in (0.0, -0.0, 1e-30):
        g = inverse_distribution(torch.tensor([[zero, 1.0, -2.0]]), 2.0, "reciprocal")
        np.testing.assert_array_equal(g, [[1.0, 0.0, 0.0]])


def test_distilling_towards_the_inverse_lowers_what_the_teacher_says() -> None:
    """The minimum is at g; the gradient at the teacher's own logits pushes its favourite class down."""
    teacher = torch.tensor([[3.0, 0.0, -1.0]])
    g = inverse_distribution(teacher, 2.0, "neg_logits")
    at_minimum = negative_distillation(-teacher, g[:, None], 2.0)
    assert float(at_minimum) == pytest.approx(0.0, abs=1e-6)
    student = teacher.clone().requires_grad_()
    negative_distillation(student, g[:, None], 2.0).backward()
    assert student.grad is not None
    assert student.grad[0].argmax() == 0
    assert float(student.grad[0, 0]) > 0 > float(student.grad[0, 2])


def test_the_loss_is_the_mean_over_teachers_and_images() -> None:
    rng = np.random.default_rng(0)
    g = torch.from_numpy(rng.dirichlet(np.ones(4), (5, 3)).astype(np.float32))
    z = torch.from_numpy(rng.normal(size=(5, 4)).astype(np.float32))
    q = torch.softmax(z / 2.0, dim=1)
    each = [(g[:, e] * (g[:, e] / q).log()).sum(dim=1).mean() for e in range(3)]
    assert float(negative_distillation(z, g, 2.0)) == pytest.approx(float(sum(each) / 3), rel=1e-5)


def test_pseudo_labels_need_confidence_at_the_temperature() -> None:
    z = torch.log(torch.tensor([[0.96, 0.02, 0.02], [0.02, 0.02, 0.96]]))
    labels, accepted = pseudo_labels(z, 1.0, 0.95)
    assert (labels.tolist(), accepted.tolist()) == ([0, 2], [True, True])
    assert pseudo_labels(z, 2.0, 0.95)[1].tolist() == [False, False]
    assert pseudo_labels(z, 1.0, 0.97)[1].tolist() == [False, False]


def test_the_mask_is_inside_the_mean() -> None:
    """Per-sample terms over all images of the batch, not the mean loss times the mask."""
    z, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0, 1, 1])
    batch = Batch(z, y, {"accepted": torch.tensor([True, False, True, False])})
    losses = nn.functional.cross_entropy(z, y, reduction="none")
    found = ConfidentCrossEntropy()(nn.Identity(), batch)  # type: ignore[arg-type]
    assert float(found) == pytest.approx(float(losses[0] + losses[2]) / 4)


# -- the two models of an extremely noisy client -------------------------------------------------------------------


def test_above_every_confidence_the_pseudo_model_is_the_received_one(runtime: ClientRuntime, condition: Any) -> None:
    """Neither weight decay nor batch statistics move it."""
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    update = TrainTwice(labels, RECIPE, 2.0, 1.01)(client(runtime), {"weights": weights}).update
    assert same(update.weights, weights)
    assert (update.samples, update.loss, update.skipped) == (len(labels), 0.0, 0)
    assert not same(update.noisy.weights, weights)


def test_both_models_start_from_the_received_one(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    at = client(runtime)
    update = TrainTwice(labels, RECIPE, 2.0, 0.0)(at, {"weights": weights}).update
    assert (at.work.trained, at.work.forwarded) == (2 * RECIPE.epochs * len(labels), len(labels))
    runtime.binding.load(weights)
    predicted = forward_pass(client(runtime), "logits").argmax(dim=1).numpy()
    assert (predicted != labels).any()
    good = train_locally(client(runtime), weights, predicted, RECIPE)
    noisy = train_locally(client(runtime), weights, labels, RECIPE)
    # With every pseudo-label accepted the masked mean is the mean, up to the order of its additions.
    np.testing.assert_allclose(update.weights.values, good.weights.values, atol=5e-4)
    assert same(update.noisy.weights, noisy.weights)
    assert not np.allclose(update.weights.values, noisy.weights.values, atol=5e-4)


# -- negative distillation -----------------------------------------------------------------------------------------


def task(teachers: tuple[FlatWeights, ...], steps: int = 4, **changes: Any) -> DistilNegatively:
    rng = np.random.default_rng(1)
    batches = tuple(np.sort(rng.choice(POOL, 8, replace=False)) for _ in range(steps))
    settings = {"temperature": 2.0, "inverse": "neg_logits", "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.0)}
    return DistilNegatively(teachers, batches, **{**settings, **changes})


def loss_of(runtime: ClientRuntime, weights: FlatWeights, teachers: tuple[FlatWeights, ...]) -> float:
    """The loss on the whole pool."""
    images, at = runtime.pool_images(0, POOL), client(runtime)
    targets = []
    for teacher in teachers:
        runtime.binding.load(teacher)
        targets.append(inverse_distribution(forward(at, images, "logits"), 2.0, "neg_logits"))
    runtime.binding.load(weights)
    return float(negative_distillation(forward(at, images, "logits"), torch.stack(targets, dim=1), 2.0))


def test_it_moves_the_global_model_away_from_the_teachers(
    runtime: ClientRuntime, condition: Any, teachers: tuple[FlatWeights, ...]
) -> None:
    weights = condition.initial_weights
    moved = task(teachers)(client(runtime), {"weights": weights}).update
    assert loss_of(runtime, moved, teachers) < loss_of(runtime, weights, teachers)


def test_gradients_reach_every_parameter_and_no_running_statistic(
    runtime: ClientRuntime, condition: Any, teachers: tuple[FlatWeights, ...]
) -> None:
    weights = condition.initial_weights
    moved = task(teachers, steps=1)(client(runtime), {"weights": weights}).update
    for entry in condition.schema.entries:
        before, after = weights.values[entry.start : entry.stop], moved.values[entry.start : entry.stop]
        assert np.array_equal(before, after) != entry.trainable, entry.name
    np.testing.assert_array_equal(moved.counters, weights.counters)


def test_it_depends_on_every_teacher_and_setting(
    runtime: ClientRuntime, condition: Any, teachers: tuple[FlatWeights, ...]
) -> None:
    weights, base = condition.initial_weights, task(teachers)
    variants = [
        base,
        task(teachers[:1]),
        task(teachers[1:]),
        task(teachers, steps=3),
        replace(base, temperature=1.0),
        replace(base, inverse="reciprocal"),
        replace(base, optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0)),
    ]
    results = [t(client(runtime), {"weights": weights}).update.values.tobytes() for t in variants]
    assert len(set(results)) == len(variants)
    assert base(client(runtime, 0), {"weights": weights}).update.values.tobytes() == results[0]


def test_steps_without_a_finite_loss_are_skipped(
    runtime: ClientRuntime, condition: Any, teachers: tuple[FlatWeights, ...]
) -> None:
    weights = condition.initial_weights
    broken = FlatWeights(np.full_like(weights.values, np.nan), weights.counters)
    assert same(task((teachers[0], broken))(client(runtime), {"weights": weights}).update, weights)
