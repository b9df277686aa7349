"""The LightningModule every client trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import lightning
import torch
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


class ClientModule(lightning.LightningModule):
    """A network with the loss of the task at hand.

    Actors build it once and reuse it for every client, round and run of the same architecture; `objective` is
    set by each task.
    """

    def __init__(self, network: Network, objective: Objective) -> None:
        super().__init__()
        self.network = network
        self.objective = objective

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        return self.objective(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The rates here are placeholders: every task sets its own before the first step.
        return torch.optim.Adam(self.parameters(), lr=1.0, fused=True)
