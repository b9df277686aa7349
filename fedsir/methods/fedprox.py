"""FedProx: FedAvg with a quadratic pull of local weights towards the received ones (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsir.clients.module import Batch
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.clients.training import LocalUpdate, Recipe, train_locally
from fedsir.config.base import NonNegativeFloat
from fedsir.config.method import MethodConfig
from fedsir.config.training import TrainingConfig
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import training_alone
from fedsir.methods.local import averaged_round, participants
from fedsir.methods.registry import MethodEntry
from fedsir.models.network import Network
from fedsir.objectives import cross_entropy, squared_distance


class FedProxConfig(MethodConfig):
    """mu: strength of the pull; 0 is FedAvg to the bit.

    0.2 is the value of FedSIR's authors; FNBench uses 0.1, the original paper a grid from 0.001 to 1.
    """

    name: Literal["fedprox"] = "fedprox"
    mu: NonNegativeFloat = 0.2


@dataclass(frozen=True)
class Proximal:
    """Cross entropy + mu / 2 * sum over trainable tensors of ||theta_k - theta||^2; buffers do not count.

    reference: the received parameters, in the order of `Network.parameters`, detached.
    """

    mu: float
    reference: Sequence[Tensor]

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        pull = squared_distance(list(network.parameters()), self.reference)
        return cross_entropy(network(batch.images), batch.labels) + 0.5 * self.mu * pull


@dataclass(frozen=True)
class ProximalTraining:
    """Train from broadcast `weights` under `labels` (n,) int64, held back towards these weights."""

    labels: NDArray[np.int64]
    budget: TrainingConfig
    mu: float

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        runtime = client.runtime
        runtime.binding.load(broadcast["weights"])
        # Copies, since the parameters themselves move with every step.
        reference = [p.detach().clone() for p in runtime.network.parameters()]
        recipe = Recipe.within(self.budget, Proximal(self.mu, reference))
        return ClientResult(train_locally(client, broadcast["weights"], self.labels, recipe))


class FedProx:
    """Every client trains with the proximal term; the server averages."""

    state_type = MethodState

    def __init__(self, config: FedProxConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> MethodState:
        return MethodState(weights=server.initial_weights)

    def round(self, server: Server, state: MethodState, t: int) -> MethodState:
        observed = server.federation.observed
        tasks = {k: ProximalTraining(observed[k], server.training, self.config.mu) for k in participants(server, t)}
        return replace(state, weights=averaged_round(server, tasks, t, state.weights))


METHOD = MethodEntry(
    config=FedProxConfig,
    build=FedProx,
    summary="FedAvg with a proximal term that holds local weights near the received ones",
    source="Li et al., MLSys 2020, arXiv 1812.06127",
    cost=training_alone,
    partial_participation=True,
)
