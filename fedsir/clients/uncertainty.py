"""Predictive uncertainty of a model by Monte Carlo dropout on its penultimate features (FedNed)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import forward
from fedsir.models.flat import FlatWeights
from fedsir.models.network import Network
from fedsir.objectives import entropy
from fedsir.seeding import Stream, generator


@torch.no_grad()
def mc_dropout_entropy(
    network: Network, features: Tensor, draws: int, rate: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(n,) float64 entropy in nats of the mean prediction over `draws` random thinnings of `features` (n, d).

    Each draw zeroes entries with probability `rate`, scales the rest by 1 / (1 - rate) and applies the head; the
    backbone has run once. `network` must be in eval mode, where its own dropout does nothing. Masks come from
    NumPy, so that they do not depend on the device.
    """
    total: Tensor | float = 0.0
    for _ in range(draws):
        kept = torch.from_numpy(rng.random(tuple(features.shape), dtype=np.float32) >= rate).to(features.device)
        logits = network.logits(features * kept / (1.0 - rate))
        total = total + torch.softmax(logits.double(), dim=1)
    mean = torch.as_tensor(total) / draws
    return entropy(mean).cpu().numpy()


@dataclass(frozen=True)
class PoolUncertainty:
    """Summed entropy of `weights` on images of the public pool, by Monte Carlo dropout; no client's data is used.

    positions: (B,) within the pool. The masks depend on the round alone: every model of a round is judged on the
    same images under the same masks.
    """

    weights: FlatWeights
    positions: NDArray[np.int64]
    draws: int
    rate: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[float]:  # noqa: ARG002 - nothing shared
        runtime = client.runtime
        runtime.binding.load(self.weights)
        with client.timing_data():
            pool = runtime.pool_images(0, len(runtime.setup.public_pool))
            images = pool[torch.from_numpy(self.positions.copy()).to(pool.device)]
        features = forward(client, images, "features")
        rng = generator(runtime.setup.seed, Stream.DROPOUT, client.round)
        return ClientResult(float(mc_dropout_entropy(runtime.network, features, self.draws, self.rate, rng).sum()))
