"""Knowledge exchange over the public pool: predictions on it, and training to match those of others (RHFL)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.training import FORWARD_BATCH, batch_slices, forward, reset_optimizer, slices_of, take_step
from fedsir.config.training import OptimizerConfig
from fedsir.data.transforms import normalize
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network
from fedsir.seeding import Stream


@dataclass(frozen=True)
class Peers:
    """Whom to match on the public pool.

    predictions: (J, P, C) float32 probabilities of J models on the P images. shares: (J,) float64 their weights.
    """

    predictions: NDArray[np.float32]
    shares: NDArray[np.float64]

    def without(self, positions: NDArray[np.bool_]) -> Peers:
        """The peers but those at `positions` (J,) bool; the shares of the others stay what they are."""
        return Peers(self.predictions[~positions], self.shares[~positions])


def matching_loss(logits: Tensor, peers: Tensor, shares: Tensor) -> Tensor:
    """Batch mean of sum_j w_j KL(p_j || softmax(z)) (RHFL, L_KA) for logits (b, C), peers (b, J, C), shares (J,)."""
    log_student = F.log_softmax(logits.float(), dim=1)[:, None].expand_as(peers)
    divergences = F.kl_div(log_student, peers, reduction="none").sum(dim=2)
    return (divergences * shares).sum(dim=1).mean()


@dataclass(frozen=True)
class MatchPeers:
    """`matching_loss` on batches whose extra `peers` (b, J, C) holds the others' predictions."""

    shares: Tensor

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return matching_loss(network(batch.images), batch.extras["peers"], self.shares)


def public_predictions(client: Client, weights: FlatWeights) -> NDArray[np.float32]:
    """Probabilities (P, C) float32 of `weights` on the public pool, in eval mode."""
    client.runtime.binding.load(weights)
    chunks = []
    for start, stop in slices_of(len(client.runtime.setup.public_pool), FORWARD_BATCH):
        with client.timing_data():
            images = client.runtime.pool_images(start, stop)
        client.work.forwarded += stop - start
        chunks.append(forward(client, images, "logits").softmax(dim=1).cpu().numpy())
    return np.concatenate(chunks)


def match_peers(
    client: Client, weights: FlatWeights, peers: Peers, batch_size: int, optimizer: OptimizerConfig
) -> FlatWeights:
    """One epoch over the public pool that draws `weights` towards the peers' predictions.

    One fresh optimizer for the epoch. The predictions are those of the plain images, so the images are not
    augmented here either. Their order comes from the client's METHOD stream. Batches whose loss is not finite
    are skipped. Without a peer the weights stay what they are.
    """
    if len(peers.shares) == 0:
        return weights
    runtime = client.runtime
    pool = len(runtime.setup.public_pool)
    order = client.generator(Stream.METHOD).permutation(pool)
    with client.timing_data():
        images = runtime.pool_images(0, pool)
    predictions = torch.from_numpy(np.swapaxes(peers.predictions, 0, 1).copy()).to(runtime.device)
    runtime.binding.load(weights)
    reset_optimizer(runtime.optimizer, optimizer)
    runtime.module.objective = MatchPeers(torch.from_numpy(peers.shares.astype(np.float32)).to(runtime.device))
    runtime.module.train()
    no_labels = torch.empty(0, dtype=torch.int64, device=runtime.device)
    for index, part in enumerate(batch_slices(pool, batch_size)):
        where = torch.from_numpy(order[part]).to(runtime.device)
        batch = Batch(normalize(images[where], runtime.setup.transform), no_labels, {"peers": predictions[where]})
        # A step of training costs three forward passes; the images are not the client's, so no epoch is counted.
        client.work.forwarded += 3 * len(where)
        take_step(client, batch, index)
    return runtime.binding.read()
