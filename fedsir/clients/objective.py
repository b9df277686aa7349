"""Losses as values that travel to clients: each binds a pure function of `fedsir.objectives` to its settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.models.network import Network
from fedsir.objectives import cross_entropy, distilled_la_cross_entropy, la_cross_entropy


@dataclass(frozen=True)
class CrossEntropy:
    """Plain cross entropy on the batch labels."""

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return cross_entropy(network(batch.images), batch.labels)


@dataclass(frozen=True)
class LogitAdjusted:
    """Cross entropy with the client's logit adjustment `prior` (C,) float32 (eq. 8-10)."""

    prior: NDArray[np.float32]

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        logits = network(batch.images)
        return la_cross_entropy(logits, batch.labels, torch.from_numpy(self.prior.copy()).to(logits.device))


@dataclass(frozen=True)
class Distilled:
    """Logit-adjusted cross entropy blended with the frozen teacher's predictions (eq. 28-33).

    Needs the per-sample extras `teacher_logits` (B, C) and, if only some samples distil, `kd_mask` (B,) bool.
    """

    prior: NDArray[np.float32]
    kd_weight: float
    teacher_temperature: float
    student_temperature: float

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        logits = network(batch.images)
        return distilled_la_cross_entropy(
            logits,
            batch.labels,
            torch.from_numpy(self.prior.copy()).to(logits.device),
            batch.extras["teacher_logits"],
            self.kd_weight,
            self.teacher_temperature,
            self.student_temperature,
            batch.extras.get("kd_mask"),
        )
