"""Which labels would be changed, ranked by how clearly both criteria ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LabelScores:
    """What one training seed says about n images of suspect sites.

    representative, residual: (n, C) S_R (high fits) and S_N (low fits) of unit features, NaN for classes without
    reference. checkpoints: (T, n) labels that the images had after each relabelling checkpoint.
    """

    representative: Array
    residual: Array
    checkpoints: Ints


@dataclass(frozen=True)
class Proposal:
    """One label that would be changed.

    image: position among the n images. representative, residual: scores of (observed, proposed) label, means over
    seeds. margin: lead of the proposed label over the observed one, mean of both criteria, each in SDs of its scores.
    stability: share of checkpoints, over all seeds, that gave this image the proposed label.
    """

    image: int
    observed: int
    proposed: int
    representative: tuple[float, float]
    residual: tuple[float, float]
    margin: float
    stability: float


def rank_proposals(observed: Ints, seeds: Sequence[LabelScores]) -> list[Proposal]:
    """Proposals for images with observed labels (n,), the largest margin first.

    A label is proposed where both criteria, averaged over the seeds, name the same class and it is not the observed
    one (eq. 25-27). Images labelled with a class without reference get none.
    """
    if len(observed) == 0:
        return []
    representative = np.mean([s.representative for s in seeds], axis=0)
    residual = np.mean([s.residual for s in seeds], axis=0)
    if np.isfinite(representative).any(axis=0).sum() < 2:
        return []
    first = np.where(np.isfinite(representative), representative, -np.inf).argmax(axis=1)
    second = np.where(np.isfinite(residual), residual, np.inf).argmin(axis=1)
    rows = np.arange(len(observed))
    known = np.isfinite(representative[rows, observed])
    changed = np.flatnonzero((first == second) & (first != observed) & known)
    checkpoints = np.concatenate([s.checkpoints for s in seeds])
    lead = representative[rows, first] - representative[rows, observed]
    relief = residual[rows, observed] - residual[rows, first]
    margins = 0.5 * (lead / _spread(representative) + relief / _spread(residual))
    proposals = [
        Proposal(
            image=i,
            observed=int(observed[i]),
            proposed=int(first[i]),
            representative=(float(representative[i, observed[i]]), float(representative[i, first[i]])),
            residual=(float(residual[i, observed[i]]), float(residual[i, first[i]])),
            margin=float(margins[i]),
            stability=float(np.mean(checkpoints[:, i] == first[i])) if len(checkpoints) else float("nan"),
        )
        for i in changed.tolist()
    ]
    return sorted(proposals, key=lambda p: (-p.margin, p.image))


def _spread(scores: Array) -> float:
    spread = float(np.nanstd(scores))
    return spread if spread > 0 else 1.0
