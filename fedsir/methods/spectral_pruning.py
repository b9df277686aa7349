"""Spectral pruning: identify as OCT-FedSIR does, then FedAvg over the predicted-clean clients.

The published code trains the pruned federation on true labels; here every method sees observed labels only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedsir.clients.objective import CrossEntropy
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import averaged_round, la_objective, local_training, participants
from fedsir.methods.registry import MethodEntry
from fedsir.methods.stage_one import IdentifyingConfig, identify_clients, stage_one_cost


class SpectralPruningConfig(IdentifyingConfig):
    """Settings of spectral pruning; stage I is OCT-FedSIR's, with logit adjustment and balanced features."""

    name: Literal["spectral_pruning"] = "spectral_pruning"


class SpectralPruning:
    """After stage I the images of predicted-noisy clients are never touched again."""

    state_type = MethodState

    def __init__(self, config: SpectralPruningConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> MethodState:
        """Stage I; training then starts from the shared initial state."""
        outcome = identify_clients(
            server, self.config.stage_one, self.config.identification, lambda k: la_objective(server, k)
        )
        return MethodState(weights=server.initial_weights, identification=outcome.verdict)

    def round(self, server: Server, state: MethodState, t: int) -> MethodState:
        """One round of FedAvg over the predicted-clean clients."""
        if state.identification is None:
            raise ValueError("the state has no identification")
        observed = server.federation.observed
        kept = np.flatnonzero(state.identification.clean).tolist()
        tasks = {k: local_training(server, observed[k], CrossEntropy()) for k in participants(server, t, kept)}
        return replace(state, weights=averaged_round(server, tasks, t, state.weights))


def cost(config: SpectralPruningConfig, scale: Scale) -> Cost:
    """Stage I everywhere, then clean clients alone."""
    before = stage_one_cost(config.stage_one, scale)
    return Cost(before.trained + scale.clean * scale.passes, before.forwarded)


METHOD = MethodEntry(
    config=SpectralPruningConfig,
    build=SpectralPruning,
    summary="FedAvg over the clients that OCT-FedSIR's identification takes for clean",
    source="OCT-FedSIR, arXiv 2609.14734 (baseline)",
    presets={"equal_steps": {"stage_one": {"length": "steps"}}},
    cost=cost,
    partial_participation=True,
)
