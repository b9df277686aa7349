"""FedELC's label learning: worked numbers, gradients against autograd, and the training task."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedsir.clients.label_learning import (
    LabelLearning,
    LabelLearningSettings,
    LearnLabels,
    blended_label_logits,
    initial_label_logits,
    label_learning_loss,
    label_step,
)
from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client, Work
from fedsir.clients.training import forward_pass
from fedsir.data.transforms import normalize
from fedsir.models.flat import FlatWeights

# C = 2, u = (10, 0), p = (.2, .8), y = 0, B = 1.
U, P, Y = torch.tensor([[10.0, 0.0]]), torch.tensor([[0.2, 0.8]]), torch.tensor([0])
Z = P.log()


def random_batch(seed: int, size: int = 6, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, label logits and targets in float64."""
    rng = np.random.default_rng(seed)
    logits, labels = (torch.from_numpy(rng.normal(0, 3, (size, classes))) for _ in range(2))
    return logits, labels, torch.from_numpy(rng.integers(0, classes, size))


# -- pure functions --------------------------------------------------------------------------------------------------


def test_label_logits_start_at_the_observed_labels() -> None:
    u = initial_label_logits(np.array([1, 0]), 3, 10.0)
    assert u.dtype == np.float32
    assert u.tolist() == [[0, 10, 0], [10, 0, 0]]


def test_the_worked_example_of_the_loss() -> None:
    def loss(alpha: float, beta: float) -> float:
        z = torch.tensor([[0.2, 0.8]], dtype=torch.float64).log()
        return label_learning_loss(z, U.double(), Y, alpha, beta).item()

    # Single precision gives 7.499644, 4.5418e-5 and, below, 3.799885.
    assert 2 * loss(0, 0) == pytest.approx(7.499643, abs=5e-7)
    assert loss(1, 0) - loss(0, 0) == pytest.approx(4.5399e-5, abs=5e-10)
    assert 2 * (loss(0, 1) - loss(0, 0)) == pytest.approx(0.500402, abs=5e-7)
    assert loss(0.5, 0.2) == pytest.approx(3.799884, abs=5e-7)


