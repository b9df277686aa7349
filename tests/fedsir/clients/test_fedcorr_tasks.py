"""FedCorr at the client: mixup and proximal term, what is measured, which labels change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsir.clients.fedcorr_tasks import (
    CorrectAll,
    CorrectNoisiest,
    MixedProximal,
    MixupTraining,
    TrainAndMeasure,
    confident_labels,
    highest_losses,
    noise_level,
)
from fedsir.clients.loss_tasks import sample_losses
from fedsir.clients.module import Batch
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.runtime import Client, ClientRuntime, Work
from fedsir.clients.training import Recipe, exact_logits, forward_pass, train_locally
from fedsir.config.training import OptimizerConfig, TrainingConfig
from fedsir.lid import mean_lid
from fedsir.objectives import bounded_cross_entropy
from fedsir.seeding import Stream, generator

BUDGET = TrainingConfig(batch_size=8, optimizer=OptimizerConfig(lr=1e-3))


@pytest.fixture(scope="module")
def condition(lab: Any) -> Any:
    return lab.condition(lab.config())


@pytest.fixture(scope="module")
def runtime(lab: Any) -> ClientRuntime:
    return lab.runtime(lab.config())  # type: ignore[no-any-return]


def client(runtime: ClientRuntime, number: int = 1, round_: int = 3) -> Client:
    return Client(number, round_, runtime, Work())


def probabilities_of(runtime: ClientRuntime, weights: Any, number: int = 1) -> NDArray[np.float64]:
    runtime.binding.load(weights)
    return torch.softmax(forward_pass(client(runtime, number), "logits").double(), dim=1).numpy()


# -- losses, noise level, candidates -------------------------------------------------------------------------------


def test_worked_losses() -> None:
    """p = (.9, .1): the bounded loss differs less between right and wrong than the cross entropy."""
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1]], dtype=torch.float64))
    labels = torch.tensor([0, 1])
    bounded = bounded_cross_entropy(logits, labels).numpy()
    np.testing.assert_allclose(bounded, [0.371101, 1.171101], atol=5e-7)
    np.testing.assert_allclose(F.cross_entropy(logits, labels, reduction="none"), [0.105361, 2.302585], atol=5e-7)


def test_worked_candidates() -> None:
    """N = 100, mu = 0.6, rho = 0.5: thirty candidates, of which those above tau change."""
    rng = np.random.default_rng(0)
    losses = rng.permutation(100).astype(np.float64)
    candidates = highest_losses(losses, 0.6, 0.5)
    assert candidates.sum() == 30
    np.testing.assert_array_equal(candidates, losses >= 70)
    probabilities = rng.dirichlet(np.full(4, 0.4), 100)
    labels = (probabilities.argmax(axis=1) + 1) % 4
    changed = confident_labels(labels, probabilities, 0.625, candidates) != labels
    np.testing.assert_array_equal(changed, candidates & (probabilities.max(axis=1) > 0.625))
    assert 0 < changed.sum() < 30


@given(n=st.integers(1, 500), data=st.data())
def test_the_number_of_candidates_is_the_floor_of_the_exact_product(n: int, data: st.DataObject) -> None:
    wrong, hundredths = data.draw(st.integers(0, n)), data.draw(st.integers(0, 100))
    chosen = highest_losses(np.arange(n, dtype=np.float64), wrong / n, hundredths / 100)
    assert chosen.sum() == wrong * hundredths // 100


def test_earlier_images_come_first_among_equal_losses() -> None:
    assert np.flatnonzero(highest_losses(np.array([1.0, 2.0, 1.0, 1.0]), 0.75, 1.0)).tolist() == [0, 1, 2]


def test_noise_level_is_the_share_of_high_losses() -> None:
    rng = np.random.default_rng(0)
    losses = rng.permutation(np.concatenate([rng.normal(0.8, 0.02, 40), rng.normal(1.6, 0.02, 60)]))
    assert noise_level(losses, 7) == 0.6


@pytest.mark.parametrize("losses", [[], [1.3], [0.7] * 50, [float("nan")] * 5])
def test_noise_level_of_losses_that_do_not_differ_is_zero(losses: list[float]) -> None:
    assert noise_level(np.array(losses), 7) == 0.0


def test_confidence_must_exceed_the_threshold() -> None:
    probabilities = np.array([[0.5, 0.5], [0.75, 0.25], [0.2, 0.8]])
    labels = np.array([1, 1, 0])
    assert confident_labels(labels, probabilities, 0.75).tolist() == [1, 1, 1]
    assert confident_labels(labels, probabilities, 0.5).tolist() == [1, 0, 1]
    assert confident_labels(labels, probabilities, 1.0).tolist() == [1, 1, 0]
    np.testing.assert_array_equal(labels, [1, 1, 0])


def test_undefined_probabilities_change_no_label() -> None:
    assert confident_labels(np.array([1]), np.full((1, 2), np.nan), 0.5).tolist() == [1]


# -- objective -----------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A network of one matrix, with a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]]))
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("statistic", torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        return F.linear(images, self.weight, self.bias)


def batch(n: int = 5) -> Batch:
    rng = np.random.default_rng(n)
    images = torch.from_numpy(rng.normal(size=(n, 2)).astype(np.float32))
    return Batch(images, torch.from_numpy(rng.integers(0, 3, n)), {})


def test_mixup_blends_images_and_losses_by_the_same_share() -> None:
    network, data = Linear(), batch()
    loss = MixedProximal(1.0, 0.0, np.random.default_rng(3))(network, data)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    share, order = rng.beta(1.0, 1.0), rng.permutation(5)
    logits = network(share * data.images + (1 - share) * data.images[order])
    own, partner = (F.cross_entropy(logits, y) for y in (data.labels, data.labels[order]))
    assert float(loss.detach()) == pytest.approx(float((share * own + (1 - share) * partner).detach()), rel=1e-6)


def test_every_batch_is_mixed_anew() -> None:
    objective, network, data = MixedProximal(1.0, 0.0, np.random.default_rng(3)), Linear(), batch()
    first, second = (objective(network, data).item() for _ in range(2))  # type: ignore[arg-type]
    assert first != second


def test_without_mixup_and_pull_it_is_cross_entropy() -> None:
    network, data = Linear(), batch()
    objective = MixedProximal(0.0, 0.0, np.random.default_rng(3))
    for _ in range(2):
        assert objective(network, data).item() == CrossEntropy()(network, data).item()  # type: ignore[arg-type]


def test_the_pull_is_the_norm_itself_and_spares_the_first_batch() -> None:
    network, data = Linear(), batch()
    objective = MixedProximal(0.0, 5.0 * 0.6, np.random.default_rng(3))
    plain = CrossEntropy()
    assert objective(network, data).item() == plain(network, data).item()  # type: ignore[arg-type]
    with torch.no_grad():
        network.weight[0, 0] += 3.0
        network.bias[1] += 4.0
        network.statistic += 9.0  # type: ignore[operator]
    expected = plain(network, data).item() + 5.0 * 0.6 * 5.0  # type: ignore[arg-type]
    loss = objective(network, data)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    # Its gradient has length beta mu, whatever the distance.
    loss.backward()
    pulled = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    network.zero_grad()
    plain(network, data).backward()  # type: ignore[arg-type]
    own = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    assert float((pulled - own).norm()) == pytest.approx(3.0, rel=1e-5)


def test_a_skipped_first_step_leaves_gradients_finite() -> None:
    """The parameters have not moved, where the norm has no gradient."""
    network, data = Linear(), batch()
    objective = MixedProximal(1.0, 3.0, np.random.default_rng(3))
    objective(network, data)  # type: ignore[arg-type]
    objective(network, data).backward()  # type: ignore[arg-type]
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


# -- tasks ---------------------------------------------------------------------------------------------------------


def test_training_without_mixup_and_pull_is_local_training(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    found = MixupTraining(labels, BUDGET, 0.0)(client(runtime), {"weights": weights}).update
    expected = train_locally(client(runtime), weights, labels, Recipe.within(BUDGET, CrossEntropy()))
    np.testing.assert_array_equal(found.weights.values, expected.weights.values)
    assert found.loss == expected.loss


def test_mixup_draws_from_the_clients_stream(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    found = MixupTraining(labels, BUDGET, 0.7, 2.0)(client(runtime), {"weights": weights}).update
    objective = MixedProximal(0.7, 2.0, generator(runtime.setup.seed, Stream.METHOD, 1, 3))
    expected = train_locally(client(runtime), weights, labels, Recipe.within(BUDGET, objective))
    np.testing.assert_array_equal(found.weights.values, expected.weights.values)


def test_the_pull_keeps_weights_near(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    count = sum(p.numel() for p in runtime.network.parameters())

    def moved(prox: float) -> float:
        update = MixupTraining(labels, BUDGET, 1.0, prox)(client(runtime), {"weights": weights}).update
        return float(np.linalg.norm((update.weights.values - weights.values)[:count]))

    assert moved(50.0) < moved(0.0)


@pytest.mark.parametrize("bounded", [True, False])
def test_the_trained_model_is_measured(runtime: ClientRuntime, condition: Any, bounded: bool) -> None:
    labels = condition.federation.observed[1]
    task = TrainAndMeasure(MixupTraining(labels, BUDGET, 1.0), 6, bounded)
    at = client(runtime)
    result = task(at, {"weights": condition.initial_weights})
    update = result.update
    assert (at.work.trained, at.work.forwarded) == (len(labels), len(labels))
    assert not np.array_equal(update.weights.values, condition.initial_weights.values)
    np.testing.assert_array_equal(result.state, sample_losses(exact_logits(at, update.weights), labels, bounded))
    assert update.lid == mean_lid(probabilities_of(runtime, update.weights), 6)
    assert update.samples == len(labels)


def test_a_noisy_client_corrects_its_noisiest_labels(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    n = len(labels)
    losses = np.where(np.arange(n) % 2 == 0, 1.0, 0.1) + np.linspace(0, 0.01, n)
    probabilities = probabilities_of(runtime, weights)
    threshold = float(np.median(probabilities.max(axis=1)))
    at = client(runtime)
    result = CorrectNoisiest(labels, losses, 0.5, threshold)(at, {"weights": weights})
    assert result.update == pytest.approx(np.mean(losses > 0.5))
    assert at.work.forwarded == n
    changed = np.flatnonzero(result.state != labels)
    assert len(changed) > 0
    assert set(changed) <= set(np.argsort(-losses)[: int(n * result.update * 0.5)])
    np.testing.assert_array_equal(result.state[changed], probabilities.argmax(axis=1)[changed])
    assert (probabilities.max(axis=1)[changed] > threshold).all()


def test_nothing_is_corrected_without_noise_or_ratio(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    equal, rising = np.full(len(labels), 0.7), np.arange(len(labels), dtype=np.float64)
    for task in (CorrectNoisiest(labels, equal, 1.0, 0.0), CorrectNoisiest(labels, rising, 0.0, 0.0)):
        np.testing.assert_array_equal(task(client(runtime), {"weights": weights}).state, labels)


def test_at_the_end_every_certain_prediction_counts(runtime: ClientRuntime, condition: Any) -> None:
    weights, labels = condition.initial_weights, condition.federation.observed[1]
    probabilities = probabilities_of(runtime, weights)
    threshold = float(np.median(probabilities.max(axis=1)))
    result = CorrectAll(labels, threshold)(client(runtime), {"weights": weights})
    np.testing.assert_array_equal(result.state, confident_labels(labels, probabilities, threshold))
    assert result.update is None
    assert (result.state != labels).any()
