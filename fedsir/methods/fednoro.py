"""FedNoRo: noisy clients stand out by the warmed-up model's class losses; then distillation and distance-aware
averaging hold back their labels (Wu et al. 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from fedsir.clients.objective import Distilled
from fedsir.clients.tasks import LocalTraining
from fedsir.config.base import Fraction, PositiveFloat
from fedsir.config.method import MethodConfig
from fedsir.methods.aggregate import DistanceAwareMean
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import fold_round, la_objective, local_training, stage_rounds
from fedsir.methods.loss_detection import (
    LossDetection,
    detect_noisy_clients,
    taken_for_clean,
    training_clients,
    training_passes,
)
from fedsir.methods.registry import MethodEntry
from fedsir.objectives import exp_ramp


class FedNoRoConfig(MethodConfig):
    """Settings of FedNoRo; rounds are shares of the budget, at 100 rounds the official 10, 10 and 49."""

    name: Literal["fednoro"] = "fednoro"
    warmup: Fraction = Field(default=0.1, description="share of the rounds before detection (s1)")
    detection: LossDetection = LossDetection()
    kd_weight: Fraction = Field(default=0.8, description="a, weight of the teacher after the ramp")
    ramp_begin: Fraction = Field(default=0.1, description="share of the rounds at which the teacher's weight starts")
    ramp_end: Fraction = Field(default=0.49, description="share of the rounds at which it is reached")
    teacher_temperature: PositiveFloat = 0.8
    distance_buffers: bool = Field(default=True, description="running statistics count as distance")

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> FedNoRoConfig:
        if self.ramp_begin >= self.ramp_end:
            raise ValueError(f"ramp_end must be above ramp_begin, got {self.ramp_end} and {self.ramp_begin}")
        return self

    def teacher_weight(self, t: int, rounds: int) -> float:
        """w(t) = a * exp_ramp(t; begin, end)."""
        begin = stage_rounds(self.ramp_begin, rounds)
        return self.kd_weight * exp_ramp(t, begin, max(begin + 1, stage_rounds(self.ramp_end, rounds)))


class FedNoRo:
    """Warm-up by logit-adjusted FedAvg, one detection, then noise-robust training of the predicted-noisy clients."""

    state_type = MethodState

    def __init__(self, config: FedNoRoConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> MethodState:
        return MethodState(weights=server.initial_weights)

    def round(self, server: Server, state: MethodState, t: int) -> MethodState:
        config = self.config
        if t == stage_rounds(config.warmup, server.training.rounds):
            state = replace(state, identification=detect_noisy_clients(server, state.weights, t, config.detection))
        clean = taken_for_clean(server, state)
        tasks = {k: self._local_task(server, k, bool(clean[k]), t) for k in training_clients(server, state, t)}
        # Without a noisy client, and so during the warm-up, this is FedAvg.
        mean = DistanceAwareMean(server, tasks, clean, config.distance_buffers)
        fold_round(server, tasks, t, {"weights": state.weights}, mean)
        return replace(state, weights=mean.result(state.weights))

    def _local_task(self, server: Server, k: int, clean: bool, t: int) -> LocalTraining:
        """LA-CE for a clean client; w KL(p_T || p_S) + (1 - w) LA-CE for a noisy one, the global model as teacher."""
        labels, hard = server.federation.observed[k], la_objective(server, k)
        if clean:
            return local_training(server, labels, hard)
        weight = self.config.teacher_weight(t, server.training.rounds)
        # The student is adjusted like its hard loss and has temperature 1.
        distilled = Distilled(hard.prior, weight, self.config.teacher_temperature, 1.0)
        return local_training(server, labels, distilled, teacher_logits=True)


def cost(config: FedNoRoConfig, scale: Scale) -> Cost:
    """Everybody trains in the warm-up and predicts once for the detection; noisy clients have a teacher in each epoch
    that follows."""
    rounds, epochs = scale.training.rounds, scale.training.local_epochs
    following = max(0, rounds - stage_rounds(config.warmup, rounds))
    taught = scale.share * following * epochs
    return Cost(training_passes(scale, following), (1.0 + (1.0 - scale.clean) * taught) if following else 0.0)


METHOD = MethodEntry(
    config=FedNoRoConfig,
    build=FedNoRo,
    summary="noisy clients by class losses, distillation from the global model, distance-aware averaging",
    source="Wu et al., IJCAI 2023, arXiv 2305.05230",
    cost=cost,
    partial_participation=True,
)
