"""FedELC: FedNoRo's warm-up and detection, then the predicted-noisy clients learn their labels end to end
(Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsir.clients.label_learning import LabelLearningSettings, LearnLabels, initial_label_logits
from fedsir.clients.tasks import ClientTask
from fedsir.clients.training import LocalUpdate
from fedsir.config.base import Fraction
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


class FedELCConfig(MethodConfig):
    """Settings of FedELC."""

    name: Literal["fedelc"] = "fedelc"
    warmup: Fraction = Field(default=0.17, description="share of the rounds before detection (T_w)")
    detection: LossDetection = LossDetection()
    label_learning: LabelLearningSettings = LabelLearningSettings()
    distance_buffers: bool = Field(default=True, description="running statistics count as distance")


@dataclass(frozen=True)
class FedELCState(MethodState):
    """label_logits: u (n_k, C) float32 of the predicted-noisy clients by client id; only the clients use them."""

    label_logits: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)


class FedELC:
    """Warm-up by logit-adjusted FedAvg, one detection, then label correction at the predicted-noisy clients."""

    state_type = FedELCState

    def __init__(self, config: FedELCConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> FedELCState:
        return FedELCState(weights=server.initial_weights)

    def round(self, server: Server, state: FedELCState, t: int) -> FedELCState:
        config = self.config
        if t == stage_rounds(config.warmup, server.training.rounds):
            state = self._detect(server, state, t)
        clean = taken_for_clean(server, state)
        tasks = {k: self._local_task(server, state, k) for k in training_clients(server, state, t)}
        # Without a noisy client, and so during the warm-up, this is FedAvg.
        mean = DistanceAwareMean(server, tasks, clean, config.distance_buffers)
        kept = fold_round(server, tasks, t, {"weights": state.weights}, mean)
        learnt = {k: kept.get(k, before) for k, before in state.label_logits.items()}
        return _report_labels(server, replace(state, weights=mean.result(state.weights), label_logits=learnt), t)

    def _detect(self, server: Server, state: FedELCState, t: int) -> FedELCState:
        """Verdict by the model that enters round t; predicted-noisy clients start from their observed labels."""
        verdict = detect_noisy_clients(server, state.weights, t, self.config.detection)
        federation, scale = server.federation, self.config.label_learning.scale
        label_logits = {
            k: initial_label_logits(federation.observed[k], federation.num_classes, scale)
            for k in np.flatnonzero(~verdict.clean).tolist()
        }
        return replace(state, identification=verdict, labels=federation.observed, label_logits=label_logits)

    def _local_task(self, server: Server, state: FedELCState, k: int) -> ClientTask[LocalUpdate]:
        """Label learning for a predicted-noisy client, LA-CE for everybody else."""
        observed = server.federation.observed[k]
        if k not in state.label_logits:
            return local_training(server, observed, la_objective(server, k))
        return LearnLabels(observed, state.label_logits[k], server.training, self.config.label_learning)


def _report_labels(server: Server, state: FedELCState, t: int) -> FedELCState:
    """Current labels, argmax of u, as the method's labels from the next round on, if one has changed."""
    before = state.labels or server.federation.observed
    labels = tuple(
        state.label_logits[k].argmax(axis=1).astype(np.int64) if k in state.label_logits else y
        for k, y in enumerate(before)
    )
    if all(np.array_equal(new, old) for new, old in zip(labels, before, strict=True)):
        return state
    return state.relabeled(t + 1, labels)


def cost(config: FedELCConfig, scale: Scale) -> Cost:
    """Everybody trains in the warm-up and predicts once for the detection; noisy clients predict after each of the
    rounds that follow."""
    rounds = scale.training.rounds
    following = max(0, rounds - stage_rounds(config.warmup, rounds))
    return Cost(
        training_passes(scale, following), (1.0 + (1.0 - scale.clean) * scale.share * following) if following else 0.0
    )


METHOD = MethodEntry(
    config=FedELCConfig,
    build=FedELC,
    summary="noisy clients by class losses learn a label distribution per image, distance-aware averaging",
    source="Jiang et al., CIKM 2024, arXiv 2408.04301",
    cost=cost,
    partial_participation=True,
)
