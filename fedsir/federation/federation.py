"""What clients and methods may see (`Federation`), apart from what only the evaluator sees (`Truth`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Federation:
    """The view of clients and methods: who holds which image under which observed label.

    indices: K arrays (n_k,) int64, sorted positions in the training set, disjoint.
    observed: K arrays (n_k,) int64, observed labels y~ aligned with `indices`.
    public_pool: (P,) int64, sorted positions of unlabelled images that no client holds.
    """

    class_names: tuple[str, ...]
    indices: tuple[NDArray[np.int64], ...]
    observed: tuple[NDArray[np.int64], ...]
    public_pool: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def num_clients(self) -> int:
        return len(self.indices)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(K,) number of images per client."""
        return np.array([len(i) for i in self.indices], dtype=np.int64)

    def observed_counts(self) -> NDArray[np.int64]:
        """(K, C) images per client and observed class."""
        return np.stack([np.bincount(y, minlength=self.num_classes) for y in self.observed]).astype(np.int64)


@dataclass(frozen=True)
class Truth:
    """Held by the evaluator alone: true labels (K arrays (n_k,) int64) and who is noisy ((K,) bool)."""

    labels: tuple[NDArray[np.int64], ...]
    noisy: NDArray[np.bool_]


@dataclass(frozen=True)
class FederationFacts:
    """How the draw went: redraws of the partition and notes the user must see (for example a grown clean set)."""

    redraws: int
    notes: tuple[str, ...]
