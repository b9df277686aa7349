"""Learning the labels of a noisy client along with its model (FedELC, Jiang et al. 2024; after PENCIL).

Every image of the client has label logits u (C,) float32. s = softmax(u) is its current soft label and p the
network's prediction: the network learns s, while s is pulled towards p and towards the observed label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, forward_pass, train_locally
from fedsir.config.base import NonNegativeFloat, PositiveFloat, Section
from fedsir.config.training import TrainingConfig
from fedsir.models.network import Network


class LabelLearningSettings(Section):
    """How labels are learnt.

    The official step on u is lambda_l times a gradient of batch means and so depends on batch size B and number of
    classes C. The steps here are per image: eta_c = lambda_l / (B C) and eta_o = lambda_l alpha / B; the defaults
    are the official lambda_l = 1000, alpha = 0.5 at B = 64, C = 10.
    """

    scale: PositiveFloat = Field(default=10.0, description="K_p: label logits start as K_p times a distribution")
    compatibility_step: NonNegativeFloat = Field(default=1.5625, description="eta_c, step of s towards p")
    observed_step: NonNegativeFloat = Field(default=7.8125, description="eta_o, step of s towards the observed label")
    alpha: NonNegativeFloat = Field(
        default=0.5, description="weight of the observed label in the reported loss; it has no gradient in the network"
    )
    beta: NonNegativeFloat = Field(default=0.2, description="weight of the entropy of p in the loss")


def initial_label_logits(labels: NDArray[np.int64], num_classes: int, scale: float) -> NDArray[np.float32]:
    """u (n, C) float32 = `scale` * onehot of labels (n,) int64."""
    return np.float32(scale) * np.eye(num_classes, dtype=np.float32)[labels]


def label_learning_loss(logits: Tensor, label_logits: Tensor, targets: Tensor, alpha: float, beta: float) -> Tensor:
    """L_c / C + alpha L_o + beta L_e / C (scalar) with L_c = KL(p || s), L_o = -log s[y], L_e = H(p), batch means.

    logits, label_logits: (b, C). Differentiable in both: the network learns through p, labels through s.
    """
    log_p, log_s = F.log_softmax(logits, dim=1), F.log_softmax(label_logits, dim=1)
    compatibility = (log_p.exp() * (log_p - log_s)).sum(dim=1).mean()
    observed = F.nll_loss(log_s, targets)
    uncertainty = -(log_p.exp() * log_p).sum(dim=1).mean()
    num_classes = logits.shape[1]
    return compatibility / num_classes + alpha * observed + beta * uncertainty / num_classes


def label_step(
    label_logits: Tensor, predictions: Tensor, targets: Tensor, compatibility_step: float, observed_step: float
) -> Tensor:
    """u after one step, u - [eta_c (s - p) + eta_o (s - e_y)]; label_logits and predictions p are (b, C).

    The bracket is the loss's gradient in u, whose parts (s - p) / (B C) and alpha (s - e_y) / B are rescaled to
    steps that do not depend on the batch.
    """
    soft = F.softmax(label_logits, dim=1)
    onehot = F.one_hot(targets, label_logits.shape[1]).to(soft.dtype)
    return label_logits - compatibility_step * (soft - predictions) - observed_step * (soft - onehot)


def blended_label_logits(label_logits: Tensor, predictions: Tensor, scale: float) -> Tensor:
    """u (n, C) = K_p (softmax(u) + p) / 2; images without a finite prediction keep theirs."""
    blended = scale * (F.softmax(label_logits, dim=1) + predictions) / 2.0
    return torch.where(torch.isfinite(predictions).all(dim=1, keepdim=True), blended, label_logits)


@dataclass
class LabelLearning:
    """The loss of one task; it also steps the label logits (n, C) of the images it has seen.

    An epoch shows every image once, so stepping at once equals one step per epoch after all batches. Needs the
    per-sample extra `position` (B,), the image's row in `label_logits`.
    """

    label_logits: Tensor
    settings: LabelLearningSettings

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        settings, rows = self.settings, batch.extras["position"]
        logits, current = network(batch.images).float(), self.label_logits[rows]
        loss = label_learning_loss(logits, current, batch.labels, settings.alpha, settings.beta)
        # A batch whose loss is not finite is skipped by the network and must not spoil the labels either.
        if torch.isfinite(loss):
            predictions = F.softmax(logits.detach(), dim=1)
            steps = settings.compatibility_step, settings.observed_step
            self.label_logits[rows] = label_step(current, predictions, batch.labels, *steps)
        return loss


@dataclass(frozen=True)
class LearnLabels:
    """Train from broadcast `weights` on learnt labels; the new label logits (n, C) float32 stay with the client.

    observed: (n,) int64. label_logits: (n, C) float32. After the last epoch the logits are blended with the
    trained model's predictions on all images (plain transform); a client whose training failed keeps its own.
    """

    observed: NDArray[np.int64]
    label_logits: NDArray[np.float32]
    budget: TrainingConfig
    settings: LabelLearningSettings

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        learning = LabelLearning(torch.from_numpy(self.label_logits.copy()).to(client.runtime.device), self.settings)
        recipe = Recipe.within(self.budget, learning, {"position": np.arange(client.size)})
        update = train_locally(client, broadcast["weights"], self.observed, recipe)
        if update.samples == 0:
            return ClientResult(update, state=self.label_logits)
        client.runtime.binding.load(update.weights)
        predictions = F.softmax(forward_pass(client, "logits"), dim=1)
        blended = blended_label_logits(learning.label_logits, predictions, self.settings.scale)
        return ClientResult(update, state=blended.cpu().numpy())