def test_the_worked_example_of_the_label_step() -> None:
    u = U.clone().requires_grad_()
    label_learning_loss(Z, u, Y, 0.5, 0.2).backward()  # type: ignore[no-untyped-call]
    assert u.grad is not None
    assert u.grad.tolist() == [[pytest.approx(0.4000, abs=5e-5), pytest.approx(-0.4000, abs=5e-5)]]
    # lambda / B = 7.8125 at C = 2 and alpha = 0.5 makes both steps 7.8125 / 2.
    stepped = label_step(U, P, Y, 7.8125 / 2, 7.8125 * 0.5)
    torch.testing.assert_close(stepped, torch.tensor([[6.8754, 3.1246]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(F.softmax(stepped, 1), torch.tensor([[0.9770, 0.0230]]), rtol=0, atol=5e-5)
    blended = blended_label_logits(stepped, P, 10.0)
    torch.testing.assert_close(blended / 10, torch.tensor([[0.5885, 0.4115]]), rtol=0, atol=5e-5)
    torch.testing.assert_close(blended, torch.tensor([[5.8852, 4.1148]]), rtol=0, atol=1e-4)
    torch.testing.assert_close(F.softmax(blended, 1), torch.tensor([[0.8545, 0.1455]]), rtol=0, atol=5e-5)


@given(seed=st.integers(0, 500), size=st.integers(1, 9), classes=st.integers(2, 6), alpha=st.floats(0, 2))
def test_the_step_is_the_losses_gradient_rescaled(seed: int, size: int, classes: int, alpha: float) -> None:
    """dL/du = [(s - p) / C + alpha (s - e_y)] / B, and the step lambda_l dL/du with eta_c, eta_o as documented."""
    logits, labels, targets = random_batch(seed, size, classes)
    u = labels.clone().requires_grad_()
    label_learning_loss(logits, u, targets, alpha, 0.2).backward()  # type: ignore[no-untyped-call]
    s, p = F.softmax(labels, 1), F.softmax(logits, 1)
    closed = ((s - p) / classes + alpha * (s - F.one_hot(targets, classes))) / size
    torch.testing.assert_close(u.grad, closed, rtol=1e-9, atol=1e-12)
    rate = 1000.0
    stepped = label_step(labels, p, targets, rate / (size * classes), rate * alpha / size)
    torch.testing.assert_close(stepped, labels - rate * closed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_the_observed_label_has_no_gradient_in_the_network(beta: float) -> None:
    logits, labels, targets = random_batch(3)
    gradients = []
    for alpha in (0.0, 5.0):
        z = logits.clone().requires_grad_()
        label_learning_loss(z, labels, targets, alpha, beta).backward()  # type: ignore[no-untyped-call]
        gradients.append(z.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert gradients[0] is not None
    assert gradients[0].abs().max() > 0


def test_prediction_equal_to_the_label_is_a_resting_point() -> None:
    logits, _, targets = random_batch(4)
    z, u = logits.clone().requires_grad_(), (logits + 2.5).requires_grad_()
    loss = label_learning_loss(z, u, targets, 0.0, 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0, abs=1e-12)
    for variable in (z, u):
        assert variable.grad is not None
        assert variable.grad.abs().max() < 1e-12
    still = label_step(u.detach(), F.softmax(logits, 1), targets, 1.5625, 0.0)
    torch.testing.assert_close(still, u.detach(), rtol=0, atol=1e-12)


def test_default_steps_are_the_official_rate_at_the_official_batch() -> None:
    settings = LabelLearningSettings()
    rate, batch, classes = 1000, 64, 10
    assert settings.compatibility_step == rate / (batch * classes)
    assert settings.observed_step == rate * settings.alpha / batch


def test_images_without_a_finite_prediction_keep_their_label() -> None:
    u = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    p = torch.tensor([[float("nan"), float("nan")], [0.5, 0.5]])
    blended = blended_label_logits(u, p, 10.0)
    assert blended[0].tolist() == [10, 0]
    torch.testing.assert_close(blended[1], 5 * (F.softmax(u, 1)[1] + 0.5))


@given(seed=st.integers(0, 200), scale=st.floats(0.5, 20))
def test_blended_logits_are_a_distribution_times_the_scale(seed: int, scale: float) -> None:
    logits, labels, _ = random_batch(seed)
    blended = blended_label_logits(labels, F.softmax(logits, 1), scale)
    torch.testing.assert_close(blended.sum(1), torch.full((6,), scale, dtype=blended.dtype))
    assert (blended >= 0).all()


# -- on a client -----------------------------------------------------------------------------------------------------

SETTINGS = LabelLearningSettings()


@pytest.fixture(scope="module")
def config(lab: Any) -> Any:
    return lab.config(training={"optimizer": {"lr": 1e-3}})


@pytest.fixture(scope="module")
def condition(lab: Any, config: Any) -> Any:
    return lab.condition(config)


@pytest.fixture(scope="module")
def runtime(lab: Any, config: Any) -> Any:
    return lab.runtime(config)


def learn(runtime: Any, condition: Any, config: Any, weights: Any = None, **changes: Any) -> tuple[Any, Any, Work]:
    """Update, new label logits and work of client 2."""
    observed = condition.federation.observed[2]
    u = initial_label_logits(observed, 4, SETTINGS.scale)
    task = replace(LearnLabels(observed, u, config.training, SETTINGS), **changes)
    work = Work()
    result = task(Client(2, 4, runtime, work), {"weights": weights or condition.initial_weights})
    return result.update, result.state, work


def test_the_objective_steps_the_images_it_has_seen(runtime: Any, condition: Any) -> None:
    runtime.binding.load(condition.initial_weights)
    network = copy.deepcopy(runtime.network).eval()
    pixels = torch.from_numpy(runtime.setup.train_images[:3].copy())
    rows, targets = torch.tensor([4, 0, 2]), torch.tensor([1, 1, 3])
    batch = Batch(normalize(pixels, runtime.setup.transform), targets, {"position": rows})
    before = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    learning = LabelLearning(before.clone(), SETTINGS)
    loss = learning(network, batch)
    logits = network(batch.images).detach()
    torch.testing.assert_close(loss.detach(), label_learning_loss(logits, before[rows], targets, 0.5, 0.2))
    expected = before.clone()
    expected[rows] = label_step(before[rows], F.softmax(logits, 1), targets, 1.5625, 7.8125)
    torch.testing.assert_close(learning.label_logits, expected)
    assert torch.equal(learning.label_logits[[1, 3, 5]], before[[1, 3, 5]])


def test_a_batch_with_a_non_finite_loss_moves_no_label(runtime: Any, condition: Any) -> None:
    runtime.binding.load(condition.initial_weights)
    images = torch.full((2, 3, 32, 32), float("nan"))
    batch = Batch(images, torch.tensor([0, 1]), {"position": torch.tensor([0, 1])})
    learning = LabelLearning(torch.zeros(2, 4), SETTINGS)
    assert not torch.isfinite(learning(copy.deepcopy(runtime.network).eval(), batch))
    assert torch.equal(learning.label_logits, torch.zeros(2, 4))


def test_after_the_last_epoch_labels_blend_with_the_trained_model(runtime: Any, condition: Any, config: Any) -> None:
    """Without steps the stepped labels are the given ones, so the blend can be told from outside."""
    still = LabelLearningSettings(compatibility_step=0.0, observed_step=0.0)
    update, state, work = learn(runtime, condition, config, settings=still)
    observed = condition.federation.observed[2]
    runtime.binding.load(update.weights)
    p = F.softmax(forward_pass(Client(2, 4, runtime, Work()), "logits"), dim=1)
    u = torch.from_numpy(initial_label_logits(observed, 4, 10.0))
    np.testing.assert_array_equal(state, (10.0 * (F.softmax(u, 1) + p) / 2).numpy())
    assert state.dtype == np.float32
    assert (work.trained, work.forwarded) == (len(observed), len(observed))


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_image_gets_one_step_per_epoch(
    runtime: Any, condition: Any, config: Any, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen through a step that only counts, with the blend switched off."""
    from fedsir.clients import label_learning

    monkeypatch.setattr(label_learning, "label_step", lambda u, *_: u + 1)
    monkeypatch.setattr(label_learning, "blended_label_logits", lambda u, *_: u)
    budget = config.training.model_copy(update={"local_epochs": epochs, "batch_size": 7})
    _, state, _ = learn(runtime, condition, config, budget=budget)
    observed = condition.federation.observed[2]
    np.testing.assert_array_equal(state, initial_label_logits(observed, 4, 10.0) + epochs)


def test_labels_do_not_depend_on_how_an_epoch_is_cut_when_the_network_stands_still(
    runtime: Any, condition: Any, config: Any
) -> None:
    """Per-image steps: with a frozen network in eval statistics only the images matter, not the batch size."""
    eta_o_only = LabelLearningSettings(compatibility_step=0.0)
    states = []
    for size in (5, 40):
        budget = config.training.model_copy(
            update={"batch_size": size, "optimizer": config.training.optimizer.model_copy(update={"lr": 1e-12})}
        )
        states.append(learn(runtime, condition, config, budget=budget, settings=eta_o_only)[1])
    observed = condition.federation.observed[2]
    u = torch.from_numpy(initial_label_logits(observed, 4, 10.0))
    stepped = label_step(u, F.softmax(u, 1), torch.from_numpy(observed), 0.0, 7.8125)
    # The label's half of the blend; the model's half differs only through batch statistics.
    for state in states:
        half = torch.from_numpy(state) - 5.0 * F.softmax(stepped, 1)
        torch.testing.assert_close(half.sum(1), torch.full((len(observed),), 5.0), rtol=0, atol=1e-4)


def test_the_same_task_gives_the_same_bits_and_leaves_its_input_alone(
    runtime: Any, condition: Any, config: Any
) -> None:
    u = initial_label_logits(condition.federation.observed[2], 4, 10.0)
    given_ = u.copy()
    given_.setflags(write=False)
    one, two = (learn(runtime, condition, config, label_logits=given_) for _ in range(2))
    np.testing.assert_array_equal(one[0].weights.values, two[0].weights.values)
    np.testing.assert_array_equal(one[1], two[1])
    np.testing.assert_array_equal(given_, u)
    assert not np.array_equal(one[1], u)


def test_a_client_whose_training_failed_keeps_its_labels(runtime: Any, condition: Any, config: Any) -> None:
    broken = FlatWeights(np.full_like(condition.initial_weights.values, np.nan), condition.initial_weights.counters)
    update, state, _ = learn(runtime, condition, config, weights=broken)
    assert update.samples == 0
    np.testing.assert_array_equal(state, initial_label_logits(condition.federation.observed[2], 4, 10.0))
