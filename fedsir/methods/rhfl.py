"""RHFL: private models, symmetric cross entropy and knowledge exchange on public images (Fang and Ye 2022).

Three modes. `private` is the published method: every client keeps its own model, no parameters are exchanged, and
the score is the mean over the client models (`MethodState.weights` stays the shared initial state). `hybrid` trains
the same way and averages the private models after each round, for evaluation only. `averaged` starts every client
from the global model and weighs clients by confidence in the average, which gives a model that can be deployed.

The public images are the federation's pool, set aside from the training images; other data sets or noise images as
the pool are out of scope. Without a pool, or with one client, clients of the private modes learn alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsir.aggregation import is_finite
from fedsir.clients.alignment import Peers
from fedsir.clients.rhfl_tasks import (
    AlignGlobal,
    AveragedTraining,
    PrivateTraining,
    Report,
    SymmetricCE,
    SymmetricObjective,
)
from fedsir.clients.training import LocalUpdate
from fedsir.config.base import Fraction, NonNegativeFloat
from fedsir.config.method import MethodConfig
from fedsir.methods.aggregate import average
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import STEP_FORWARDS, Cost, Scale
from fedsir.methods.local import recipe, stage_rounds
from fedsir.methods.registry import MethodEntry
from fedsir.models.flat import FlatWeights

QualityNorm = Literal["abs", "signed"]


class RHFLConfig(MethodConfig):
    """Settings of RHFL."""

    name: Literal["rhfl"] = "rhfl"
    mode: Literal["private", "hybrid", "averaged"] = "private"
    sce: SymmetricCE = SymmetricCE()
    eta: NonNegativeFloat = Field(default=0.5, description="how far confidences follow the fall of the losses")
    quality_norm: QualityNorm = Field(
        default="abs", description="qualities are divided by the sum of their absolute values, or by their plain sum"
    )
    pretrain: Fraction = Field(
        default=0.5, description="share of the rounds before the exchange begins; modes private and hybrid"
    )
    align_global: bool = Field(
        default=False, description="mode averaged: match the global model to the clients' mean public prediction"
    )

    @model_validator(mode="after")
    def _global_model_to_align(self) -> RHFLConfig:
        if self.align_global and self.mode != "averaged":
            raise ValueError(f"align_global needs mode averaged, since mode {self.mode} trains no global model")
        return self


def client_confidence(
    previous: NDArray[np.float64] | None, current: NDArray[np.float64], eta: float, quality_norm: QualityNorm = "abs"
) -> NDArray[np.float64]:
    """Weights w (K,) of the clients from their mean losses (K,) a round ago and now (RHFL, CCR).

    F_k = (previous - current) / current, u_k = 1 / (K - 1) + eta F_k / sum |F|, w = softmax(u). Without previous
    losses w_k = 1 / (K - 1). The published code divides by sum F (`signed`), which turns all signs around where
    it is negative. An undefined F_k counts as 0. A single client has weight 1.
    """
    clients = len(current)
    if clients == 1:
        return np.ones(1)
    base = 1.0 / (clients - 1)
    if previous is None:
        return np.full(clients, base)
    with np.errstate(divide="ignore", invalid="ignore"):
        quality = (previous - current) / current
    quality = np.where(np.isfinite(quality), quality, 0.0)
    total = float(np.abs(quality).sum() if quality_norm == "abs" else quality.sum())
    evidence = base + (eta * quality / total if total != 0.0 else np.zeros(clients))
    raised = np.exp(evidence - evidence.max())
    return np.asarray(raised / raised.sum(), dtype=np.float64)


@dataclass(frozen=True)
class RHFLState(MethodState):
    """losses: (K,) float64 mean losses at the last report, None before the first. private_models: the clients'
    models of mode hybrid, where `weights` is evaluated and not they (mode private: `client_models`)."""

    losses: NDArray[np.float64] | None = field(default=None, kw_only=True)
    private_models: tuple[FlatWeights, ...] | None = field(default=None, kw_only=True)


class RHFL:
    """The algorithm in its three modes."""

    state_type = RHFLState

    def __init__(self, config: RHFLConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> RHFLState:
        weights, mode = server.initial_weights, self.config.mode
        pool, clients = len(server.federation.public_pool), server.federation.num_clients
        if pool == 0 and (mode != "averaged" or self.config.align_global):
            server.note("there is no public pool (federation.public_pool), so RHFL exchanges no knowledge")
        elif clients == 1 and mode != "averaged":
            server.note("a single client has no peers, so RHFL exchanges no knowledge")
        if mode == "private":
            server.note(
                "RHFL in mode private has no global model: its score is the mean over the client models, "
                "and no weights are saved"
            )
            return RHFLState(weights=weights, client_models=(weights,) * clients)
        if mode == "hybrid":
            return RHFLState(weights=weights, private_models=(weights,) * clients)
        return RHFLState(weights=weights)

    def round(self, server: Server, state: RHFLState, t: int) -> RHFLState:
        if state.client_models is not None:
            state, models, _, _ = self._private_round(server, state, state.client_models, t)
            return replace(state, client_models=models)
        if state.private_models is not None:
            state, models, updates, confidence = self._private_round(server, state, state.private_models, t)
            weights = average(server, updates, state.weights, confidence)
            return replace(state, private_models=models, weights=weights)
        return self._averaged_round(server, state, t)

    def _private_round(
        self, server: Server, state: RHFLState, models: tuple[FlatWeights, ...], t: int
    ) -> tuple[RHFLState, tuple[FlatWeights, ...], dict[int, LocalUpdate], NDArray[np.float64]]:
        """Confidence, alignment and private training: state, private models, updates and confidences after it."""
        observed = server.federation.observed
        confidence = client_confidence(None, np.zeros(len(models)), self.config.eta)
        exchange: dict[str, Any] = {}
        if self._exchanges(server, t):
            reports = server.run_clients(
                {k: Report(models[k], labels, self.config.sce) for k, labels in enumerate(observed)}, t, {}
            )
            losses = np.array([r.update.loss for r in reports.values()])
            confidence = client_confidence(state.losses, losses, self.config.eta, self.config.quality_norm)
            state = replace(state, losses=losses)
            exchange = _exchange({k: r.update.predictions for k, r in reports.items()}, confidence)
        local = recipe(server, SymmetricObjective(self.config.sce))
        tasks = {
            k: PrivateTraining(models[k], labels, local, upload=self.config.mode == "hybrid")
            for k, labels in enumerate(observed)
        }
        results = server.run_clients(tasks, t, exchange)
        kept = []
        for k, result in results.items():
            finite = is_finite(result.state)
            if not finite:
                server.note(f"the private model of client {k} became non-finite; the client keeps its last one")
            kept.append(result.state if finite else models[k])
        return state, tuple(kept), {k: r.update for k, r in results.items()}, confidence

    def _exchanges(self, server: Server, t: int) -> bool:
        share, federation = self.config.pretrain, server.federation
        alone = stage_rounds(share, server.training.rounds) if share > 0 else 0
        return t >= alone and len(federation.public_pool) > 0 and federation.num_clients > 1

    def _averaged_round(self, server: Server, state: RHFLState, t: int) -> RHFLState:
        """Local training from the global model; the average weighs clients by sample count times confidence."""
        config = self.config
        local = recipe(server, SymmetricObjective(config.sce))
        align = config.align_global and len(server.federation.public_pool) > 0
        tasks = {
            k: AveragedTraining(labels, local, config.sce, align) for k, labels in enumerate(server.federation.observed)
        }
        results = server.run_clients(tasks, t, {"weights": state.weights})
        updates = {k: r.update for k, r in results.items()}
        losses = np.array([u.loss for u in updates.values()])
        confidence = client_confidence(state.losses, losses, config.eta, config.quality_norm)
        weights = average(server, {k: u.training for k, u in updates.items()}, state.weights, confidence)
        if align:
            said = {k: u.predictions for k, u in updates.items() if u.predictions is not None}
            consensus = _consensus(_exchange(said, confidence)["peers"])
            aligned = server.spread([AlignGlobal(server.training)], t, {"weights": weights, "peers": consensus})[0]
            if is_finite(aligned):
                weights = aligned
            else:
                server.note("alignment gave non-finite weights; the average is kept")
        return replace(state, weights=weights, losses=losses)


def _exchange(predictions: dict[int, NDArray[np.float32]], confidence: NDArray[np.float64]) -> dict[str, Any]:
    """What clients get of each other; predictions that are not finite are left out."""
    ids = [k for k, p in predictions.items() if np.isfinite(p).all()]
    shape = (0, *next(iter(predictions.values())).shape)
    stacked = np.stack([predictions[k] for k in ids]) if ids else np.empty(shape, dtype=np.float32)
    return {"peers": Peers(stacked, confidence[ids]), "peer_ids": np.array(ids, dtype=np.int64)}


def _consensus(peers: Peers) -> Peers:
    """One peer that predicts the weighted mean; nobody where there is no peer."""
    if len(peers.shares) == 0:
        return peers
    share = peers.shares / peers.shares.sum()
    mean = (share[:, None, None] * peers.predictions).sum(axis=0)
    return Peers(mean[None].astype(np.float32), np.ones(1))


def cost(config: RHFLConfig, scale: Scale) -> Cost:
    """With an exchange a pass for the loss, and on the public pool predictions and an epoch; private models are
    evaluated one by one."""
    rounds, pool = scale.training.rounds, scale.pool_share
    if config.mode == "averaged":
        # The global model is aligned once, on the server.
        align = pool * (1.0 + STEP_FORWARDS / scale.clients) if config.align_global else 0.0
        return Cost(scale.passes, rounds * (1.0 + align))
    alone = stage_rounds(config.pretrain, rounds) if config.pretrain > 0 else 0
    exchanges = max(0, rounds - alone) if scale.pool > 0 and scale.clients > 1 else 0
    models = scale.clients if config.mode == "private" else 1
    return Cost(scale.passes, exchanges * (1.0 + pool * (1.0 + STEP_FORWARDS)), models)


METHOD = MethodEntry(
    config=RHFLConfig,
    build=RHFL,
    summary="private models with symmetric cross entropy that match each other on public images",
    source="Fang and Ye, CVPR 2022",
    presets={"averaged": {"mode": "averaged"}, "hybrid": {"mode": "hybrid"}},
    cost=cost,
)
