"""Client tasks of FedCorr: local training with mixup, its LID and losses, and label correction (Xu et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.loss_tasks import sample_losses
from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, exact_logits, train_locally
from fedsir.config.training import TrainingConfig
from fedsir.lid import mean_lid
from fedsir.mixture import high_group
from fedsir.models.network import Network
from fedsir.objectives import cross_entropy, mixup, squared_distance
from fedsir.seeding import Stream


def noise_level(losses: NDArray[np.float64], seed: int) -> float:
    """Estimated noise level: share of losses (n,) in the component with the larger mean; 0 if all are equal."""
    return float(high_group(losses, seed).mean()) if len(losses) else 0.0


def highest_losses(losses: NDArray[np.float64], noise_level: float, ratio: float) -> NDArray[np.bool_]:
    """(n,) bool: the floor(n noise_level ratio) images of highest loss, earlier ones first among equals."""
    # noise_level is a count divided by n, so the product may fall short of an integer by rounding.
    count = int(len(losses) * noise_level * ratio + 1e-9)
    chosen = np.zeros(len(losses), dtype=np.bool_)
    chosen[np.argsort(-losses, kind="stable")[:count]] = True
    return chosen


def confident_labels(
    labels: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    threshold: float,
    candidates: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Labels (n,) int64: the predicted class where its probability exceeds `threshold`, else as they were.

    probabilities: (n, C). candidates: (n,) bool, images that may change; None: all.
    """
    changes = probabilities.max(axis=1) > threshold
    if candidates is not None:
        changes &= candidates
    return np.where(changes, probabilities.argmax(axis=1), labels).astype(np.int64)


class MixedProximal:
    """Mixup cross entropy plus `prox` times the distance ||theta - received||_2 over all parameters.

    Belongs to one training on one client: it draws from `rng`, and its first call keeps the parameters it is shown
    as the received ones. The norm is not squared (the official code); it has no gradient at 0, so the term is left
    out of the first batch, and later as long as no step has been taken.
    """

    def __init__(self, mixup_alpha: float, prox: float, rng: np.random.Generator) -> None:
        self._alpha = mixup_alpha
        self._prox = prox
        self._rng = rng
        self._received: list[Tensor] | None = None

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        loss = self._cross_entropy(network, batch)
        if self._prox == 0.0:
            return loss
        if self._received is None:
            self._received = [p.detach().clone() for p in network.parameters()]
            return loss
        squared = squared_distance(network.parameters(), self._received)
        return loss + self._prox * squared.sqrt() if float(squared.detach()) > 0.0 else loss

    def _cross_entropy(self, network: Network, batch: Batch) -> Tensor:
        if self._alpha == 0.0:
            return cross_entropy(network(batch.images), batch.labels)
        share = float(self._rng.beta(self._alpha, self._alpha))
        order = torch.from_numpy(self._rng.permutation(len(batch.labels))).to(batch.labels.device)
        images, labels, partners = mixup(batch.images, batch.labels, share, order)
        logits = network(images)
        return share * cross_entropy(logits, labels) + (1.0 - share) * cross_entropy(logits, partners)


@dataclass(frozen=True)
class MixupTraining:
    """Train from broadcast `weights` under `labels` (n,) int64 by `MixedProximal`.

    mixup_alpha: Beta(alpha, alpha) of the blending share, 0 for none. prox: factor of the distance to the received
    parameters (beta mu_k in stage 1).
    """

    labels: NDArray[np.int64]
    budget: TrainingConfig
    mixup_alpha: float
    prox: float = 0.0

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        objective = MixedProximal(self.mixup_alpha, self.prox, client.generator(Stream.METHOD))
        recipe = Recipe.within(self.budget, objective)
        return ClientResult(train_locally(client, broadcast["weights"], self.labels, recipe))


@dataclass(frozen=True)
class MeasuredUpdate(LocalUpdate):
    """A local update with the mean LID of the trained model's predictions; NaN where it is undefined."""

    lid: float


@dataclass(frozen=True)
class TrainAndMeasure:
    """Local training, then one pass of the trained model: mean LID to the server, losses (n,) float64 stay.

    neighbours: k of the LID. bounded: losses are cross entropies of softmax outputs.
    """

    training: MixupTraining
    neighbours: int
    bounded: bool

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[MeasuredUpdate]:
        update = self.training(client, broadcast).update
        logits = exact_logits(client, update.weights)
        losses = sample_losses(logits, self.training.labels, self.bounded)
        dimension = mean_lid(torch.softmax(logits, dim=1).numpy(), self.neighbours)
        return ClientResult(MeasuredUpdate(**vars(update), lid=dimension), state=losses)


@dataclass(frozen=True)
class CorrectNoisiest:
    """Stage 1 at a noisy client: estimate the noise level from `losses` (n,), correct the noisiest labels.

    Candidates are the highest losses, `ratio` of the estimated number of wrong labels; those on which the broadcast
    `weights` are more certain than `threshold` take the predicted label. Uploads the noise level; labels stay.
    """

    labels: NDArray[np.int64]
    losses: NDArray[np.float64]
    ratio: float
    threshold: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[float]:
        level = noise_level(self.losses, int(client.generator(Stream.IDENTIFICATION).integers(2**32)))
        candidates = highest_losses(self.losses, level, self.ratio)
        probabilities = torch.softmax(exact_logits(client, broadcast["weights"]), dim=1).numpy()
        return ClientResult(level, state=confident_labels(self.labels, probabilities, self.threshold, candidates))


@dataclass(frozen=True)
class CorrectAll:
    """End of stage 2 at a noisy client: every label on which broadcast `weights` are certain enough; labels stay."""

    labels: NDArray[np.int64]
    threshold: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[None]:
        probabilities = torch.softmax(exact_logits(client, broadcast["weights"]), dim=1).numpy()
        return ClientResult(None, state=confident_labels(self.labels, probabilities, self.threshold))
