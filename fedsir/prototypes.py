"""Class centroids in feature space, one (d,) vector per class; RoFL's rules to form, move and merge them.

A zero row stands for a class of which nothing is known yet. Client side: torch, float32; server side: NumPy,
accumulated in float64 in client order.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean feature (C, d) and number of samples (C,) int64 per class of features (n, d) under labels (n,) int64.

    Absent classes get a zero row. No gradient flows.
    """
    features = features.detach().float()
    # One pass per class: a matrix product would run in reduced precision under autocast.
    members = [features[labels == c] for c in range(num_classes)]
    means = [m.mean(dim=0) if len(m) else features.new_zeros(features.shape[1]) for m in members]
    return torch.stack(means), torch.tensor([len(m) for m in members], device=features.device)


def nearest_centroid(features: Tensor, centroids: Tensor) -> Tensor:
    """(n,) int64: for each feature (n, d) the centroid (C, d) with the largest cosine; no gradient flows."""
    return F.cosine_similarity(features.detach()[:, None], centroids[None], dim=2).argmax(dim=1)


def moved_centroids(centroids: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """Centroids (C, d) after a batch with class means (C, d) of `counts` (C,) samples (RoFL, local update).

    With s = cos(F, mean), F becomes (1 - s^2) F + s^2 mean, so a batch mean that points elsewhere moves it
    little. Classes without a sample keep their centroid; a zero row, which has no direction, takes the mean.
    """
    agreement = F.cosine_similarity(centroids, means, dim=1).square()
    unknown = (centroids == 0).all(dim=1)
    step = torch.where(unknown, torch.ones_like(agreement), agreement)[:, None]
    return torch.where((counts > 0)[:, None], (1.0 - step) * centroids + step * means, centroids)


def merged_centroids(
    current: NDArray[np.float32], returned: NDArray[np.float32], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The server's centroids (C, d) from the clients' (K, C, d) (RoFL, global update).

    A client counts by the cosine of its centroid to the current one, never below 0, and only for classes it
    owns, counts (K, C) > 0: a client without the class returns what it received and would anchor it. Where the
    current centroid is a zero row, clients count by their number of samples instead. Classes for which all
    weights are 0 keep their centroid. Raises ValueError when shapes do not fit.
    """
    if returned.shape[1:] != current.shape or counts.shape != returned.shape[:2]:
        raise ValueError(
            f"centroids {current.shape}, {returned.shape} of the clients and counts {counts.shape} do not fit"
        )
    old, new = current.astype(np.float64), returned.astype(np.float64)
    lengths = np.linalg.norm(old, axis=1) * np.linalg.norm(new, axis=2)
    cosines = (old * new).sum(axis=2) / np.maximum(lengths, 1e-12)
    unknown = ~old.any(axis=1)
    weights = np.where(unknown, counts, np.where(counts > 0, np.maximum(cosines, 0.0), 0.0))
    total = weights.sum(axis=0)
    mean = (weights[:, :, None] * new).sum(axis=0) / np.where(total > 0, total, 1.0)[:, None]
    return np.where((total > 0)[:, None], mean, old).astype(np.float32)
