"""The one form in which images exist after loading: uint8 arrays with labels and patients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageSet:
    """Images of one split.

    images: (N, H, W) uint8 grey values, possibly memory-mapped read-only.
    labels: (N,) int64 class indices. patients: (N,) int64 patient indices.
    names: N identifiers to show people (file path or phantom id). sites: (N,) names or None.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64]
    names: tuple[str, ...]
    sites: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.images)
        if not (len(self.labels) == len(self.patients) == len(self.names) == n):
            raise ValueError("images, labels, patients and names must have equal length")

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Dataset:
    """Train and test images of one task with disjoint patients.

    `kind` is what every plot and table must say (`phantom` or `real`); `digest` identifies pixels, labels and
    order; `notes` are facts the user must see (images dropped and why, class merges).
    """

    name: str
    kind: str
    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    digest: str
    notes: tuple[str, ...] = field(default=())

    @property
    def num_classes(self) -> int:
        return len(self.class_names)
