"""Losses of local training, each once, as pure functions of logits.

Logits are (b, C) float tensors, targets (b,) int64 class indices, priors (C,) float tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

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


def _kl(teacher: Tensor, student: Tensor, teacher_temperature: float, student_temperature: float) -> Tensor:
    """(b,) Kullback-Leibler divergences; from log-probabilities, so saturated logits stay finite."""
    log_teacher = F.log_softmax(teacher.detach() / teacher_temperature, dim=1)
    log_student = F.log_softmax(student / student_temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(dim=1)
