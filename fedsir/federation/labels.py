"""Labels that a method has changed, over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LabelCheckpoint:
    """Training labels from `round` (0-based) on: per client (n_k,) int16, to keep long histories small."""

    round: int
    labels: tuple[NDArray[np.int16], ...]
