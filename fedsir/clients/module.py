"""What local training hands to a loss: a batch, and the loss itself as a value that travels with the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedsir.models.network import Network


@dataclass(frozen=True)
class Batch:
    """One training batch on the client's device.

    images: (B, 3, H, W) float32, normalised. labels: (B,) int64. extras: per-sample tensors a method asked for,
    first dimension B (for example `teacher_logits` (B, C) float32).
    """

    images: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor]


class Objective(Protocol):
    """A training loss; a small picklable value, since it travels to the clients with the task."""

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        """Scalar loss of `network` on `batch`."""
        ...
