"""Singular value decomposition of one client's features, class by class (eq. 11, 12, 16-19).

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SimilaritySign = Literal["abs", "oriented"]

# Features arrive in float32, so singular values this small relative to the largest are rounding error. The
# bound also covers the square root that the Gram matrix costs in accuracy (sqrt(d * 2.2e-16) for d = 1024).
RANK_TOLERANCE = 1e-6


@dataclass(frozen=True)
class ClassSpectrum:
    """What a client tells about the features of one observed class; float64.

    leading: (d,) unit, first right singular vector. residual: (r, d) orthonormal rows, the singular vectors
    after the cutoff, r at most the number asked for and less where the rank ends. count: finite feature rows
    used. cutoff: q of eq. 17. gap: (s1 - s2) / s1. s1_ratio: s1 / sum of all s.
    Signs are fixed so that entries sum to something positive.
    """

    leading: NDArray[np.float64]
    residual: NDArray[np.float64]
    count: int
    cutoff: int
    gap: float
    s1_ratio: float


def class_spectrum(features: NDArray[np.floating], kappa: float, max_residual: int) -> ClassSpectrum | None:
    """Spectrum of the features (n, d) of one class: not centred, not normalised (eq. 11, Q2).

    Rows with a non-finite entry are dropped. None when no finite row is left or all are zero: the class then
    counts as unobserved.
    """
    rows = np.asarray(features, dtype=np.float64)
    rows = rows[np.all(np.isfinite(rows), axis=1)]
    if len(rows) == 0:
        return None
    singular, vectors = right_singular_vectors(rows)
    if len(singular) == 0:
        return None
    cutoff = spectral_cutoff(singular, kappa)
    second = singular[1] if len(singular) > 1 else 0.0
    return ClassSpectrum(
        leading=_oriented(vectors[0]),
        residual=_oriented(vectors[cutoff : cutoff + max_residual]),  # eq. 19
        count=len(rows),
        cutoff=cutoff,
        gap=float((singular[0] - second) / singular[0]),
        s1_ratio=float(singular[0] / singular.sum()),
    )


def class_spectra(
    features: NDArray[np.floating],
    labels: NDArray[np.int64],
    num_classes: int,
    kappa: float = 10.0,
    max_residual: int = 12,
) -> tuple[ClassSpectrum | None, ...]:
    """C spectra of the features (n, d) grouped by observed labels (n,); None for unobserved classes."""
    return tuple(class_spectrum(features[labels == c], kappa, max_residual) for c in range(num_classes))


def right_singular_vectors(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Singular values (r,) in descending order and right singular vectors (r, d) of finite rows (n, d).

    r is the numerical rank: what lies below `RANK_TOLERANCE` of the largest singular value is left out,
    because directions without signal are arbitrary. Empty for a zero matrix.
    """
    # Scaling keeps squares of extreme features inside the range of float64.
    scale = float(np.abs(rows).max(initial=0.0))
    if scale == 0.0:
        return np.empty(0), np.empty((0, rows.shape[1]))
    scaled = rows / scale
    if len(scaled) > scaled.shape[1]:
        # The d x d Gram matrix has the same right singular vectors and is far smaller than the features.
        squares, columns = np.linalg.eigh(scaled.T @ scaled)
        singular, vectors = np.sqrt(np.maximum(squares[::-1], 0.0)), columns[:, ::-1].T
    else:
        _, singular, vectors = np.linalg.svd(scaled, full_matrices=False)
    rank = int(np.count_nonzero(singular > RANK_TOLERANCE * singular[0]))
    return singular[:rank] * scale, np.ascontiguousarray(vectors[:rank])


def spectral_cutoff(singular: NDArray[np.float64], kappa: float) -> int:
    """Smallest q with sum_{j<=q} s_j >= kappa / (kappa + 1) sum_j s_j, in singular values (eq. 16-17)."""
    # Multiplied out, with a last-bit allowance, so that exact ties such as (10, .5, .3, .2) count as reached.
    reached = np.cumsum(singular) * (kappa + 1.0) >= kappa * singular.sum() * (1.0 - 1e-12)
    return int(np.argmax(reached)) + 1


def balanced_index(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions (C_observed * n_max,) that oversample every observed class to the largest count (eq. 4-6).

    First every position once, then per class n_max - n_c further ones drawn with replacement. Features are
    computed once per image and re-indexed: the transform is deterministic, so that is the balanced loader.
    """
    observed, counts = np.unique(labels, return_counts=True)
    extra = [
        rng.choice(np.flatnonzero(labels == c), size=int(counts.max() - n), replace=True)
        for c, n in zip(observed, counts, strict=True)
    ]
    return np.concatenate([np.arange(len(labels)), *extra]).astype(np.int64)


def similarity_matrix(
    leading: Sequence[NDArray[np.float64] | None], sign: SimilaritySign = "abs", eps: float = 1e-12
) -> NDArray[np.float64]:
    """S (C, C): cosines between the leading directions (d,) of the classes (eq. 12); NaN where unobserved.

    The sign of a singular vector is arbitrary, so eq. 12 needs a convention (Q1): `abs` takes |cos|,
    `oriented` first flips every vector so that its entries sum to something positive. For features >= 0 both
    give the same.
    """
    similarity = np.full((len(leading), len(leading)), np.nan)
    seen = [c for c, v in enumerate(leading) if v is not None]
    if not seen:
        return similarity
    stacked = _oriented(np.stack([v for v in leading if v is not None]).astype(np.float64))
    norms = np.linalg.norm(stacked, axis=1)
    cosines = stacked @ stacked.T / (np.outer(norms, norms) + eps)
    similarity[np.ix_(seen, seen)] = np.clip(np.abs(cosines) if sign == "abs" else cosines, -1.0, 1.0)
    return similarity


def _oriented(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Vectors (..., d) flipped so that their entries sum to something positive."""
    flip = np.where(vectors.sum(axis=-1, keepdims=True) < 0, -1.0, 1.0)
    return np.asarray(vectors * flip, dtype=np.float64)
