"""What stage I says about the sites over seeds and subsamples, beside what it says about homogeneous splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.spectral.identification import Identification

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SpectralSummary:
    """Stage I over several runs; (K,) float64 unless said otherwise, NaN for sites without a pair of classes.

    score, score_sd: mean and SD over runs of the mean class similarity; high means that classes look alike.
    called_noisy: share of runs in which the two-component split calls the site noisy. called_noisy_null: the same share
    over homogeneous splits, where nobody is. p: share of homogeneous splits with at least as high a score.
    similarity: (K, C, C) mean over runs. runs, splits: how many of each.
    """

    score: Array
    score_sd: Array
    called_noisy: Array
    called_noisy_null: Array
    p: Array
    similarity: Array
    runs: int
    splits: int


def summarize(runs: Sequence[Identification], splits: Sequence[Identification]) -> SpectralSummary:
    """Summary of verdicts on the real sites (`runs`, at least one) and on homogeneous `splits` (may be none)."""
    scores = np.stack([r.descriptors[:, 0] for r in runs])
    null = np.stack([r.descriptors[:, 0] for r in splits]) if splits else np.empty((0, scores.shape[1]))
    score = _known_mean(scores)
    reached = (null >= score).sum(axis=0)
    p = np.where(np.isfinite(score), (1.0 + reached) / (len(null) + 1.0), np.nan)
    return SpectralSummary(
        score=score,
        score_sd=np.sqrt(_known_mean(np.square(scores - score))),
        called_noisy=_noisy_share(runs),
        called_noisy_null=_noisy_share(splits) if splits else np.full(len(score), np.nan),
        p=p if splits else np.full(len(score), np.nan),
        similarity=_known_mean(np.stack([r.similarity for r in runs])),
        runs=len(runs),
        splits=len(splits),
    )


def _noisy_share(verdicts: Sequence[Identification]) -> Array:
    judged = np.stack([np.isfinite(v.p_clean) for v in verdicts])
    noisy = np.stack([~v.clean for v in verdicts]) & judged
    return np.where(judged.any(axis=0), noisy.sum(axis=0) / np.maximum(judged.sum(axis=0), 1), np.nan)


def _known_mean(values: Array) -> Array:
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), sums / np.maximum(known.sum(axis=0), 1), np.nan)
