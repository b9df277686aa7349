"""OCT-FedSIR: find clients with unreliable labels from the geometry of their features, relabel, train noise-aware.

Stages and equation numbers are the paper's (arXiv 2609.14734); where it is silent, settings are named after the choice
they make, and fedsir/CHOICES.md gives the reason for each default (Q1-Q24).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.module import Objective
from fedsir.clients.objective import CrossEntropy, Distilled, LogitAdjusted
from fedsir.clients.spectral_tasks import FormReference, ProvideSpectra, Relabel
from fedsir.clients.tasks import ClientResult, ClientTask, LocalTraining
from fedsir.clients.training import LocalUpdate
from fedsir.methods.aggregate import DistanceAwareMean, Mean, SampleMean, average
from fedsir.methods.base import MethodState, Server
from fedsir.methods.cost import Cost, Scale
from fedsir.methods.local import local_training, participants, recipe
from fedsir.methods.registry import MethodEntry
from fedsir.methods.spectral_settings import CleanFraction, ConstantWeight, SpectralConfig
from fedsir.methods.stage_one import identify_clients, stage_one_cost
from fedsir.models.flat import FlatWeights
from fedsir.objectives import exp_ramp, la_prior
from fedsir.spectral.references import ClassReference
from fedsir.spectral.relabeling import ReferenceFacts, RelabelingEvidence


class OctFedSIRConfig(SpectralConfig):
    """Settings of OCT-FedSIR."""

    name: Literal["oct_fedsir"] = "oct_fedsir"


@dataclass(frozen=True)
class OctFedSIRState(MethodState):
    """reference_model: phi, mean of the clean clients' latest states."""

    reference_model: FlatWeights = field(kw_only=True)


class OctFedSIR:
    """The algorithm; the configuration decides every choice the paper leaves open, and makes FedSIR of it."""

    state_type = OctFedSIRState

    def __init__(self, config: SpectralConfig) -> None:
        self.config = config

    def begin(self, server: Server) -> OctFedSIRState:
        """Stage I: fine-tune locally, compare class directions, split the clients."""
        config, federation = self.config, server.federation
        adjusted = config.logit_adjustment.stage_one
        outcome = identify_clients(
            server,
            config.stage_one,
            config.identification,
            lambda k: self._hard_objective(server, k, federation.observed[k], adjusted),
        )
        clean_models = {k: u for k, u in outcome.models.items() if outcome.verdict.clean[k]}
        reference_model = average(server, clean_models, server.initial_weights)
        return OctFedSIRState(
            weights=reference_model if config.init_main == "clean_aggregate" else server.initial_weights,
            labels=federation.observed,
            identification=outcome.verdict,
            reference_model=reference_model,
        )

    def round(self, server: Server, state: OctFedSIRState, t: int) -> OctFedSIRState:
        """One round of noise-aware training, after relabelling where a checkpoint is due."""
        if self.config.relabeling.due(t):
            state = self._relabel(server, state, t)
        clean = _clean(state)
        tasks = {k: self._local_task(server, state, k, t) for k in participants(server, t)}
        broadcast = {"weights": state.weights}
        if self.config.distillation.teacher == "clean":
            broadcast["teacher"] = state.reference_model
        mean: Mean = SampleMean(server, tasks)
        if self.config.aggregation == "distance_aware":
            mean = DistanceAwareMean(server, tasks, clean, self.config.distance_buffers)
        trusted = SampleMean(server, [k for k in tasks if clean[k]])

        def take(client: int, result: ClientResult[LocalUpdate]) -> None:
            mean.add(client, result.update)
            if clean[client]:
                trusted.add(client, result.update)

        server.fold_clients(tasks, t, broadcast, take)
        weights = mean.result(state.weights)
        # Where no clean client takes part, the reference stays as it is.
        return replace(state, weights=weights, reference_model=trusted.result(state.reference_model))

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
        providers = list(spectra_tasks)
        forming = [FormReference(tuple(of_class), config.references) for of_class in zip(*spectra, strict=True)]
        references = tuple(server.spread(forming, t, {}))
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
        margins = [np.full((len(y), 2), np.nan, dtype=np.float32) for y in federation.observed]
        for k, result in outcomes.items():
            relabeling = result.state
            labels[k], agreement[k] = relabeling.targets, relabeling.agreement
            margins[k][:, 0], margins[k][:, 1] = relabeling.representative_margin, relabeling.residual_margin
        named = zip(federation.class_names, references, strict=True)
        facts = tuple(_facts(name, reference, providers) for name, reference in named)
        evidence = RelabelingEvidence(tuple(margins), tuple(agreement), facts)
        return replace(state.relabeled(t, tuple(labels)), evidence=evidence)

    def _local_task(self, server: Server, state: OctFedSIRState, k: int, t: int) -> ClientTask[LocalUpdate]:
        """Local training of client k: LA-CE if clean (eq. 10), distilled LA-CE if noisy (eq. 33)."""
        distillation = self.config.distillation
        labels = server.federation.observed[k] if state.labels is None else state.labels[k]
        clean = _clean(state)
        adjustment = self.config.logit_adjustment
        adjusted = adjustment.clean_clients if clean[k] else adjustment.noisy_clients
        weight = self._kd_weight(clean, t)
        if clean[k] or not distillation.enabled or weight == 0.0:
            objective = self._hard_objective(server, k, labels, adjusted)
            return local_training(server, labels, objective)
        extras = {}
        if distillation.on == "disagree" and state.evidence is not None:
            extras["kd_mask"] = ~state.evidence.agreement[k]
        prior = self._prior(server, k, labels) if adjusted else np.zeros(server.federation.num_classes, np.float32)
        objective = Distilled(prior, weight, distillation.teacher_temperature, distillation.student_temperature)
        teacher = "weights" if distillation.teacher == "global" else "teacher"
        return LocalTraining(labels, recipe(server, objective, extras, teacher_logits=True), teacher)

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


