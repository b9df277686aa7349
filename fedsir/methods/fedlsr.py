"""FedLSR: local self-regularization by two views of every image; the server only averages (Jiang et al. 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedsir.clients.two_views import SelfRegularization, TwoViewTraining
from fedsir.config.base import Fraction, NonNegativeFloat
from fedsir.config.method import MethodConfig
from fedsir.data.views import ViewSettings
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import STEP_FORWARDS, Cost, Scale
from fedsir.methods.local import averaged_round, participants, stage_rounds
from fedsir.methods.registry import MethodEntry
from fedsir.objectives import linear_ramp


class FedLSRConfig(MethodConfig):
    """Settings of FedLSR; the defaults are the official notebook's, with its losses as coded."""

    name: Literal["fedlsr"] = "fedlsr"
    losses: SelfRegularization = SelfRegularization()
    gamma: NonNegativeFloat = Field(default=0.4, description="weight of the consistency term after the ramp")
    ramp: Fraction = Field(default=0.2, description="share of the rounds over which that weight grows from 0")
    view: ViewSettings = ViewSettings()


class FedLSR:
    """Every client trains on two views under its observed labels; the server averages."""

    state_type = MethodState

    def __init__(self, config: FedLSRConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> MethodState:
        return MethodState(weights=server.initial_weights)

    def round(self, server: Server, state: MethodState, t: int) -> MethodState:
        config, observed = self.config, server.federation.observed
        weight = config.gamma * linear_ramp(t, stage_rounds(config.ramp, server.training.rounds))
        tasks = {
            k: TwoViewTraining(observed[k], server.training, config.losses, config.view, weight)
            for k in participants(server, t)
        }
        return replace(state, weights=averaged_round(server, tasks, t, state.weights))


def cost(config: FedLSRConfig, scale: Scale) -> Cost:  # noqa: ARG001 - settings change no work
    """The second view is a second forward and backward pass."""
    return Cost(scale.passes, STEP_FORWARDS * scale.passes)


METHOD = MethodEntry(
    config=FedLSRConfig,
    build=FedLSR,
    summary="two views of every image, mixed and sharpened predictions, consistency and entropy terms",
    source="Jiang et al., CIKM 2022",
    cost=cost,
    partial_participation=True,
)
