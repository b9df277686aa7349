"""Training on two views of every image: FedLSR's local self-regularization (Jiang et al. 2022).

z1, z2 are the logits (b, C) of the ordinary training image and of its second view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, train_locally
from fedsir.config.base import NonNegativeFloat, PositiveFloat, Section
from fedsir.config.data import TransformConfig
from fedsir.config.training import TrainingConfig
from fedsir.data.views import ViewSettings, apply_view, draw_view
from fedsir.models.network import Network
from fedsir.objectives import cross_entropy, entropy, jensen_shannon, sharpen

# Keeps logarithms and their gradients finite, as the official code does.
_SMALLEST = 1e-6


class SelfRegularization(Section):
    """FedLSR's losses.

    `coded` is what the official code computes: the sharpened mixture goes through softmax once more before the
    cross entropy, which bounds the loss of one image and so is where the robustness comes from; the divergence is
    divided by the number of classes; the entropy is that of softmax(q1) alone. `described` is the paper's text.
    """

    form: Literal["coded", "described"] = "coded"
    entropy_weight: NonNegativeFloat = Field(default=0.6, description="lambda_e")
    inverse_temperature: PositiveFloat = Field(default=3.0, description="1 / T_d, factor on the logits of q")
    sharpening_temperature: PositiveFloat = Field(default=0.5, description="T_s")


@dataclass(frozen=True)
class Terms:
    """Batch means of the three parts of the loss (scalars)."""

    classification: Tensor
    consistency: Tensor
    entropy: Tensor


def self_regularization(
    z1: Tensor, z2: Tensor, targets: Tensor, share: Tensor | float, settings: SelfRegularization
) -> Terms:
    """L_cls, L_js and L_e of two views; `share` in [0, 1] is view 1's part of the mixed prediction."""
    mixed = share * F.softmax(z1, dim=1) + (1.0 - share) * F.softmax(z2, dim=1)
    sharp = sharpen(mixed, settings.sharpening_temperature)
    q1, q2 = (F.softmax(settings.inverse_temperature * z, dim=1).clamp(_SMALLEST, 1.0) for z in (z1, z2))
    divergence = jensen_shannon(q1, q2).mean()
    if settings.form == "coded":
        return Terms(cross_entropy(sharp, targets), divergence / z1.shape[1], entropy(F.softmax(q1, dim=1)).mean())
    picked = sharp.gather(1, targets[:, None]).clamp_min(_SMALLEST)
    return Terms(-picked.log().mean(), divergence, (entropy(q1) + entropy(q2)).mean() / 2.0)


@dataclass(frozen=True)
class TwoViewLoss:
    """L = L_cls + consistency_weight L_js + lambda_e L_e, with a second view drawn for every batch.

    The views pass the network one after the other, so batch norm sees two batches, as in the official code.
    """

    settings: SelfRegularization
    consistency_weight: float
    view: ViewSettings
    transform: TransformConfig

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        second = apply_view(batch.images, draw_view(len(batch.images), self.view), self.transform)
        share = torch.rand(()).item()  # Beta(1, 1), one draw per batch
        z1, z2 = network(batch.images), network(second)
        terms = self_regularization(z1, z2, batch.labels, share, self.settings)
        return (
            terms.classification
            + self.consistency_weight * terms.consistency
            + self.settings.entropy_weight * terms.entropy
        )


@dataclass(frozen=True)
class TwoViewTraining:
    """Train from broadcast `weights` under `labels` (n,) int64 by `TwoViewLoss`.

    The loss is put together here because only the client knows how its images are normalised.
    """

    labels: NDArray[np.int64]
    budget: TrainingConfig
    settings: SelfRegularization
    view: ViewSettings
    consistency_weight: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        loss = TwoViewLoss(self.settings, self.consistency_weight, self.view, client.runtime.setup.transform)
        recipe = Recipe.within(self.budget, loss)
        update = train_locally(client, broadcast["weights"], self.labels, recipe)
        # Forward and backward pass of the second view, which counted images do not show.
        client.work.forwarded += 3 * client.work.trained
        return ClientResult(update)
