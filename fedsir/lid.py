"""Local intrinsic dimensionality of points, by maximum likelihood from neighbour distances."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK = 256
"""Points whose distances to all others are held in memory at once."""
_FLOOR = 1e-12


def neighbour_distances(points: ArrayLike, k: int, chunk: int = CHUNK) -> NDArray[np.float64]:
    """Rising Euclidean distances (n, k') from every point to its k' = min(k, n - 1) nearest others.

    points: (n, F). The point itself is left out, its duplicates are not. Memory is O(chunk n); the result does not
    depend on `chunk`. Raises ValueError for k < 1 and for points that are not a matrix.
    """
    values = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or k < 1:
        raise ValueError(f"expected points (n, F) and k >= 1, got shape {values.shape} and k = {k}")
    n = len(values)
    neighbours = min(k, n - 1)
    if neighbours < 1:
        return np.empty((n, 0), dtype=np.float64)
    out = np.empty((n, neighbours), dtype=np.float64)
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        # Differences, not |a|^2 + |b|^2 - 2ab, whose rounding would hide how close saturated softmax vectors are.
        squared = np.zeros((stop - start, n), dtype=np.float64)
        for column in values.T:
            squared += np.square(column[start:stop, None] - column[None, :])
        squared[np.arange(stop - start), np.arange(start, stop)] = np.inf
        nearest = np.partition(squared, neighbours - 1, axis=1)[:, :neighbours]
        out[start:stop] = np.sqrt(np.sort(nearest, axis=1))
    return out


def lid_from_distances(distances: ArrayLike) -> NDArray[np.float64]:
    """LID (n,) float64 = -k' / sum_j log(r_j / r_k') from rising neighbour distances r (n, k').

    Distances below 1e-12 r_k' are raised to it, since a duplicate would make the sum infinite. Where all
    neighbours coincide with the point the dimension is 0. NaN where it is undefined: no neighbour, all neighbours
    at one distance, or a distance that is not finite.
    """
    r = np.asarray(distances, dtype=np.float64)
    if r.ndim != 2:
        raise ValueError(f"expected distances (n, k), got shape {r.shape}")
    out = np.full(len(r), np.nan)
    if r.shape[1] == 0:
        return out
    farthest = r[:, -1]
    out[farthest == 0] = 0.0
    usable = np.isfinite(r).all(axis=1) & (farthest > 0)
    ratios = np.maximum(r[usable] / farthest[usable, None], _FLOOR)
    total = np.log(ratios).sum(axis=1)
    spread = total < 0
    out[np.flatnonzero(usable)[spread]] = -r.shape[1] / total[spread]
    return out


def lid(points: ArrayLike, k: int, chunk: int = CHUNK) -> NDArray[np.float64]:
    """LID (n,) float64 of every point among all others, from its min(k, n - 1) nearest; see `lid_from_distances`."""
    return lid_from_distances(neighbour_distances(points, k, chunk))


def mean_lid(points: ArrayLike, k: int, min_points: int = 5) -> float:
    """Mean LID of the points where it is defined; NaN below `min_points` points and where it is nowhere defined."""
    values = np.asarray(points, dtype=np.float64)
    if len(values) < min_points:
        return float("nan")
    each = lid(values, k)
    known = each[np.isfinite(each)]
    return float(known.mean()) if len(known) else float("nan")
