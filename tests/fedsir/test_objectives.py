"""Objectives against hand-computed values and limits."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsir.objectives import (
    bounded_cross_entropy,
    cross_entropy,
    distilled_la_cross_entropy,
    entropy,
    exp_ramp,
    jensen_shannon,
    kd_kl,
    kl_divergence,
    la_cross_entropy,
    la_prior,
    linear_ramp,
    mixup,
    sharpen,
    squared_distance,
    symmetric_cross_entropy,
)


def logits(seed: int = 0, rows: int = 6, classes: int = 4) -> torch.Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGETS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize(
    ("counts", "floor", "expected"),
    [
        ((50, 0), 1.0, (-0.019803, -3.931826)),
        ((50, 0), 0.0, (0.0, -27.631021)),
        ((4, 3, 2, 1), 1.0, tuple(np.log([0.4, 0.3, 0.2, 0.1]))),
    ],
)
def test_la_prior_of_known_counts(counts: tuple[int, ...], floor: float, expected: tuple[float, ...]) -> None:
    np.testing.assert_allclose(la_prior(counts, floor=floor).numpy(), expected, atol=1e-5)


def test_la_prior_scales_with_beta_and_refuses_nonsense() -> None:
    torch.testing.assert_close(la_prior([3, 1], beta=2.0), 2.0 * la_prior([3, 1]))
    with pytest.raises(ValueError, match="positive sum"):
        la_prior([0, 0], floor=0.0)


def test_la_cross_entropy_of_known_logits() -> None:
    z, y = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([3])
    assert cross_entropy(z, y).item() == pytest.approx(3.440190, abs=1e-6)
    assert la_cross_entropy(z, y, la_prior([4, 3, 2, 1])).item() == pytest.approx(4.690851, abs=1e-6)


def test_uniform_prior_changes_nothing() -> None:
    z = logits()
    torch.testing.assert_close(la_cross_entropy(z, TARGETS, la_prior([7] * 4).double()), cross_entropy(z, TARGETS))


def test_zero_logits_cost_the_log_prior() -> None:
    loss = la_cross_entropy(torch.zeros(1, 2), torch.tensor([1]), la_prior([9, 1]))
    assert loss.item() == pytest.approx(2.302585, abs=1e-6)


def test_relabelled_absent_class_stays_affordable_with_floor_only() -> None:
    zero, absent = torch.zeros(1, 2), torch.tensor([1])
    assert la_cross_entropy(zero, absent, la_prior([50, 0])).item() == pytest.approx(3.931826, abs=1e-5)
    assert la_cross_entropy(zero, absent, la_prior([50, 0], floor=0.0)).item() == pytest.approx(27.631, abs=1e-3)


@pytest.mark.parametrize(
    ("teacher_t", "student_t", "kl", "total"),
    [(1.0, 1.0, 0.300489, 1.599350), (2.0, 2.0, 0.069774, 1.576279), (0.8, 1.0, 0.391497, None)],
)
def test_distillation_of_known_logits(teacher_t: float, student_t: float, kl: float, total: float | None) -> None:
    teacher, student = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0, 1.0, 0, 0]])
    assert kd_kl(teacher, student, teacher_t, student_t).item() == pytest.approx(kl, abs=1e-6)
    if total is not None:
        loss = distilled_la_cross_entropy(
            student, torch.tensor([0]), la_prior([5] * 4), teacher, 0.1, teacher_t, student_t
        )
        assert loss.item() == pytest.approx(total, abs=1e-6)


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    z = logits().requires_grad_()
    loss = kd_kl(z.detach() + 3.0, z, 1.3, 1.3)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert z.grad is not None
    assert z.grad.abs().max().item() < 1e-12


def test_saturated_logits_stay_finite() -> None:
    extreme = torch.tensor([[1e4, -1e4, 0.0]])
    assert torch.isfinite(kd_kl(extreme, -extreme, 1.0, 1.0))


def test_no_gradient_reaches_the_teacher() -> None:
    teacher, student = logits(1).requires_grad_(), logits(2).requires_grad_()
    kd_kl(teacher, student, 1.0, 1.0).backward()
    assert teacher.grad is None


def test_weight_zero_is_hard_loss_and_weight_one_is_distillation() -> None:
    z, teacher, prior = logits(1), logits(2), la_prior([9, 4, 2, 1]).double()
    hard = la_cross_entropy(z, TARGETS, prior)
    torch.testing.assert_close(distilled_la_cross_entropy(z, TARGETS, prior, teacher, 0.0), hard)
    soft = kd_kl(teacher, z + prior, 0.8, 1.0)
    torch.testing.assert_close(distilled_la_cross_entropy(z, TARGETS, prior, teacher, 1.0, 0.8, 1.0), soft)


def test_mask_weighs_the_two_kinds_by_their_share_of_the_batch() -> None:
    z, teacher, prior = logits(1), logits(2), la_prior([9, 4, 2, 1]).double()
    mask = torch.tensor([True, False, True, True, False, False])
    both = distilled_la_cross_entropy(z[mask], TARGETS[mask], prior, teacher[mask], 0.2, 0.8, 1.0)
    hard = F.cross_entropy(z[~mask] + prior, TARGETS[~mask])
    expected = 0.5 * both + 0.5 * hard
    actual = distilled_la_cross_entropy(z, TARGETS, prior, teacher, 0.2, 0.8, 1.0, kd_mask=mask)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("maximum", "begin", "finished", "expected"),
    [
        (0.2, 2, 0, 0.001348),
        (0.2, 2, 2, 0.001348),
        (0.2, 2, 20, 0.029807),
        (0.2, 2, 49, 0.2),
        (0.8, 10, 10, 0.005390),
        (0.8, 10, 20, 0.050400),
        (0.8, 10, 30, 0.244177),
        (0.8, 10, 99, 0.8),
    ],
)
def test_ramp_of_known_rounds(maximum: float, begin: int, finished: int, expected: float) -> None:
    assert maximum * exp_ramp(finished, begin, 49) == pytest.approx(expected, abs=1e-6)


def test_ramp_midpoint_and_nonsense() -> None:
    assert exp_ramp(15, 10, 20) == pytest.approx(0.286505, abs=1e-6)
    with pytest.raises(ValueError, match="end after it begins"):
        exp_ramp(0, 5, 5)


@pytest.mark.parametrize(("t", "expected"), [(0, 0.0), (1, 0.05), (10, 0.5), (20, 1.0), (99, 1.0)])
def test_linear_ramp(t: int, expected: float) -> None:
    assert linear_ramp(t, 20) == pytest.approx(expected)
    with pytest.raises(ValueError, match="positive length"):
        linear_ramp(t, 0)


# -- probabilities ---------------------------------------------------------------------------------------------------


def probabilities(seed: int = 0, rows: int = 6, classes: int = 4) -> Tensor:
    return torch.softmax(logits(seed, rows, classes), dim=1)


def test_the_terms_of_two_views_of_known_logits() -> None:
    """FedLSR on z1 = (2, 0), z2 = (1, 0), an even mixture and label 0."""
    z1, z2, label = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    mean = (torch.softmax(z1, dim=1) + torch.softmax(z2, dim=1)) / 2
    assert mean[0].tolist() == pytest.approx([0.8059, 0.1941], abs=5e-5)
    sharp = sharpen(mean, 0.5)
    assert sharp[0].tolist() == pytest.approx([0.9452, 0.0548], abs=5e-5)
    assert cross_entropy(sharp, label).item() == pytest.approx(0.343944, abs=5e-7)
    assert -sharp[0, 0].log().item() == pytest.approx(0.056368, abs=5e-7)
    q1, q2 = torch.softmax(3 * z1, dim=1), torch.softmax(3 * z2, dim=1)
    assert jensen_shannon(q1, q2).item() == pytest.approx(0.012633, abs=5e-7)
    assert jensen_shannon(q1, q2).item() / 2 == pytest.approx(0.006316, abs=1e-6)
    assert entropy(torch.softmax(q1, dim=1)).item() == pytest.approx(0.583174, abs=5e-7)
    assert ((entropy(q1) + entropy(q2)) / 2).item() == pytest.approx(0.104088, abs=5e-7)


def test_entropy_lies_between_certainty_and_the_uniform() -> None:
    found = entropy(torch.tensor([[0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]], dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.0, log(3), log(2)])
    p = probabilities()
    torch.testing.assert_close(entropy(p), torch.distributions.Categorical(p).entropy())


def test_divergence_agrees_with_its_definition() -> None:
    p, q = probabilities(1), probabilities(2)
    torch.testing.assert_close(kl_divergence(p, q), (p * (p / q).log()).sum(dim=1))
    torch.testing.assert_close(kl_divergence(p, q).mean(), kd_kl(p.log(), q.log(), 1.0, 1.0))
    assert kl_divergence(p, p).abs().max().item() < 1e-15
    assert (kl_divergence(p, q) > 0).all()


def test_divergence_is_infinite_only_where_the_impossible_happens() -> None:
    certain, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]])
    assert kl_divergence(certain, other).item() == pytest.approx(log(4))
    assert kl_divergence(other, certain).item() == float("inf")


def test_jensen_shannon_is_symmetric_and_bounded() -> None:
    p, q = probabilities(1), probabilities(2)
    torch.testing.assert_close(jensen_shannon(p, q), jensen_shannon(q, p))
    assert ((jensen_shannon(p, q) > 0) & (jensen_shannon(p, q) < log(2))).all()
    assert jensen_shannon(p, p).abs().max().item() < 1e-15
    assert jensen_shannon(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item() == pytest.approx(log(2))


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_sharpening_keeps_the_order_and_moves_the_maximum(temperature: float) -> None:
    p = probabilities()
    found = sharpen(p, temperature)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(6, dtype=torch.float64))
    assert torch.equal(found.argsort(dim=1), p.argsort(dim=1))
    moved = found.max(dim=1).values - p.max(dim=1).values
    assert (moved > 0).all() if temperature < 1 else (moved < 0).all() if temperature > 1 else moved.abs().max() < 1e-15
    torch.testing.assert_close(found, torch.softmax(logits() / temperature, dim=1))


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        lambda p: kl_divergence(p, torch.full_like(p, 0.25)),
        lambda p: kl_divergence(p.detach(), p),
        lambda p: jensen_shannon(p, p.flip(1)),
        lambda p: jensen_shannon(p, p),
        lambda p: entropy(sharpen(p, 0.5)),
    ],
    ids=["entropy", "first", "second", "jensen-shannon", "equal", "sharpened"],
)
@pytest.mark.parametrize("scale", [1.0, 50.0, 1e4])
def test_underflowed_probabilities_leave_value_and_gradient_finite(
    loss: Callable[[Tensor], Tensor], scale: float
) -> None:
    """Softmax gives exact zeros in float32 from a distance of about 104."""
    z = (scale * torch.tensor([[3.0, 0.0, -1.0, 1.0], [0.0, 0.0, 0.0, 9.0]])).requires_grad_()
    p = torch.softmax(z, dim=1)
    assert (p == 0).any() == (scale > 1)
    value = loss(p)
    assert torch.isfinite(value).all()
    value.sum().backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


# -- losses that wrong labels cannot dominate --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "expected"), [((0.25, 0.25, 0.25, 0.25), (6.907755, 7.046385)), ((0.7, 0.1, 0.1, 0.1), (2.763102, 2.798770))]
)
def test_symmetric_cross_entropy_of_known_predictions(p: tuple[float, ...], expected: tuple[float, float]) -> None:
    z, y = torch.tensor([p], dtype=torch.float64).log(), torch.tensor([0])
    reverse, both = expected
    assert symmetric_cross_entropy(z, y, alpha=0.0).item() == pytest.approx(reverse, abs=5e-7)
    assert symmetric_cross_entropy(z, y).item() == pytest.approx(both, abs=5e-7)


def test_symmetric_cross_entropy_without_its_reverse_is_cross_entropy() -> None:
    found = symmetric_cross_entropy(logits(), TARGETS, alpha=1.0, beta=0.0)
    torch.testing.assert_close(found, F.cross_entropy(logits(), TARGETS, reduction="none"))


def test_the_reverse_term_counts_the_mass_off_the_label_and_is_bounded() -> None:
    p = probabilities()
    off = 1 - p.gather(1, TARGETS[:, None]).squeeze(1)
    found = symmetric_cross_entropy(logits(), TARGETS, alpha=0.0, beta=2.0, clip=1e-3)
    torch.testing.assert_close(found, -2.0 * log(1e-3) * off)
    # As wrong as can be.
    z = torch.tensor([[1e4, 0.0, -1e4]]).requires_grad_()
    wrong = symmetric_cross_entropy(z, torch.tensor([2]), alpha=0.0)
    assert wrong.item() == pytest.approx(-log(1e-4), rel=1e-5)
    wrong.backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize(("label", "bounded", "plain"), [(0, 0.371101, 0.105361), (1, 1.171101, 2.302585)])
def test_bounded_cross_entropy_of_known_predictions(label: int, bounded: float, plain: float) -> None:
    z, y = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log(), torch.tensor([label])
    assert bounded_cross_entropy(z, y).item() == pytest.approx(bounded, abs=5e-7)
    assert cross_entropy(z, y).item() == pytest.approx(plain, abs=5e-7)


@pytest.mark.parametrize(("classes", "low", "high"), [(2, 0.3133, 1.3133), (4, 0.7437, 1.7437)])
def test_bounded_cross_entropy_reaches_its_bounds(classes: int, low: float, high: float) -> None:
    z = torch.zeros(2, classes)
    z[:, 0] = 1e4
    found = bounded_cross_entropy(z, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([low, high], abs=5e-5)
    assert found.tolist() == pytest.approx([log(e + classes - 1) - 1, log(e + classes - 1)])
    anything = bounded_cross_entropy(5 * logits(classes=classes), TARGETS % classes)
    assert ((anything > low - 1e-4) & (anything < high + 1e-4)).all()
    assert bounded_cross_entropy(torch.zeros(1, classes), torch.tensor([1])).item() == pytest.approx(log(classes))


# -- mixtures of images and distances of weights -----------------------------------------------------------------------


def test_mixup_blends_with_the_images_in_the_given_order() -> None:
    images = torch.arange(24, dtype=torch.float32).reshape(3, 2, 2, 2)
    labels, order = torch.tensor([5, 6, 7]), torch.tensor([2, 0, 1])
    mixed, own, other = mixup(images, labels, 0.25, order)
    for i, j in enumerate(order.tolist()):
        torch.testing.assert_close(mixed[i], 0.25 * images[i] + 0.75 * images[j])
    assert own.tolist() == [5, 6, 7]
    assert other.tolist() == [7, 5, 6]
    torch.testing.assert_close(mixup(images, labels, 1.0, order)[0], images)
    torch.testing.assert_close(mixup(images, labels, 0.0, order)[0], images[order])


def test_squared_distance_adds_up_over_tensors() -> None:
    """Differences (3) and (4): FedProx with mu = 0.2 pays 2.5."""
    reference = [torch.zeros(1), torch.ones(1, 1)]
    parameters = [torch.tensor([3.0]).requires_grad_(), torch.tensor([[5.0]]).requires_grad_()]
    distance = squared_distance(parameters, reference)
    assert 0.5 * 0.2 * distance.item() == pytest.approx(2.5)
    (0.5 * 0.2 * distance).backward()
    assert [p.grad.item() for p in parameters if p.grad is not None] == pytest.approx([0.2 * 3, 0.2 * 4])


def test_squared_distance_is_nothing_at_the_reference_and_moves_nothing_there() -> None:
    reference = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parameter = reference.detach().clone().requires_grad_()
    distance = squared_distance([parameter], [reference])
    distance.backward()
    assert distance.item() == 0.0
    assert parameter.grad is not None
    assert parameter.grad.abs().max().item() == 0.0
    assert reference.grad is None


def test_squared_distance_wants_as_many_tensors_on_both_sides() -> None:
    with pytest.raises(ValueError, match="zip"):
        squared_distance([torch.ones(1), torch.ones(1)], [torch.ones(1)])
