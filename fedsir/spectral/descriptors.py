"""Summaries of a client's class similarities, and how clients are compared by them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DESCRIPTOR_NAMES = ("mean", "energy", "maximum")


def usable_classes(counts: NDArray[np.int64], min_class_count: int) -> NDArray[np.bool_]:
    """(C,) bool: observed classes that enter the similarity, from raw observed counts (C,).

    Classes with fewer than `min_class_count` images are left out, because a direction from a handful of
    images is mostly chance; where that leaves fewer than two classes, all observed classes are used instead.
    """
    enough = counts >= max(min_class_count, 1)
    return enough if np.count_nonzero(enough) >= 2 else counts > 0


def descriptors(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    """(3,) float64 mean, energy and maximum of the off-diagonal entries of S (C, C) (eq. 13-15).

    Entries are NaN where a class is unobserved and are left out; all NaN without a pair of observed classes.
    """
    pairs = similarity[~np.eye(len(similarity), dtype=np.bool_)]
    pairs = pairs[np.isfinite(pairs)]
    if pairs.size == 0:
        return np.full(3, np.nan)
    return np.array([pairs.mean(), np.square(pairs).mean(), pairs.max()])


def standardized(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K, F) z-scores of each column over the rows without NaN; columns without spread become 0.

    Rows with a NaN stay NaN.
    """
    out = np.full(values.shape, np.nan)
    rows = np.all(np.isfinite(values), axis=1)
    if rows.any():
        centre, scale = moments(values[rows])
        out[rows] = np.where(scale == 0, 0.0, (values[rows] - centre) / np.where(scale == 0, 1.0, scale))
    return out


def moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation (F,) of the columns of finite values (K, F); 0 for columns without spread.

    A spread of rounding error counts as none: scaled up to 1 it would turn the last bits into a verdict.
    """
    centre, spread = values.mean(axis=0), values.std(axis=0)
    return centre, np.where(spread <= 1e-9 * np.maximum(np.abs(centre), 1e-9), 0.0, spread)


def client_scores(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K,) mean of the z-scored descriptors (K, F): higher means more alignment between classes.

    NaN for clients without descriptors.
    """
    return np.asarray(standardized(values).mean(axis=1), dtype=np.float64)
