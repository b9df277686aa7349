"""OCT-FedSIR: find clients with unreliable labels from the geometry of their features, relabel, train noise-aware.

Stages and equation numbers are the paper's (methods section 11); where it is silent, settings are named after the
choice they make and default to the recommended one (open questions Q1-Q24).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsir.clients.module import Objective
from fedsir.clients.objective import CrossEntropy, Distilled, LogitAdjusted
from fedsir.clients.spectral_tasks import ProvideSpectra, Relabel, StageOne
from fedsir.clients.tasks import ClientTask, LocalTraining
from fedsir.clients.training import LocalUpdate, Recipe
from fedsir.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from fedsir.config.method import MethodConfig
from fedsir.config.training import OptimizerConfig
from fedsir.methods.aggregate import average, distance_aware_average
from fedsir.methods.base import MethodState, Server
from fedsir.methods.registry import MethodEntry
from fedsir.models.flat import FlatWeights
from fedsir.objectives import exp_ramp, la_prior
from fedsir.seeding import Stream, integer
from fedsir.spectral.identification import IdentificationSettings, identify
from fedsir.spectral.references import ReferenceSettings, class_references


class LogitAdjustment(Section):
    """Logit adjustment m = beta log(prior + eps) (eq. 8-10, Q20, Q24)."""

    stage_one: bool = True
    clean_clients: bool = True
    noisy_clients: bool = True
    beta: NonNegativeFloat = 1.0
    eps: PositiveFloat = 1e-12
    floor: NonNegativeFloat = Field(default=1.0, description="counts below are raised to it")
    prior_source: Literal["observed", "corrected"] = "observed"


class StageOneSettings(Section):
    """Local fine-tuning before identification (Q3); `batch_size` none means the main stage's."""

    epochs: PositiveInt = 5
    batch_size: PositiveInt | None = None
    lr: PositiveFloat = 5e-5
    weight_decay: NonNegativeFloat = 5e-2


class CleanFraction(Section):
    """KD weight lambda = predicted-clean clients / clients (paper)."""

    kind: Literal["clean_fraction"] = "clean_fraction"


class ConstantWeight(Section):
    """The same KD weight in every round."""

    kind: Literal["constant"]
    value: Fraction


class RampWeight(Section):
    """KD weight `maximum * exp_ramp(round; begin, end)` (FedSIR's code)."""

    kind: Literal["ramp"]
    maximum: Fraction = 0.2
    begin: NonNegativeInt = 2
    end: PositiveInt = 49

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> RampWeight:
        if self.begin >= self.end:
            raise ValueError(f"a ramp must end after it begins, got begin {self.begin} and end {self.end}")
        return self


class Distillation(Section):
    """Knowledge distillation at predicted-noisy clients (Q17-Q19, Q21)."""

    enabled: bool = True
    weight: Annotated[CleanFraction | ConstantWeight | RampWeight, Field(discriminator="kind")] = CleanFraction()
    on: Literal["all", "disagree"] = "all"
    teacher: Literal["global", "clean"] = "global"
    teacher_temperature: PositiveFloat = 1.0
    student_temperature: PositiveFloat = 1.0


class Relabeling(Section):
    """When and how predicted-noisy clients correct labels (Q10, Q14)."""

    enabled: bool = True
    every: PositiveInt = Field(default=20, description="rounds between checkpoints")
    first: PositiveInt | None = Field(default=None, description="round of the first checkpoint; none: `every`")
    rule: Literal["agree", "sr", "sn"] = "agree"
    keep_unreferenced: bool = True

    def due(self, t: int) -> bool:
        """Whether a checkpoint comes before round t (0-based)."""
        first = self.every if self.first is None else self.first
        return self.enabled and t >= first and (t - first) % self.every == 0


