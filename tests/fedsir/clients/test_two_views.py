"""FedLSR's loss: the worked numbers of its two forms, its bounds, and the training task."""

from __future__ import annotations

import copy
from math import e, log
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client, Work
from fedsir.clients.two_views import SelfRegularization, TwoViewLoss, TwoViewTraining, self_regularization
from fedsir.data.transforms import normalize
from fedsir.data.views import ViewSettings, apply_view, draw_view

CODED, DESCRIBED = SelfRegularization(), SelfRegularization(form="described")
Z1, Z2, Y = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([0])
FORMS: tuple[Literal["coded", "described"], ...] = ("coded", "described")


def random_batch(seed: int, size: int = 5, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    z1, z2 = (torch.from_numpy(rng.normal(0, 3, (size, classes))) for _ in range(2))
    return z1, z2, torch.from_numpy(rng.integers(0, classes, size))


def test_the_worked_example_as_coded() -> None:
    terms = self_regularization(Z1, Z2, Y, 0.5, CODED)
    assert terms.classification.item() == pytest.approx(0.343944, abs=5e-7)
    assert terms.consistency.item() == pytest.approx(0.006316, abs=5e-7)
    assert terms.entropy.item() == pytest.approx(0.583174, abs=5e-7)


def test_the_worked_example_as_described() -> None:
    terms = self_regularization(Z1, Z2, Y, 0.5, DESCRIBED)
    assert terms.classification.item() == pytest.approx(0.056368, abs=5e-7)
    assert terms.consistency.item() == pytest.approx(0.012633, abs=5e-7)
    assert terms.entropy.item() == pytest.approx(0.104088, abs=5e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_equal_views_are_consistent(form: Literal["coded", "described"], share: float) -> None:
    z, _, y = random_batch(1)
    assert self_regularization(z, z, y, share, SelfRegularization(form=form)).consistency.item() == pytest.approx(0)


@pytest.mark.parametrize("classes", [2, 4, 7])
@pytest.mark.parametrize("form", FORMS)
def test_uniform_predictions_cost_log_c_in_both_forms(form: Literal["coded", "described"], classes: int) -> None:
    z, y = torch.zeros(3, classes), torch.tensor([0, 1, 1])
    terms = self_regularization(z, z, y, 0.4, SelfRegularization(form=form))
    assert terms.classification.item() == pytest.approx(log(classes))
    assert terms.entropy.item() == pytest.approx(log(classes))


def test_described_with_one_view_and_no_sharpening_is_cross_entropy() -> None:
    z1, z2, y = random_batch(2)
    plain = SelfRegularization(form="described", sharpening_temperature=1.0)
    loss = self_regularization(z1, z2, y, 1.0, plain).classification
    torch.testing.assert_close(loss, F.cross_entropy(z1, y))


@given(seed=st.integers(0, 1000), classes=st.integers(2, 6), scale=st.floats(0.1, 50), share=st.floats(0, 1))
def test_the_coded_loss_of_an_image_is_bounded(seed: int, classes: int, scale: float, share: float) -> None:
    z1, z2, y = random_batch(seed, 1, classes)
    loss = self_regularization(scale * z1, scale * z2, y, share, CODED).classification.item()
    assert log(e + classes - 1) - 1 - 1e-6 <= loss <= log(e + classes - 1) + 1e-6


@pytest.mark.parametrize(("classes", "low", "high"), [(2, 0.3133, 1.3133), (4, 0.7437, 1.7437)])
def test_the_bounds_are_reached(classes: int, low: float, high: float) -> None:
    z = 200.0 * F.one_hot(torch.tensor([0]), classes)
    right, wrong = (self_regularization(z, z, torch.tensor([y]), 0.5, CODED).classification.item() for y in (0, 1))
    assert (right, wrong) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("form", FORMS)
def test_saturated_views_that_disagree_keep_loss_and_gradient_finite(form: Literal["coded", "described"]) -> None:
    z1, z2 = (torch.tensor([[a, b]], requires_grad=True) for a, b in ((500.0, -500.0), (-500.0, 500.0)))
    terms = self_regularization(z1, z2, Y, 0.0, SelfRegularization(form=form))
    (terms.classification + terms.consistency + terms.entropy).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(terms.classification)
    assert torch.isfinite(terms.consistency)
    for z in (z1, z2):
        assert z.grad is not None
        assert torch.isfinite(z.grad).all()


# -- on a client -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(lab: Any) -> Any:
    return lab.config()


@pytest.fixture(scope="module")
def condition(lab: Any, config: Any) -> Any:
    return lab.condition(config)


@pytest.fixture(scope="module")
def runtime(lab: Any, config: Any) -> Any:
    return lab.runtime(config)


@pytest.fixture
def small(runtime: Any, condition: Any) -> Batch:
    runtime.binding.load(condition.initial_weights)
    pixels = torch.from_numpy(runtime.setup.train_images[:8].copy())
    labels = torch.from_numpy(condition.dataset.train.labels[:8].copy()).long()
    return Batch(normalize(pixels, runtime.setup.transform), labels, {})


def test_the_loss_is_the_weighted_sum_over_the_drawn_view(runtime: Any, small: Batch) -> None:
    network, transform, view = copy.deepcopy(runtime.network).eval(), runtime.setup.transform, ViewSettings()
    settings = SelfRegularization(entropy_weight=0.3)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        loss = TwoViewLoss(settings, 0.7, view, transform)(network, small)
        torch.manual_seed(5)
        second = apply_view(small.images, draw_view(8, view), transform)
        share = torch.rand(()).item()
        terms = self_regularization(network(small.images), network(second), small.labels, share, settings)
    torch.testing.assert_close(loss, terms.classification + 0.7 * terms.consistency + 0.3 * terms.entropy)
    assert not torch.equal(second, small.images)


def test_views_pass_the_network_one_after_the_other(runtime: Any, small: Batch) -> None:
    """Batch norm sees two batches of the given size, not one of twice the size."""
    network, seen = copy.deepcopy(runtime.network), []
    network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    TwoViewLoss(SelfRegularization(), 0.4, ViewSettings(), runtime.setup.transform)(network, small)
    assert seen == [8, 8]


def test_the_task_trains_by_it_and_counts_the_second_view(runtime: Any, condition: Any, config: Any) -> None:
    labels, work = condition.federation.observed[2], Work()
    task = TwoViewTraining(labels, config.training, SelfRegularization(), ViewSettings(), 0.4)

    def update(task: TwoViewTraining, work: Work, seed: int = 0) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return task(Client(2, 4, runtime, work), {"weights": condition.initial_weights}).update

    first = update(task, work)
    assert first.samples == len(labels) == work.trained
    assert work.forwarded == 3 * len(labels)
    assert not np.array_equal(first.weights.values, condition.initial_weights.values)
    np.testing.assert_array_equal(update(task, Work()).weights.values, first.weights.values)
    # Views are drawn from torch's generator, which is seeded for each client and round.
    assert not np.array_equal(update(task, Work(), seed=1).weights.values, first.weights.values)


def test_single_class_clients_and_tiny_batches_train(lab: Any, condition: Any) -> None:
    settings = lab.config(training={"batch_size": 2})
    label = condition.dataset.train.labels
    one_class = np.flatnonzero(label == label[0])[:5]
    dealt = lab.federation_of(settings, [one_class, np.setdiff1d(np.arange(160), one_class)])
    runtime = lab.runtime(settings, dealt)
    task = TwoViewTraining(dealt.federation.observed[0], settings.training, SelfRegularization(), ViewSettings(), 0.4)
    update = task(Client(0, 0, runtime, Work()), {"weights": condition.initial_weights}).update
    assert update.samples == 5
    assert update.skipped == 0
    assert np.isfinite(update.weights.values).all()
