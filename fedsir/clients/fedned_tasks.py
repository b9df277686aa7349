"""Work of FedNed: two models of an extremely noisy client, and negative distillation on the server (Lu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import (
    LocalUpdate,
    Recipe,
    forward,
    forward_pass,
    reset_optimizer,
    take_step,
    train_locally,
)
from fedsir.config.training import OptimizerConfig
from fedsir.data.transforms import normalize
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network

Inverse = Literal["neg_logits", "reciprocal"]
_SMALLEST_LOGIT = 1e-12


def pseudo_labels(logits: Tensor, temperature: float, threshold: float) -> tuple[Tensor, Tensor]:
    """argmax (n,) int64 of softmax(z / T), and (n,) bool where its probability reaches `threshold`."""
    confidence, labels = torch.softmax(logits / temperature, dim=1).max(dim=1)
    return labels, confidence >= threshold


def inverse_distribution(logits: Tensor, temperature: float, inverse: Inverse) -> Tensor:
    """Probabilities (..., C) that are high where a bad teacher's logits (..., C) are low.

    neg_logits: softmax(-z / T). reciprocal: softmax(1 / z), the official code; it breaks the order of classes where
    logits differ in sign. (The code also divides by T, which only scales the gradient.)
    """
    if inverse == "neg_logits":
        return torch.softmax(-logits / temperature, dim=-1)
    away_from_zero = torch.where(logits.abs() < _SMALLEST_LOGIT, _SMALLEST_LOGIT, logits)
    return torch.softmax(1.0 / away_from_zero, dim=-1)


def negative_distillation(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Batch mean of (1 / E) sum_e KL(g_e || softmax(z / T)) for logits (b, C) and inverse targets g (b, E, C)."""
    log_student = F.log_softmax(logits.float() / temperature, dim=1)[:, None].expand_as(targets)
    return F.kl_div(log_student, targets, reduction="none").sum(dim=2).mean()


@dataclass(frozen=True)
class ConfidentCrossEntropy:
    """mean_i m_i CE(z_i, t_i): cross entropy on images whose extra `accepted` (b,) bool says so, over all b.

    A batch without any changes nothing. It must not reach the network at all: batch statistics would move, and
    Adam's coupled weight decay makes full steps when the gradient is otherwise zero.
    """

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        accepted = batch.extras["accepted"]
        if not bool(accepted.any()):
            return torch.zeros((), device=batch.images.device, requires_grad=True)
        losses = F.cross_entropy(network(batch.images), batch.labels, reduction="none")
        return (losses * accepted).mean()


@dataclass(frozen=True)
class TwoModelUpdate(LocalUpdate):
    """The model trained on pseudo-labels, and in `noisy` the one trained on the observed labels."""

    noisy: LocalUpdate


@dataclass(frozen=True)
class TrainTwice:
    """An extremely noisy client: train from broadcast `weights` on pseudo-labels, and again on `labels` (n,) int64.

    Pseudo-labels are predictions of the received model on the plain images (the paper), at `temperature`, kept
    where they reach `threshold`. Both models start from the received one.
    """

    labels: NDArray[np.int64]
    recipe: Recipe
    temperature: float
    threshold: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[TwoModelUpdate]:
        weights: FlatWeights = broadcast["weights"]
        client.runtime.binding.load(weights)
        predicted, accepted = pseudo_labels(forward_pass(client, "logits"), self.temperature, self.threshold)
        confident = replace(self.recipe, objective=ConfidentCrossEntropy(), extras={"accepted": accepted.cpu().numpy()})
        good = train_locally(client, weights, predicted.cpu().numpy(), confident)
        noisy = train_locally(client, weights, self.labels, self.recipe)
        return ClientResult(TwoModelUpdate(**vars(good), noisy=noisy))


@dataclass(frozen=True)
class DistilledNegative:
    """`negative_distillation` on batches whose extra `targets` (b, E, C) holds the inverted bad teachers."""

    temperature: float

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return negative_distillation(network(batch.images), batch.extras["targets"], self.temperature)


@dataclass(frozen=True)
class DistilNegatively:
    """Server side: push broadcast `weights` away from bad teachers on the public pool; no client's data is used.

    teachers: E models. batches: positions (B,) in the pool, one array a step. Steps with a non-finite loss are
    skipped. Batch norm stays in eval mode: the running statistics are those the clients have agreed on.
    """

    teachers: tuple[FlatWeights, ...]
    batches: tuple[NDArray[np.int64], ...]
    temperature: float
    inverse: Inverse
    optimizer: OptimizerConfig

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[FlatWeights]:
        runtime = client.runtime
        used = np.unique(np.concatenate(self.batches))
        with client.timing_data():
            pool = runtime.pool_images(0, len(runtime.setup.public_pool))
            images = pool[torch.from_numpy(used).to(pool.device)]
        targets = torch.stack([self._targets(client, teacher, images) for teacher in self.teachers], dim=1)
        runtime.binding.load(broadcast["weights"])
        reset_optimizer(runtime.optimizer, self.optimizer)
        runtime.module.objective = DistilledNegative(self.temperature)
        runtime.module.eval()
        no_labels = torch.empty(0, dtype=torch.int64, device=runtime.device)
        for index, positions in enumerate(self.batches):
            where = torch.from_numpy(np.searchsorted(used, positions)).to(runtime.device)
            batch = Batch(normalize(images[where], runtime.setup.transform), no_labels, {"targets": targets[where]})
            take_step(client, batch, index)
        return ClientResult(runtime.binding.read())

    def _targets(self, client: Client, teacher: FlatWeights, images: Tensor) -> Tensor:
        """Inverted predictions (n, C) of one bad teacher."""
        client.runtime.binding.load(teacher)
        return inverse_distribution(forward(client, images, "logits"), self.temperature, self.inverse)