class OctFedSIRConfig(MethodConfig):
    """Settings of OCT-FedSIR."""

    name: Literal["oct_fedsir"] = "oct_fedsir"
    stage_one: StageOneSettings = StageOneSettings()
    identification: IdentificationSettings = IdentificationSettings()
    init_main: Literal["clean_aggregate", "shared_init"] = Field(
        default="clean_aggregate", description="where the main stage starts (Q9)"
    )
    references: ReferenceSettings = ReferenceSettings()
    relabeling: Relabeling = Relabeling()
    logit_adjustment: LogitAdjustment = LogitAdjustment()
    distillation: Distillation = Distillation()
    aggregation: Literal["distance_aware", "sample_weighted"] = "distance_aware"
    distance_buffers: bool = Field(default=False, description="running statistics count as distance (Q22)")


@dataclass(frozen=True)
class OctFedSIRState(MethodState):
    """reference_model: phi, mean of the clean clients' latest states. agreement: per client (n_k,) bool, images on
    which both criteria agreed at the last checkpoint; None before the first."""

    reference_model: FlatWeights = field(kw_only=True)
    agreement: tuple[NDArray[np.bool_], ...] | None = None


class OctFedSIR:
    """The algorithm; the configuration decides every choice the paper leaves open."""

    state_type = OctFedSIRState

    def __init__(self, config: OctFedSIRConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> OctFedSIRState:
        """Stage I: fine-tune locally, compare class directions, split the clients."""
        config, federation = self.config, server.federation
        stage = config.stage_one
        tasks = {}
        for k, labels in enumerate(federation.observed):
            objective = self._hard_objective(server, k, labels, config.logit_adjustment.stage_one)
            recipe = Recipe(
                objective,
                stage.epochs,
                stage.batch_size or server.training.batch_size,
                OptimizerConfig(lr=stage.lr, weight_decay=stage.weight_decay),
            )
            tasks[k] = StageOne(labels, federation.num_classes, recipe, config.identification)
        results = server.run_clients(tasks, STAGE_ONE_ROUND, {"weights": server.initial_weights})
        similarity = np.stack([r.update.similarity for r in results.values()])
        verdict = identify(similarity, config.identification, integer(server.seed, Stream.IDENTIFICATION))
        for note in verdict.notes:
            server.note(f"identification: {note}")
        clean_models = {k: r.update.training for k, r in results.items() if verdict.clean[k]}
        reference_model = average(server, clean_models, server.initial_weights)
        return OctFedSIRState(
            weights=reference_model if config.init_main == "clean_aggregate" else server.initial_weights,
            labels=federation.observed,
            identification=verdict,
            reference_model=reference_model,
        )

    def round(self, server: Server, state: OctFedSIRState, t: int) -> OctFedSIRState:
        """One round of noise-aware training, after relabelling where a checkpoint is due."""
        if self.config.relabeling.due(t):
            state = self._relabel(server, state, t)
        clean = _clean(state)
        tasks = {k: self._local_task(server, state, k, t) for k in range(server.federation.num_clients)}
        broadcast = {"weights": state.weights}
        if self.config.distillation.teacher == "clean":
            broadcast["teacher"] = state.reference_model
        results = server.run_clients(tasks, t, broadcast)
        updates = {k: r.update for k, r in results.items()}
        if self.config.aggregation == "distance_aware":
            weights = distance_aware_average(server, updates, clean, state.weights, self.config.distance_buffers)
        else:
            weights = average(server, updates, state.weights)
        trusted = {k: u for k, u in updates.items() if clean[k]}
        return replace(state, weights=weights, reference_model=average(server, trusted, state.reference_model))

    def _relabel(self, server: Server, state: OctFedSIRState, t: int) -> OctFedSIRState:
        """Stages II and III: references from the clean clients, corrected labels at the noisy ones (eq. 16-27)."""
        config, federation = self.config, server.federation
        clean = _clean(state)
        if clean.all():
            return state
        spectra_tasks = {
            k: ProvideSpectra(
                federation.observed[k],
                federation.num_classes,
                config.references.kappa,
                config.references.residual_directions,
            )
            for k in np.flatnonzero(clean).tolist()
        }
        model = {"reference_model": state.reference_model}
        spectra = [r.update for r in server.run_clients(spectra_tasks, t, model).values()]
        references = class_references(spectra, config.references)
        without = [name for name, r in zip(federation.class_names, references, strict=True) if r is None]
        if without:
            server.note(f"no predicted-clean client gives a reference for {', '.join(without)}")
        relabel_tasks = {
            # From the observed labels each time, never from the last correction (eq. 27).
            k: Relabel(federation.observed[k], config.relabeling.rule, config.relabeling.keep_unreferenced)
            for k in np.flatnonzero(~clean).tolist()
        }
        outcomes = server.run_clients(relabel_tasks, t, {**model, "references": references})
        labels = list(federation.observed)
        agreement = [np.ones(len(y), dtype=np.bool_) for y in federation.observed]
        for k, result in outcomes.items():
            labels[k], agreement[k] = result.state.targets, result.state.agreement
        return replace(state, labels=tuple(labels), agreement=tuple(agreement))

    def _local_task(self, server: Server, state: OctFedSIRState, k: int, t: int) -> ClientTask[LocalUpdate]:
        """Local training of client k: LA-CE if clean (eq. 10), distilled LA-CE if noisy (eq. 33)."""
        budget, distillation = server.training, self.config.distillation
        labels = server.federation.observed[k] if state.labels is None else state.labels[k]
        clean = _clean(state)
        adjustment = self.config.logit_adjustment
        adjusted = adjustment.clean_clients if clean[k] else adjustment.noisy_clients
        weight = self._kd_weight(clean, t)
        if clean[k] or not distillation.enabled or weight == 0.0:
            objective = self._hard_objective(server, k, labels, adjusted)
            return LocalTraining(labels, Recipe(objective, budget.local_epochs, budget.batch_size, budget.optimizer))
        extras = {}
        if distillation.on == "disagree" and state.agreement is not None:
            extras["kd_mask"] = ~state.agreement[k]
        prior = self._prior(server, k, labels) if adjusted else np.zeros(server.federation.num_classes, np.float32)
        recipe = Recipe(
            Distilled(prior, weight, distillation.teacher_temperature, distillation.student_temperature),
            budget.local_epochs,
            budget.batch_size,
            budget.optimizer,
            extras,
            teacher_logits=True,
        )
        return LocalTraining(labels, recipe, "weights" if distillation.teacher == "global" else "teacher")

    def _hard_objective(self, server: Server, k: int, labels: NDArray[np.int64], adjusted: bool) -> Objective:
        return LogitAdjusted(self._prior(server, k, labels)) if adjusted else CrossEntropy()

    def _prior(self, server: Server, k: int, labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """m_k (C,) float32 from the client's observed or current label counts (eq. 8-9)."""
        settings = self.config.logit_adjustment
        source = server.federation.observed[k] if settings.prior_source == "observed" else labels
        counts = np.bincount(source, minlength=server.federation.num_classes)
        return la_prior(counts, settings.beta, settings.eps, settings.floor).numpy()

    def _kd_weight(self, clean: NDArray[np.bool_], t: int) -> float:
        """lambda of eq. 33."""
        weight = self.config.distillation.weight
        if isinstance(weight, CleanFraction):
            return float(clean.mean())
        if isinstance(weight, ConstantWeight):
            return weight.value
        return weight.maximum * exp_ramp(t, weight.begin, weight.end)


STAGE_ONE_ROUND = 1_000_000
"""Address of stage I in the clients' random streams; no main round has this number."""


def _clean(state: MethodState) -> NDArray[np.bool_]:
    if state.identification is None:
        raise ValueError("the state has no identification")
    return state.identification.clean


METHOD = MethodEntry(
    config=OctFedSIRConfig,
    build=OctFedSIR,
    summary="spectral identification, relabelling where two criteria agree, noise-aware training",
    source="OCT-FedSIR, arXiv 2609.14734",
)
