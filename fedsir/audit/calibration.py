"""How odd is a site, compared with the same site in consortia without odd sites?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Calibrated:
    """One statistic of K sites against R homogeneous splits; (K,) float64, NaN where a site has no statistic.

    observed: the statistic. centre, spread: mean and SD of the site's own values over the splits. z: observed in
    these units. p: share of splits in which this site alone comes out at least as odd. family: share of splits in
    which *any* site does, the figure that is held against the stated rate (single-step max-T). critical: value of
    the statistic from which `family` is at most the rate.
    """

    observed: Array
    centre: Array
    spread: Array
    z: Array
    p: Array
    family: Array
    critical: Array

    def z_of(self, values: Array) -> Array:
        """Other values (..., K) in units of the homogeneous splits; 0 where these have no spread."""
        return _scaled(values, self.centre, self.spread)


def calibrate(observed: Array, null: Array, rate: float) -> Calibrated:
    """Compare `observed` (K,) with `null` (R, K); one-sided, high is odd.

    Shares count the observed value among the splits, so that none is 0: with R splits the smallest is 1 / (R + 1).
    """
    centre, spread = null.mean(axis=0), null.std(axis=0)  # NaN stays NaN
    z, null_z = _scaled(observed, centre, spread), _scaled(null, centre, spread)
    worst = np.where(np.isfinite(null_z), null_z, -np.inf).max(axis=1)
    runs = len(null)
    p = (1.0 + (null_z >= z).sum(axis=0)) / (runs + 1.0)
    family = (1.0 + (worst[:, None] >= z).sum(axis=0)) / (runs + 1.0)
    # The smallest value that at most rate * (R + 1) - 1 of the splits reach; none does if R is too small.
    allowed = int(np.floor(rate * (runs + 1.0) - 1.0 + 1e-9))
    edge = np.sort(worst)[::-1][allowed] if 0 <= allowed < runs else np.inf
    known = np.isfinite(z)
    return Calibrated(
        observed=observed,
        centre=centre,
        spread=spread,
        z=z,
        p=np.where(known, p, np.nan),
        family=np.where(known, family, np.nan),
        critical=np.where(known, centre + spread * edge, np.nan),
    )


def _scaled(values: Array, centre: Array, spread: Array) -> Array:
    flat = spread <= 1e-12 * np.maximum(np.abs(centre), 1e-12)
    return np.asarray(np.where(flat, 0.0, (values - centre) / np.where(flat, 1.0, spread)) + 0.0 * values)
