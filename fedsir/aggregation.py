"""Server-side averages of flat weights: by sample count (eq. 7) and distance-aware (eq. 35-39).

Everything is accumulated in float64 in the order in which the states are given (client id order), element by element,
so the bits do not depend on which client finished first, nor, but for the distances of many pairs, on thread counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsir.models.flat import FlatEntry, FlatSchema, FlatWeights

# Values per slice: accumulator, product and input of a slice stay in the second-level cache.
_SLICE = 1 << 15

EXACT_PAIRS = 256
"""Pairs of a noisy and a clean client up to which distances are taken one by one; 32 clients never have more."""

# Values of a tensor that a matrix product takes at a time: of 1000 clients 33 MB.
_COLUMNS = 1 << 12

# Where a squared distance is a smaller share than this of what it is the difference of, too few digits are left of it.
_CANCELLED = 1e-6


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


class RunningMean:
    """sum_k w_k theta_k / sum_k w_k (eq. 7 with w_k = N_k) of states that come one after the other.

    However many come, it holds one sum in double precision. Non-finite states are dropped together with their weight,
    as are states of weight zero. Counters take the maximum over the states that take part: they count batches seen, for
    which a mean has no meaning.
    """

    def __init__(self, expected: ArrayLike) -> None:
        """expected: (K,) weights of the states to come, as far as they are known; they only decide rounding.

        Raises ValueError for negative and non-finite ones.
        """
        given = _checked(expected)
        self._expected = given[given > 0]
        # Shares of the sum, and not a division in the end, since nearly always everybody comes who was expected.
        self._scale = float(self._expected.sum()) or 1.0
        self._taken: list[float] = []
        self._total: NDArray[np.float64] | None = None
        self._counters = np.empty(0, dtype=np.int64)

    def add(self, state: FlatWeights, weight: float) -> None:
        """Take a state in, unless it is dropped. Raises ValueError where it is of another network than the others."""
        if weight > 0 and is_finite(state):
            self.include(state, weight)

    def include(self, state: FlatWeights, weight: float) -> None:
        """Take in a state that is known to be finite, with a positive weight. Raises ValueError as `add` does."""
        size = state.values.size
        if self._total is None:
            self._total, self._counters = np.zeros(size, dtype=np.float64), state.counters.astype(np.int64)
        if self._total.size != size:
            raise ValueError("states of different networks cannot be averaged")
        self._taken.append(weight)
        self._counters = np.maximum(self._counters, state.counters)
        share, product = weight / self._scale, np.empty(min(size, _SLICE), dtype=np.float64)
        for start in range(0, size, _SLICE):
            stop = min(start + _SLICE, size)
            np.multiply(state.values[start:stop], share, out=product[: stop - start], dtype=np.float64)
            self._total[start:stop] += product[: stop - start]

    def result(self) -> FlatWeights | None:
        """The mean, or None when no state took part; the caller keeps the state it has."""
        if self._total is None:
            return None
        taken, total = np.array(self._taken), self._total
        if not np.array_equal(taken, self._expected):
            total = total * (self._scale / taken.sum())
        return FlatWeights(values=total.astype(np.float32), counters=self._counters)


def weighted_mean(states: Sequence[FlatWeights], weights: ArrayLike) -> FlatWeights | None:
    """The `RunningMean` of states that are all there, with (K,) weights.

    Returns None when no state is left. Raises ValueError for negative or non-finite weights and for lengths that
    differ.
    """
    given = _checked_weights(states, weights)
    mean = RunningMean(given)
    for state, weight in zip(states, given.tolist(), strict=True):
        mean.add(state, weight)
    return mean.result()


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

    0 for clean clients, and for everybody if nobody is clean. Up to `EXACT_PAIRS` pairs are taken one by one; beyond
    that matrix products make them affordable, and the bits may depend on the threads of NumPy's linear algebra. M noisy
    and N clean clients with P parameters cost 2 M N P operations: 500 and 500 of squeezenet1_1 (0.72 million) 3.6e11.
    """
    distances = np.zeros(len(states), dtype=np.float64)
    anchors = [state for state, trusted in zip(states, clean, strict=True) if trusted]
    others = [state for state, trusted in zip(states, clean, strict=True) if not trusted]
    if anchors and others:
        between = _by_differences if len(anchors) * len(others) <= EXACT_PAIRS else _by_products
        distances[~clean] = between(schema, others, anchors, include_buffers).min(axis=1)
    return distances


