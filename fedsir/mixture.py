"""Two-component Gaussian mixtures: the split that most noise-robust methods rest on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Covariance = Literal["tied", "full"]


@dataclass(frozen=True)
class TwoComponents:
    """A fitted mixture; float64.

    means: (2, F). covariances: (2, F, F), equal when tied. weights: (2,). responsibilities: (M, 2), rows sum to 1.
    """

    means: NDArray[np.float64]
    covariances: NDArray[np.float64]
    weights: NDArray[np.float64]
    responsibilities: NDArray[np.float64]
    converged: bool


def fit_two_components(
    values: NDArray[np.float64],
    covariance: Covariance = "full",
    regularization: float = 1e-6,
    n_init: int = 1,
    max_iter: int = 100,
    seed: int = 0,
) -> TwoComponents:
    """Fit two Gaussians to finite points (M, F), M >= 2, by expectation maximisation from `n_init` starts."""
    # Loading scikit-learn takes seconds; only the process that fits should pay, not every client actor.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    model = GaussianMixture(
        n_components=2,
        covariance_type=covariance,
        reg_covar=regularization,
        n_init=n_init,
        max_iter=max_iter,
        random_state=seed % 2**32,
    )
    # A few dozen to a few thousand points: more threads would only wait, and their number could show in bits.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # Few distinct points are expected, and `converged` tells the caller.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(values)
    covariances = np.asarray(model.covariances_, dtype=np.float64)
    return TwoComponents(
        means=np.asarray(model.means_, dtype=np.float64),
        covariances=np.stack([covariances] * 2) if covariance == "tied" else covariances,
        weights=np.asarray(model.weights_, dtype=np.float64),
        responsibilities=np.asarray(model.predict_proba(values), dtype=np.float64),
        converged=bool(model.converged_),
    )


def high_group(
    values: NDArray[np.float64],
    seed: int,
    covariance: Covariance = "full",
    regularization: float = 1e-6,
    n_init: int = 1,
    max_iter: int = 100,
) -> NDArray[np.bool_]:
    """(M,) bool: points (M,) or (M, F) in the component with the larger mean (sum over coordinates).

    Non-finite entries take the median of their column, columns that cannot be told apart are left out. Nobody is
    in the group when all points are equal or fewer than two. A mixture always splits: on one homogeneous
    group it still names about half of the points.
    """
    points = np.array(values, dtype=np.float64)
    points = points[:, None] if points.ndim == 1 else points
    nobody = np.zeros(len(points), dtype=np.bool_)
    if len(points) < 2:
        return nobody
    known = np.isfinite(points)
    points = points[:, known.any(axis=0)]
    known = np.isfinite(points)
    for column, finite in zip(points.T, known.T, strict=True):
        column[~finite] = np.median(column[finite])
    spread, size = np.ptp(points, axis=0), np.abs(points).max(axis=0, initial=0.0)
    points = points[:, spread > 1e-12 * np.maximum(size, 1e-12)]
    if points.shape[1] == 0:
        return nobody
    fit = fit_two_components(points, covariance, regularization, n_init, max_iter, seed)
    high = int(np.argmax(fit.means.sum(axis=1)))
    return np.asarray(fit.responsibilities[:, high] > 0.5)
