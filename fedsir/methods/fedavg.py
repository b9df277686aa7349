"""FedAvg: sample-weighted mean of locally trained models, no noise handling (methods section 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedsir.clients.objective import CrossEntropy
from fedsir.clients.tasks import LocalTraining
from fedsir.clients.training import Recipe
from fedsir.config.method import MethodConfig
from fedsir.methods.aggregate import average
from fedsir.methods.base import MethodState, Server
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
        budget = server.training
        recipe = Recipe(CrossEntropy(), budget.local_epochs, budget.batch_size, budget.optimizer)
        tasks = {k: LocalTraining(labels, recipe) for k, labels in enumerate(server.federation.observed)}
        results = server.run_clients(tasks, t, {"weights": state.weights})
        return replace(state, weights=average(server, {k: r.update for k, r in results.items()}, state.weights))


METHOD = MethodEntry(
    config=FedAvgConfig,
    build=lambda config: FedAvg(),  # noqa: ARG005 - nothing to set
    summary="sample-weighted averaging, no noise handling",
    source="McMahan et al., AISTATS 2017",
)
