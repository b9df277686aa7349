"""FedAvg: sample-weighted mean of locally trained models, no noise handling (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedsir.clients.objective import CrossEntropy
from fedsir.config.method import MethodConfig
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import training_alone
from fedsir.methods.local import averaged_round, local_training, participants
from fedsir.methods.registry import MethodEntry


class FedAvgConfig(MethodConfig):
    """FedAvg has no settings of its own."""

    name: Literal["fedavg"] = "fedavg"


class FedAvg:
    """Every client trains by cross entropy on its observed labels; the server averages."""

    state_type = MethodState

    def begin(self, server: Server) -> MethodState:
        return MethodState(weights=server.initial_weights)

    def round(self, server: Server, state: MethodState, t: int) -> MethodState:
        observed = server.federation.observed
        tasks = {k: local_training(server, observed[k], CrossEntropy()) for k in participants(server, t)}
        return replace(state, weights=averaged_round(server, tasks, t, state.weights))


METHOD = MethodEntry(
    config=FedAvgConfig,
    build=lambda config: FedAvg(),  # noqa: ARG005 - nothing to set
    summary="sample-weighted averaging, no noise handling",
    source="McMahan et al., AISTATS 2017",
    cost=training_alone,
    partial_participation=True,
)
