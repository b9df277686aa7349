"""Client tasks of RHFL: report on the private model, train it privately, or train from a global model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsir.clients.alignment import Peers, match_peers, public_predictions
from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, exact_logits, train_locally
from fedsir.config.base import NonNegativeFloat, Section
from fedsir.config.training import TrainingConfig
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network
from fedsir.objectives import symmetric_cross_entropy

_SmallProbability = Annotated[float, Field(strict=True, gt=0, lt=1)]


class SymmetricCE(Section):
    """Symmetric cross entropy alpha CE + beta RCE; `clip` is A, the floor of one-hot targets under the logarithm."""

    alpha: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 1.0
    clip: _SmallProbability = 1e-4
    p_min: _SmallProbability = Field(default=1e-7, description="floor of predicted probabilities in RCE")

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(b,) losses of logits (b, C) under labels (b,) int64."""
        return symmetric_cross_entropy(logits, labels, self.alpha, self.beta, self.clip, self.p_min)


@dataclass(frozen=True)
class SymmetricObjective:
    """Batch mean of the symmetric cross entropy."""

    sce: SymmetricCE

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return self.sce.losses(network(batch.images), batch.labels).mean()


def mean_loss(client: Client, weights: FlatWeights, labels: NDArray[np.int64], sce: SymmetricCE) -> float:
    """Mean symmetric cross entropy on the client's images in eval mode; the published code's train mode would move
    the running statistics."""
    logits = exact_logits(client, weights)
    return float(sce.losses(logits, torch.from_numpy(labels.copy())).mean())


@dataclass(frozen=True)
class ConfidenceReport:
    """What a client says before an exchange: mean loss on its data, predictions (P, C) float32 on the pool."""

    loss: float
    predictions: NDArray[np.float32]


@dataclass(frozen=True)
class Report:
    """Loss and public predictions of the client's private `model`."""

    model: FlatWeights
    labels: NDArray[np.int64]
    sce: SymmetricCE

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[ConfidenceReport]:  # noqa: ARG002
        loss = mean_loss(client, self.model, self.labels, self.sce)
        return ClientResult(ConfidenceReport(loss, public_predictions(client, self.model)))


NOT_UPLOADED = FlatWeights(np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64))
"""In the place of weights that stay with the client."""


@dataclass(frozen=True)
class PrivateTraining:
    """Match the peers where there is an exchange, then train the private `model` on the client's own labels.

    An exchange is broadcast as `peers`, and `peer_ids` (J,) int64, the clients they are. The new model stays with
    the client; it is uploaded only where `upload` says so.
    """

    model: FlatWeights
    labels: NDArray[np.int64]
    recipe: Recipe
    upload: bool

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        weights = self.model
        if "peers" in broadcast:
            peers: Peers = broadcast["peers"].without(broadcast["peer_ids"] == client.id)
            weights = match_peers(client, weights, peers, self.recipe.batch_size, self.recipe.optimizer)
        update = train_locally(client, weights, self.labels, self.recipe)
        return ClientResult(update if self.upload else replace(update, weights=NOT_UPLOADED), update.weights)


@dataclass(frozen=True)
class AveragedUpdate:
    """training: the local model. loss: of the received model. predictions: (P, C) of the local one, if asked for."""

    training: LocalUpdate
    loss: float
    predictions: NDArray[np.float32] | None


@dataclass(frozen=True)
class AveragedTraining:
    """Mean loss of the broadcast `weights`, then local training from them."""

    labels: NDArray[np.int64]
    recipe: Recipe
    sce: SymmetricCE
    predict: bool

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[AveragedUpdate]:
        loss = mean_loss(client, broadcast["weights"], self.labels, self.sce)
        update = train_locally(client, broadcast["weights"], self.labels, self.recipe)
        predictions = public_predictions(client, update.weights) if self.predict else None
        return ClientResult(AveragedUpdate(update, loss, predictions))


@dataclass(frozen=True)
class AlignGlobal:
    """Server-side: broadcast `weights` drawn to the broadcast `peers` on the public pool."""

    budget: TrainingConfig

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[FlatWeights]:
        budget = self.budget
        return ClientResult(
            match_peers(client, broadcast["weights"], broadcast["peers"], budget.batch_size, budget.optimizer)
        )
