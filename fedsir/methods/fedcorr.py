"""FedCorr: find noisy clients by the dimensionality of their predictions, correct labels, fine-tune on clean clients.

Three stages (Xu et al. 2022): pre-processing identifies and relabels, fine-tuning trains clean clients alone, the
usual stage trains everybody on the corrected labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsir.clients.fedcorr_tasks import CorrectAll, CorrectNoisiest, MeasuredUpdate, MixupTraining, TrainAndMeasure
from fedsir.clients.tasks import ClientResult
from fedsir.config.base import Fraction, NonNegativeFloat, Section
from fedsir.config.method import MethodConfig
from fedsir.methods.aggregate import SampleMean
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import averaged_round, participants, stage_rounds
from fedsir.methods.registry import MethodEntry
from fedsir.mixture import high_group
from fedsir.models.flat import FlatWeights
from fedsir.seeding import Stream, generator, integer
from fedsir.spectral.identification import Identification

Share = Annotated[float, Field(strict=True, gt=0, lt=1)]


class StageShares(Section):
    """Shares of the rounds. The official schedule spends its client-epochs 5 : 50 : 45."""

    preprocessing: Share = 0.05
    finetuning: Share = 0.5
    usual: Share = 0.45

    @model_validator(mode="after")
    def _whole(self) -> StageShares:
        total = self.preprocessing + self.finetuning + self.usual
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"the stages' shares must sum to 1, got {total:g}")
        return self

    def rounds(self, total: int) -> tuple[int, int, int]:
        """Rounds of each stage; every stage gets one where three rounds or more are to be shared."""
        preprocessing = min(stage_rounds(self.preprocessing, total), max(1, total - 2))
        left = total - preprocessing
        finetuning = min(stage_rounds(self.finetuning, total), max(left - 1, min(1, left)))
        return preprocessing, finetuning, left - finetuning


class FedCorrConfig(MethodConfig):
    """Settings of FedCorr, with the official values where nothing else is said.

    tau: `auto` is max(0.5, (1 + 1/C) / 2). The official 0.5 is below every confidence when there are two classes.
    """

    name: Literal["fedcorr"] = "fedcorr"
    stages: StageShares = StageShares()
    sequential: bool = Field(
        default=False,
        description="pre-processing visits clients one after another, each starting from the last one's model "
        "(official schedule), instead of averaging them",
    )
    lid_k: Annotated[int, Field(strict=True, ge=2)] = Field(default=20, description="neighbours of the LID estimate")
    prox_beta: NonNegativeFloat = Field(default=5.0, description="proximal term of pre-processing, times noise level")
    relabel_ratio: Fraction = Field(
        default=0.5, description="rho: share of the estimated wrong labels that pre-processing may correct"
    )
    tau: Fraction | Literal["auto"] = Field(default="auto", description="confidence above which labels change")
    kappa: Fraction = Field(default=0.1, description="largest noise level of a client that fine-tunes")
    mixup_alpha: NonNegativeFloat = Field(default=1.0, description="Beta(alpha, alpha) of mixup; 0: no mixup")
    bounded_loss: bool = Field(default=True, description="losses of softmax outputs (official code) split the samples")

    def threshold(self, num_classes: int) -> float:
        """tau for a number of classes."""
        return max(0.5, (1.0 + 1.0 / num_classes) / 2.0) if self.tau == "auto" else self.tau


@dataclass(frozen=True)
class FedCorrState(MethodState):
    """accumulated_lid: (K,) float64 Lambda, sum of mean LIDs over pre-processing. noise_levels: (K,) float64 mu,
    0 for clean clients. identification: the latest verdict of pre-processing."""

    accumulated_lid: NDArray[np.float64] = field(kw_only=True)
    noise_levels: NDArray[np.float64] = field(kw_only=True)


class FedCorr:
    """Identify and correct, fine-tune on clean clients, then train on everybody's corrected labels."""

    state_type = FedCorrState

    def __init__(self, config: FedCorrConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> FedCorrState:
        clients = server.federation.num_clients
        return FedCorrState(
            weights=server.initial_weights,
            accumulated_lid=np.zeros(clients),
            noise_levels=np.zeros(clients),
        )

    def round(self, server: Server, state: FedCorrState, t: int) -> FedCorrState:
        preprocessing, finetuning, _ = self.config.stages.rounds(server.training.rounds)
        if t < preprocessing:
            return self._preprocess(server, state, t)
        if t >= preprocessing + finetuning:
            return self._train(server, state, t, np.ones_like(state.noise_levels, dtype=np.bool_))
        clean = finetuning_clients(state.noise_levels, self.config.kappa)
        if t == preprocessing and state.noise_levels[clean].max() > self.config.kappa:
            server.note(f"no noise level is at most {self.config.kappa:g}; the lowest fine-tune: {_names(clean)}")
        state = self._train(server, state, t, clean)
        return self._correct_all(server, state, t) if t == preprocessing + finetuning - 1 else state

    def _preprocess(self, server: Server, state: FedCorrState, t: int) -> FedCorrState:
        """Stage 1: train, accumulate LID, split the clients, let the noisy ones correct their noisiest labels."""
        config, labels = self.config, _labels(server, state)
        tasks = {
            k: TrainAndMeasure(
                self._training(server, y, config.prox_beta * float(state.noise_levels[k])),
                config.lid_k,
                config.bounded_loss,
            )
            for k, y in enumerate(labels)
        }
        weights, lids, losses = self._visit(server, tasks, t, state.weights)
        accumulated = state.accumulated_lid + known_or_median(lids)
        noisy = high_group(accumulated, integer(server.seed, Stream.IDENTIFICATION, t))
        threshold = config.threshold(server.federation.num_classes)
        corrections = {
            k: CorrectNoisiest(labels[k], losses[k], config.relabel_ratio, threshold) for k in _positions(noisy)
        }
        results = server.run_clients(corrections, t, {"weights": weights}) if corrections else {}
        levels = np.zeros_like(accumulated)
        for k, result in results.items():
            levels[k] = result.update
        verdict = Identification.without_spectra(server.federation.num_classes, 1.0 - levels, ~noisy, "lid")
        state = replace(
            state, weights=weights, accumulated_lid=accumulated, noise_levels=levels, identification=verdict
        )
        return state.relabeled(t + 1, _merged(labels, {k: r.state for k, r in results.items()})) if results else state

    def _visit(
        self, server: Server, tasks: Mapping[int, TrainAndMeasure], t: int, weights: FlatWeights
    ) -> tuple[FlatWeights, NDArray[np.float64], dict[int, NDArray[np.float64]]]:
        """Every client trains once, together or one after another: model, mean LIDs (K,), losses by client."""
        order = generator(server.seed, Stream.METHOD, t).permutation(len(tasks)).tolist()
        groups = [{k: tasks[k]} for k in order] if self.config.sequential else [dict(tasks)]
        lids, losses = np.full(len(tasks), np.nan), {}
        for group in groups:
            weights, measured = _measured_round(server, group, t, weights)
            for k, (lid, of_images) in measured.items():
                lids[k], losses[k] = lid, of_images
        return weights, lids, losses

    def _train(self, server: Server, state: FedCorrState, t: int, eligible: NDArray[np.bool_]) -> FedCorrState:
        """Stages 2 and 3: one round of mixup training at some clients, averaged by sample count."""
        labels, chosen = _labels(server, state), participants(server, t, _positions(eligible))
        tasks = {k: self._training(server, labels[k]) for k in chosen}
        return replace(state, weights=averaged_round(server, tasks, t, state.weights))

    def _correct_all(self, server: Server, state: FedCorrState, t: int) -> FedCorrState:
        """End of stage 2: noisy clients take every prediction that is certain enough."""
        verdict = state.identification
        if verdict is None or verdict.clean.all():
            return state
        labels, threshold = _labels(server, state), self.config.threshold(server.federation.num_classes)
        tasks = {k: CorrectAll(labels[k], threshold) for k in _positions(~verdict.clean)}
        results = server.run_clients(tasks, t, {"weights": state.weights})
        return state.relabeled(t + 1, _merged(labels, {k: r.state for k, r in results.items()}))

    def _training(self, server: Server, labels: NDArray[np.int64], prox: float = 0.0) -> MixupTraining:
        return MixupTraining(labels, server.training, self.config.mixup_alpha, prox)


def _measured_round(
    server: Server, tasks: Mapping[int, TrainAndMeasure], t: int, weights: FlatWeights
) -> tuple[FlatWeights, dict[int, tuple[float, NDArray[np.float64]]]]:
    """The average of clients that train from `weights`, and the mean LID and the losses (n,) of each."""
    mean = SampleMean(server, tasks)

    def take(client: int, result: ClientResult[MeasuredUpdate]) -> tuple[float, NDArray[np.float64]]:
        mean.add(client, result.update)
        return result.update.lid, result.state

    measured = server.fold_clients(tasks, t, {"weights": weights}, take)
    return mean.result(weights), measured


def finetuning_clients(noise_levels: NDArray[np.float64], kappa: float) -> NDArray[np.bool_]:
    """(K,) bool: clients whose noise level is at most kappa; if none is, the tenth (rounded up) with the lowest.

    The paper then takes the one client with the smallest level; the tenth is the rule of this package for any empty
    clean set.
    """
    chosen = noise_levels <= kappa
    if not chosen.any():
        chosen[np.argsort(noise_levels, kind="stable")[: ceil(0.1 * len(noise_levels))]] = True
    return chosen


def known_or_median(lids: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K,) float64: undefined LIDs replaced by the median of the others; all 0 if none is defined."""
    known = np.isfinite(lids)
    return np.where(known, lids, np.median(lids[known]) if known.any() else 0.0)


def _labels(server: Server, state: FedCorrState) -> tuple[NDArray[np.int64], ...]:
    return server.federation.observed if state.labels is None else state.labels


def _merged(
    labels: tuple[NDArray[np.int64], ...], changed: Mapping[int, NDArray[np.int64]]
) -> tuple[NDArray[np.int64], ...]:
    return tuple(changed.get(k, y) for k, y in enumerate(labels))


def _positions(mask: NDArray[np.bool_]) -> list[int]:
    return [int(k) for k in np.flatnonzero(mask)]


def _names(mask: NDArray[np.bool_]) -> str:
    return "client " + ", ".join(map(str, _positions(mask)))


def cost(config: FedCorrConfig, scale: Scale) -> Cost:
    """Everybody trains in stage 1, and only clean clients fine-tune. A pass after each training of stage 1, and one for
    each correction of labels."""
    preprocessing, finetuning, usual = config.stages.rounds(scale.training.rounds)
    rounds = preprocessing + scale.share * (usual + scale.clean * finetuning)
    corrections = preprocessing + (1 if finetuning else 0)
    return Cost(rounds * scale.training.local_epochs, preprocessing + (1.0 - scale.clean) * corrections)


METHOD = MethodEntry(
    config=FedCorrConfig,
    build=FedCorr,
    summary="noisy clients found by local intrinsic dimensionality, labels corrected in stages",
    source="Xu et al., CVPR 2022, arXiv 2204.04677",
    cost=cost,
    partial_participation=True,
)
