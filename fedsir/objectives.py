"""Losses of local training, each once, as pure functions of logits.

Logits are (b, C) float tensors, targets (b,) int64 class indices, priors (C,) float tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the batch (scalar)."""
    return F.cross_entropy(logits, targets)


def la_prior(
    counts: NDArray[np.int64] | Sequence[int], beta: float = 1.0, eps: float = 1e-12, floor: float = 1.0
) -> Tensor:
    """Logit adjustment m_k (C,) float32 of a client with `counts` (C,) images per class (eq. 8-9).

    Counts below `floor` are raised to it before normalising: without a floor a class that the client never
    observed gets m = log(eps), and one relabelled image of that class costs 27.6 nats and drowns the rest.

    Raises ValueError where the prior is undefined (negative counts, or all zero without a floor).
    """
    raised = np.maximum(np.asarray(counts, dtype=np.float64), floor)
    if raised.ndim != 1 or np.any(raised < 0) or not raised.sum() > 0:
        raise ValueError(f"a class prior needs non-negative counts with a positive sum, got {list(counts)}")
    adjustment = beta * np.log(raised / raised.sum() + eps)
    return torch.from_numpy(adjustment.astype(np.float32))


def la_cross_entropy(logits: Tensor, targets: Tensor, prior: Tensor) -> Tensor:
    """Logit-adjusted cross entropy CE(z + m, y) (eq. 10); a uniform prior gives plain cross entropy."""
    return F.cross_entropy(logits + prior, targets)


def kd_kl(
    teacher_logits: Tensor, student_logits: Tensor, teacher_temperature: float, student_temperature: float
) -> Tensor:
    """Mean over the batch of KL(softmax(t / T_t) || softmax(s / T_s)) (eq. 28, 30, 31), without a T^2 factor.

    OCT-FedSIR uses one temperature for both; FedSIR and FedNoRo 0.8 for the teacher and 1 for the student.
    Student logits may already contain the logit adjustment. No gradient reaches the teacher.
    """
    return _kl(teacher_logits, student_logits, teacher_temperature, student_temperature).mean()


def distilled_la_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    prior: Tensor,
    teacher_logits: Tensor,
    kd_weight: float,
    teacher_temperature: float = 1.0,
    student_temperature: float = 1.0,
    kd_mask: Tensor | None = None,
) -> Tensor:
    """Objective of predicted-noisy clients: lambda KL + (1 - lambda) CE(z + m, y*) (eq. 29-33).

    kd_mask: (b,) bool, images on which the teacher is heard; the others get the hard loss alone, so that the
    two kinds weigh by their share of the batch (FedSIR distils only where its two criteria disagree).
    None: all images (OCT-FedSIR).
    """
    adjusted = logits + prior  # eq. 29
    hard = F.cross_entropy(adjusted, targets, reduction="none")  # eq. 32
    soft = _kl(teacher_logits, adjusted, teacher_temperature, student_temperature)
    weight = torch.full_like(hard, kd_weight)
    if kd_mask is not None:
        weight = weight * kd_mask.to(weight.dtype)
    return (weight * soft + (1.0 - weight) * hard).mean()  # eq. 33


def exp_ramp(finished_rounds: int, begin: int, end: int) -> float:
    """exp(-5 (1 - phase)^2) with phase from 0 at round `begin` to 1 at round `end`, constant outside.

    FedSIR's and FedNoRo's weight of the teacher is a maximum times this ramp. Raises ValueError unless
    begin < end.
    """
    if begin >= end:
        raise ValueError(f"a ramp must end after it begins, got begin {begin} and end {end}")
    phase = (min(max(finished_rounds, begin), end) - begin) / (end - begin)
    return exp(-5.0 * (1.0 - phase) ** 2)


def linear_ramp(t: int, length: int) -> float:
    """min(1, t / length): from 0 at round 0 to 1 at round `length`, which must be positive."""
    if length <= 0:
        raise ValueError(f"a ramp needs a positive length, got {length}")
    return min(1.0, t / length)


def entropy(probabilities: Tensor) -> Tensor:
    """(b,) entropy in nats of the rows of (b, C) probabilities; 0 log 0 = 0, also in the gradient."""
    # `xlogy` would give 0 / 0 as the gradient of an underflowed probability.
    positive = torch.where(probabilities != 0, probabilities, 1.0)
    return -(positive * positive.log()).sum(dim=1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """(b,) KL(p || q) in nats between rows of (b, C) probabilities; infinite where q is 0 and p is not."""
    occurs = p != 0
    positive, other = torch.where(occurs, p, 1.0), torch.where(occurs, q, 1.0)
    return (positive * (positive.log() - other.log())).sum(dim=1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """(b,) Jensen-Shannon divergence in nats between rows of (b, C) probabilities."""
    middle = (p + q) / 2
    return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """(b, C) probabilities raised to 1 / temperature and normalised; below 1 they move to their maximum."""
    powered = probabilities ** (1.0 / temperature)
    return powered / powered.sum(dim=1, keepdim=True)


def bounded_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(b,) cross entropy of softmax outputs taken for logits, as FedCorr and FedLSR code it.

    Bounded by [log(e + C - 1) - 1, log(e + C - 1)], so that no sample can dominate.
    """
    return F.cross_entropy(torch.softmax(logits, dim=1), targets, reduction="none")


def symmetric_cross_entropy(
    logits: Tensor, targets: Tensor, alpha: float = 0.1, beta: float = 1.0, clip: float = 1e-4, p_min: float = 1e-7
) -> Tensor:
    """(b,) alpha CE + beta RCE with RCE = -sum_c p_c log clip(onehot_c, clip, 1) (RHFL)."""
    probabilities = torch.softmax(logits, dim=1).clamp(p_min, 1.0)
    # The one-hot target contributes log 1 = 0 at the label and log clip everywhere else.
    others = probabilities.sum(dim=1) - probabilities.gather(1, targets[:, None]).squeeze(1)
    return alpha * F.cross_entropy(logits, targets, reduction="none") - beta * log(clip) * others


def mixup(images: Tensor, labels: Tensor, share: float, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images (b, ...) blended with those in `order` (b,), and the labels of both.

    `share` belongs to the image in place: mixed = share x + (1 - share) x[order].
    """
    return share * images + (1.0 - share) * images[order], labels, labels[order]


def squared_distance(parameters: Iterable[Tensor], reference: Iterable[Tensor]) -> Tensor:
    """Scalar sum over tensors of the squared L2 norm of their difference; the reference gets no gradient."""
    parts = [torch.square(p - r.detach()).sum() for p, r in zip(parameters, reference, strict=True)]
    return torch.stack(parts).sum()


def _kl(teacher: Tensor, student: Tensor, teacher_temperature: float, student_temperature: float) -> Tensor:
    """(b,) Kullback-Leibler divergences; from log-probabilities, so saturated logits stay finite."""
    log_teacher = F.log_softmax(teacher.detach() / teacher_temperature, dim=1)
    log_student = F.log_softmax(student / student_temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(dim=1)