def _by_differences(
    schema: FlatSchema, ones: Sequence[FlatWeights], others: Sequence[FlatWeights], include_buffers: bool
) -> NDArray[np.float64]:
    """(I, J) float64 `tensor_distances` of every pair."""
    return np.array([[tensor_distances(schema, a, b, include_buffers) for b in others] for a in ones])


def _by_products(
    schema: FlatSchema, ones: Sequence[FlatWeights], others: Sequence[FlatWeights], include_buffers: bool
) -> NDArray[np.float64]:
    """The same by ||a - b||^2 = ||a||^2 + ||b||^2 - 2 a.b, tensor by tensor."""
    total = np.zeros((len(ones), len(others)), dtype=np.float64)
    for entry in schema.entries:
        if entry.trainable or include_buffers:
            total += np.sqrt(_squared(ones, others, entry))
    return total


def _squared(ones: Sequence[FlatWeights], others: Sequence[FlatWeights], entry: FlatEntry) -> NDArray[np.float64]:
    """(I, J) float64 squared distances of one tensor.

    Seen from the first of `others`, so that what all have in common does not drown the differences; pairs of which too
    few digits are left all the same are taken by their difference.
    """
    products = np.zeros((len(ones), len(others)), dtype=np.float64)
    sums = np.zeros_like(products)
    for start in range(entry.start, entry.stop, _COLUMNS):
        part = slice(start, min(start + _COLUMNS, entry.stop))
        left, right = _rows(ones, part), _rows(others, part)
        centre = right[0].copy()
        left -= centre
        right -= centre
        products += left @ right.T
        sums += np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)
    squared = sums - 2.0 * products
    for i, j in np.argwhere(squared < _CANCELLED * sums).tolist():
        whole = slice(entry.start, entry.stop)
        difference = np.subtract(ones[i].values[whole], others[j].values[whole], dtype=np.float64)
        squared[i, j] = np.square(difference, out=difference).sum()
    return squared


def _rows(states: Sequence[FlatWeights], part: slice) -> NDArray[np.float64]:
    return np.stack([state.values[part] for state in states]).astype(np.float64)


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
    mean = RunningMean(weights[position])
    for k in position.tolist():
        mean.include(states[k], weights[k])  # eq. 39
    state = mean.result()
    return None if state is None else Aggregate(state=state, weights=weights, distances=distances)


def _chosen(states: Sequence[FlatWeights], kept: NDArray[np.bool_]) -> list[FlatWeights]:
    return [state for state, keep in zip(states, kept, strict=True) if keep]


def _checked_weights(states: Sequence[FlatWeights], weights: ArrayLike) -> NDArray[np.float64]:
    given = _checked(weights)
    if given.shape != (len(states),):
        raise ValueError(f"{len(states)} states need as many weights, got shape {given.shape}")
    if len({s.values.shape for s in states}) > 1:
        raise ValueError("states of different networks cannot be averaged")
    return given


def _checked(weights: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(weights, dtype=np.float64)
    if not np.all(np.isfinite(given)) or np.any(given < 0):
        raise ValueError(f"weights must be finite and not negative, got {given.tolist()}")
    return given


__all__ = [
    "EXACT_PAIRS",
    "Aggregate",
    "RunningMean",
    "distance_aware_mean",
    "distance_aware_weights",
    "is_finite",
    "nearest_clean_distances",
    "tensor_distances",
    "usable",
    "weighted_mean",
]
