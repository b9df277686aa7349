"""Server-side averages of flat weights: by sample count (eq. 7) and distance-aware (eq. 35-39).

Everything is accumulated in float64 in the order in which the states are given (client id order), element by
element and without BLAS, so the bits do not depend on thread counts or on which client finished first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsir.models.flat import FlatSchema, FlatWeights

# Values per slice: accumulator, product and input of a slice stay in the second-level cache.
_SLICE = 1 << 15


@dataclass(frozen=True)
class Aggregate:
    """Result of distance-aware aggregation.

    state: the new global state. weights: (K,) float64 omega, sum 1, 0 for dropped clients. distances: (K,)
    float64 d_k before normalisation, 0 for predicted-clean clients, NaN for dropped ones.
    """

    state: FlatWeights
    weights: NDArray[np.float64]
    distances: NDArray[np.float64]


def is_finite(state: FlatWeights) -> bool:
    """Whether every value of `state` is a finite number."""
    if state.values.size == 0:
        return True
    # Minimum and maximum carry NaN and infinities and need no temporary array.
    return bool(np.isfinite(state.values.min()) and np.isfinite(state.values.max()))


def usable(states: Sequence[FlatWeights], weights: ArrayLike) -> NDArray[np.bool_]:
    """(K,) bool: states that take part in an average, that is with positive weight and only finite values."""
    given = _checked_weights(states, weights)
    return np.array([w > 0 and is_finite(s) for s, w in zip(states, given, strict=True)], dtype=np.bool_)


def weighted_mean(states: Sequence[FlatWeights], weights: ArrayLike) -> FlatWeights | None:
    """sum_k w_k theta_k / sum_k w_k (eq. 7 with w_k = N_k).

    Non-finite states are dropped together with their weight, as are states of weight zero. Counters take the
    maximum over the states that take part: they count batches seen, for which a mean has no meaning.

    Returns None when no state is left; the caller keeps the state it has. Raises ValueError for negative or
    non-finite weights and for lengths that differ.
    """
    return _mean_of(states, _checked_weights(states, weights), usable(states, weights))


def tensor_distances(schema: FlatSchema, a: FlatWeights, b: FlatWeights, include_buffers: bool = False) -> float:
    """Sum over tensors of the L2 norm of their difference (inner sum of eq. 36).

    The equation speaks of parameter tensors; FedSIR's code also counts floating buffers (batch-norm running
    statistics), which `include_buffers` adds. Counters never count.
    """
    total = 0.0
    for entry in schema.entries:
        if entry.trainable or include_buffers:
            difference = np.subtract(
                a.values[entry.start : entry.stop], b.values[entry.start : entry.stop], dtype=np.float64
            )
            total += float(np.sqrt(np.square(difference, out=difference).sum()))
    return total


def nearest_clean_distances(
    schema: FlatSchema, states: Sequence[FlatWeights], clean: NDArray[np.bool_], include_buffers: bool = False
) -> NDArray[np.float64]:
    """(K,) float64: distance of every predicted-noisy state to the nearest predicted-clean one (eq. 36).

    0 for clean clients, and for everybody if nobody is clean.
    """
    distances = np.zeros(len(states), dtype=np.float64)
    anchors = [state for state, trusted in zip(states, clean, strict=True) if trusted]
    if anchors:
        for k, (state, trusted) in enumerate(zip(states, clean, strict=True)):
            if not trusted:
                distances[k] = min(tensor_distances(schema, state, a, include_buffers) for a in anchors)
    return distances


def distance_aware_weights(sizes: ArrayLike, distances: ArrayLike, eps: float = 1e-12) -> NDArray[np.float64]:
    """(K,) float64 omega_k with sum 1 from sample counts (K,) and distances (K,) (eq. 35, 37, 38).

    With all distances 0 these are the sample-count weights, undisturbed by eps. Whatever the scale of the
    distances, the farthest client keeps a share e^-1 of its sample-count weight relative to a clean one.
    """
    share = np.asarray(sizes, dtype=np.float64)
    share = share / share.sum()  # eq. 35
    distance = np.asarray(distances, dtype=np.float64)
    farthest = distance.max(initial=0.0)
    if farthest > 0:
        share = share * np.exp(-distance / (farthest + eps))  # eq. 37, 38
    return np.asarray(share / share.sum(), dtype=np.float64)


def distance_aware_mean(
    schema: FlatSchema,
    states: Sequence[FlatWeights],
    sizes: ArrayLike,
    clean: NDArray[np.bool_],
    include_buffers: bool = False,
    eps: float = 1e-12,
) -> Aggregate | None:
    """Distance-aware aggregation (DaAgg, eq. 35-39).

    clean: (K,) bool, predicted-clean clients. Without a clean or without a noisy client, or with every
    distance 0, this is the sample-weighted mean. Non-finite states and empty clients are
    dropped first, so a diverged client is neither an anchor nor the farthest client. Returns None when
    nothing is left.
    """
    counts = _checked_weights(states, sizes)
    kept = usable(states, counts)
    if not kept.any():
        return None
    verdict = np.asarray(clean, dtype=np.bool_)
    position = np.flatnonzero(kept)
    near = nearest_clean_distances(schema, _chosen(states, kept), verdict[position], include_buffers)
    weights = np.zeros(len(states), dtype=np.float64)
    weights[position] = distance_aware_weights(counts[position], near, eps)
    distances = np.full(len(states), np.nan, dtype=np.float64)
    distances[position] = near
    state = _mean_of(states, weights, kept)  # eq. 39
    return None if state is None else Aggregate(state=state, weights=weights, distances=distances)


def _mean_of(
    states: Sequence[FlatWeights], weights: NDArray[np.float64], kept: NDArray[np.bool_]
) -> FlatWeights | None:
    if not kept.any():
        return None
    chosen = _chosen(states, kept)
    share = weights[kept] / weights[kept].sum()
    size = chosen[0].values.size
    out = np.empty(size, dtype=np.float32)
    product = np.empty(min(size, _SLICE), dtype=np.float64)
    for start in range(0, size, _SLICE):
        stop = min(start + _SLICE, size)
        total = np.zeros(stop - start, dtype=np.float64)
        for state, weight in zip(chosen, share, strict=True):
            np.multiply(state.values[start:stop], weight, out=product[: stop - start], dtype=np.float64)
            total += product[: stop - start]
        out[start:stop] = total
    counters = np.stack([s.counters for s in chosen]).max(axis=0).astype(np.int64)
    return FlatWeights(values=out, counters=counters)


def _chosen(states: Sequence[FlatWeights], kept: NDArray[np.bool_]) -> list[FlatWeights]:
    return [state for state, keep in zip(states, kept, strict=True) if keep]


def _checked_weights(states: Sequence[FlatWeights], weights: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(weights, dtype=np.float64)
    if given.shape != (len(states),):
        raise ValueError(f"{len(states)} states need as many weights, got shape {given.shape}")
    if not np.all(np.isfinite(given)) or np.any(given < 0):
        raise ValueError(f"weights must be finite and not negative, got {given.tolist()}")
    if len({s.values.shape for s in states}) > 1:
        raise ValueError("states of different networks cannot be averaged")
    return given


__all__ = [
    "Aggregate",
    "distance_aware_mean",
    "distance_aware_weights",
    "is_finite",
    "nearest_clean_distances",
    "tensor_distances",
    "usable",
    "weighted_mean",
]
