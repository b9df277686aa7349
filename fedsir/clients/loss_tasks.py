"""Losses of a received model on a client's own images, forward only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import exact_logits
from fedsir.objectives import bounded_cross_entropy


def sample_losses(logits: Tensor, labels: NDArray[np.int64], bounded: bool = False) -> NDArray[np.float64]:
    """(n,) float64 cross entropy of each image from logits (n, C) float64 under `labels` (n,).

    bounded: the cross entropy of softmax outputs taken for logits (FedCorr).
    """
    targets = torch.from_numpy(labels.copy())
    losses = bounded_cross_entropy(logits, targets) if bounded else F.cross_entropy(logits, targets, reduction="none")
    return losses.numpy()


@dataclass(frozen=True)
class ClassLossUpdate:
    """mean: (C,) float64 mean loss per observed class, NaN where the client has none. counts: (C,) int64."""

    mean: NDArray[np.float64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class ClassLosses:
    """Mean loss per class of broadcast `weights` under `labels` (n,) int64."""

    labels: NDArray[np.int64]
    num_classes: int

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[ClassLossUpdate]:
        losses = sample_losses(exact_logits(client, broadcast["weights"]), self.labels)
        counts = np.bincount(self.labels, minlength=self.num_classes)
        sums = np.bincount(self.labels, weights=losses, minlength=self.num_classes)
        mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return ClientResult(ClassLossUpdate(mean, counts.astype(np.int64)))