def _facts(name: str, reference: ClassReference | None, providers: Sequence[int]) -> ReferenceFacts:
    if reference is None:
        return ReferenceFacts(name, (), 0, float("nan"))
    behind = tuple(providers[i] for i in reference.providers)
    return ReferenceFacts(name, behind, len(reference.residual), reference.strength)


def _clean(state: MethodState) -> NDArray[np.bool_]:
    if state.identification is None:
        raise ValueError("the state has no identification")
    return state.identification.clean


def cost(config: SpectralConfig, scale: Scale) -> Cost:
    """Stage I, a pass at each checkpoint of relabelling, and at noisy clients the teacher's pass in each epoch."""
    before, noisy = stage_one_cost(config.stage_one, scale), 1.0 - scale.clean
    if noisy == 0.0:
        return Cost(before.trained + scale.passes, before.forwarded)
    checkpoints = sum(config.relabeling.due(t) for t in range(scale.training.rounds))
    taught = noisy * scale.passes if config.distillation.enabled else 0.0
    return Cost(before.trained + scale.passes, before.forwarded + checkpoints + taught)


METHOD = MethodEntry(
    config=OctFedSIRConfig,
    build=OctFedSIR,
    summary="spectral identification, relabelling where two criteria agree, noise-aware training",
    source="OCT-FedSIR, arXiv 2609.14734",
    cost=cost,
    partial_participation=True,
    presets={
        "equal_steps": {"stage_one": {"length": "steps"}},
        "no_relabeling": {"relabeling": {"enabled": False}},
        "no_kd": {"distillation": {"enabled": False}},
        "no_la": {"logit_adjustment": {"stage_one": False, "clean_clients": False, "noisy_clients": False}},
        "no_daagg": {"aggregation": "sample_weighted"},
        # The text at its word, without the guards this package adds to it. It names neither covariance nor
        # regularization of the mixture: those here are scikit-learn's defaults.
        "paper": {
            "init_main": "shared_init",
            "identification": {
                "similarity_sign": "oriented",
                "min_class_count": 1,
                "covariance": "full",
                "regularization": 1e-6,
            },
            "references": {"min_count": 1},
            "relabeling": {"keep_unreferenced": False},
            "logit_adjustment": {"floor": 0.0},
        },
    },
)
