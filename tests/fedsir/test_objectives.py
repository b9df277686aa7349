"""Objectives against hand-computed values and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedsir.objectives import (
    cross_entropy,
    distilled_la_cross_entropy,
    exp_ramp,
    kd_kl,
    la_cross_entropy,
    la_prior,
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
