"""FedNed: find extremely noisy clients by the uncertainty of their models on public images (Lu et al. 2024).

Extremely noisy (EN) clients train two models: one on pseudo-labels, which may join the average, and one on their own
labels, a bad teacher from which negative distillation pushes the global model away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsir.aggregation import is_finite
from fedsir.clients.fedned_tasks import DistilNegatively, Inverse, TrainTwice, TwoModelUpdate
from fedsir.clients.objective import CrossEntropy
from fedsir.clients.tasks import ClientTask
from fedsir.clients.training import LocalUpdate
from fedsir.clients.uncertainty import PoolUncertainty
from fedsir.config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from fedsir.config.method import MethodConfig
from fedsir.config.training import OptimizerConfig
from fedsir.methods.aggregate import average
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import averaged_round, local_training, participants, recipe, stage_rounds, train_round
from fedsir.methods.registry import MethodEntry
from fedsir.models.flat import FlatWeights
from fedsir.seeding import Stream, generator

EXTREMELY_NOISY = 0.15
"""Share of clients expected to train twice: between none and a half on six conditions of phantoms."""


class NegativeDistillation(Section):
    """Server-side steps on the public pool after each average.

    Off by default: in the official code the optimizer holds another model than the loss is built on, so that the
    published numbers were obtained without any effect of it. Enabled, it does what the paper describes.
    """

    enabled: bool = False
    steps: PositiveInt = 10
    lr: PositiveFloat = 1e-4
    weight_decay: NonNegativeFloat = 2e-3
    inverse: Inverse = Field(default="neg_logits", description="how a bad teacher's logits are turned round")


class FedNedConfig(MethodConfig):
    """Settings of FedNed.

    lambda_rel: a client is extremely noisy above this multiple of the mean uncertainty; the official 0.12 at ten
    participants. pool_images: public images per uncertainty estimate and per step of negative distillation.
    """

    name: Literal["fedned"] = "fedned"
    warmup: Fraction = Field(default=0.1, description="share of the rounds that are plain FedAvg")
    lambda_rel: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 1.2
    temperature: PositiveFloat = Field(default=2.0, description="T of pseudo-labels and negative distillation")
    pl_threshold: NonNegativeFloat = Field(default=0.95, description="confidence from which a pseudo-label counts")
    mc_draws: PositiveInt = 10
    mc_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.3
    pool_images: PositiveInt = 128
    nd: NegativeDistillation = NegativeDistillation()


@dataclass(frozen=True)
class FedNedState(MethodState):
    """extremely_noisy: (K,) bool, clients that train twice; grows and never shrinks."""

    extremely_noisy: NDArray[np.bool_] = field(kw_only=True)


class FedNed:
    """Warm-up by FedAvg; then train, judge every model on the pool, average the good ones, distil negatively."""

    state_type = FedNedState

    def __init__(self, config: FedNedConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> FedNedState:
        if not len(server.federation.public_pool):
            server.note("FedNed has no public images to detect extremely noisy clients with and is FedAvg in this run")
        return FedNedState(
            weights=server.initial_weights,
            extremely_noisy=np.zeros(server.federation.num_clients, dtype=np.bool_),
        )

    def round(self, server: Server, state: FedNedState, t: int) -> FedNedState:
        tasks = {k: self._local_task(server, state, k) for k in participants(server, t)}
        warming_up = t < stage_rounds(self.config.warmup, server.training.rounds)
        pool = len(server.federation.public_pool)
        if warming_up or pool == 0:
            return replace(state, weights=averaged_round(server, tasks, t, state.weights))
        updates = train_round(server, tasks, t, state.weights)
        rng = generator(server.seed, Stream.METHOD, t)
        flagged = np.zeros_like(state.extremely_noisy)
        flagged[list(updates)] = extremely_noisy(self._uncertainty(server, updates, t, rng), self.config.lambda_rel)
        new = np.flatnonzero(flagged & ~state.extremely_noisy).tolist()
        if new:
            server.note(f"from now on extremely noisy: client {', '.join(map(str, new))}")
        weights = average(server, {k: u for k, u in updates.items() if not flagged[k]}, state.weights)
        teachers = bad_teachers(updates, flagged)
        if self.config.nd.enabled and teachers:
            weights = self._distil(server, weights, teachers, t, rng)
        return replace(state, weights=weights, extremely_noisy=state.extremely_noisy | flagged)

    def _local_task(self, server: Server, state: FedNedState, k: int) -> ClientTask[LocalUpdate]:
        labels = server.federation.observed[k]
        if not state.extremely_noisy[k]:
            return local_training(server, labels, CrossEntropy())
        return TrainTwice(labels, recipe(server, CrossEntropy()), self.config.temperature, self.config.pl_threshold)

    def _uncertainty(
        self, server: Server, updates: Mapping[int, LocalUpdate], t: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """U (M,): summed predictive entropy of each uploaded model on the same pool images."""
        positions = _draw(server, self.config.pool_images, rng)
        tasks = [
            PoolUncertainty(u.weights, positions, self.config.mc_draws, self.config.mc_dropout)
            for u in updates.values()
        ]
        return np.array(server.spread(tasks, t, {}), dtype=np.float64)

    def _distil(
        self, server: Server, weights: FlatWeights, teachers: tuple[FlatWeights, ...], t: int, rng: np.random.Generator
    ) -> FlatWeights:
        """The average after the steps of negative distillation."""
        config = self.config
        task = DistilNegatively(
            teachers,
            tuple(_draw(server, config.pool_images, rng) for _ in range(config.nd.steps)),
            config.temperature,
            config.nd.inverse,
            OptimizerConfig(lr=config.nd.lr, weight_decay=config.nd.weight_decay),
        )
        (distilled,) = server.spread([task], t, {"weights": weights})
        if is_finite(distilled):
            return distilled
        server.note("negative distillation gave non-finite weights and was left out")
        return weights


def extremely_noisy(uncertainty: NDArray[np.float64], lambda_rel: float) -> NDArray[np.bool_]:
    """(M,) bool: participants whose share u_k of the uncertainty U (M,) exceeds lambda = lambda_rel / M.

    A value that is not finite counts as the mean of the others, so it convicts nobody. The least uncertain client
    never exceeds a multiple >= 1 of the mean, so at least one client is good.
    """
    known = np.isfinite(uncertainty)
    if not known.any():
        return np.zeros(len(uncertainty), dtype=np.bool_)
    filled = np.where(known, uncertainty, uncertainty[known].mean())
    total = filled.sum()
    if total <= 0:
        return np.zeros(len(uncertainty), dtype=np.bool_)
    found = filled / total > lambda_rel / len(filled)
    # Equal values can exceed their own mean by a rounding error, and the mean itself can.
    found[~known | (filled == filled.min())] = False
    return np.asarray(found)


def bad_teachers(updates: Mapping[int, LocalUpdate], flagged: NDArray[np.bool_]) -> tuple[FlatWeights, ...]:
    """Models trained on the labels of extremely noisy clients: the second upload of known ones, the only one of
    those `flagged` (K,) for the first time. Diverged models are left out."""
    teachers = [
        u.noisy if isinstance(u, TwoModelUpdate) else u
        for k, u in updates.items()
        if flagged[k] or isinstance(u, TwoModelUpdate)
    ]
    return tuple(u.weights for u in teachers if u.samples > 0 and is_finite(u.weights))


def _draw(server: Server, images: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of `images` public images, or of all if there are fewer, rising."""
    pool = len(server.federation.public_pool)
    return np.sort(rng.choice(pool, size=min(images, pool), replace=False)).astype(np.int64)


def cost(config: FedNedConfig, scale: Scale) -> Cost:
    """Extremely noisy clients train twice and predict once. The few images of the pool are not counted."""
    rounds = scale.training.rounds
    judged = max(0, rounds - stage_rounds(config.warmup, rounds) - 1) if scale.pool else 0
    twice = EXTREMELY_NOISY * scale.share * judged
    return Cost(scale.passes + twice * scale.training.local_epochs, twice)


METHOD = MethodEntry(
    config=FedNedConfig,
    build=FedNed,
    summary="clients with uncertain models are kept out of the average and train on pseudo-labels",
    source="Lu et al., AAAI 2024, arXiv 2312.12703",
    cost=cost,
    partial_participation=True,
)
