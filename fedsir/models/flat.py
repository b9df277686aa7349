"""Weights as one flat vector, and the schema that gives its parts their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class FlatWeights:
    """State of a network.

    values: (P,) float32, parameters followed by floating buffers in schema order.
    counters: (Q,) int64, integer buffers (`num_batches_tracked`), kept apart.
    """

    values: NDArray[np.float32]
    counters: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.counters.nbytes)


@dataclass(frozen=True)
class FlatEntry:
    """One tensor inside `FlatWeights.values`."""

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class FlatSchema:
    """Names, shapes and places of all tensors; equal for every copy of one network.

    Parameters come first, so `values[:num_parameters]` are exactly the trainable numbers.
    """

    entries: tuple[FlatEntry, ...]
    counter_names: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    @property
    def num_parameters(self) -> int:
        return sum(e.stop - e.start for e in self.entries if e.trainable)

    def named(self, weights: FlatWeights) -> Iterator[tuple[str, NDArray[np.float32] | NDArray[np.int64]]]:
        """Every tensor by its `state_dict` name, as views."""
        for entry in self.entries:
            yield entry.name, weights.values[entry.start : entry.stop].reshape(entry.shape)
        for position, name in enumerate(self.counter_names):
            yield name, weights.counters[position : position + 1].reshape(())
