"""Proposed labels for suspect sites, and what training with and without them gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.audit.serving import dealt, serving
from experiments.config import RunFile
from experiments.session import Session
from fedsir.audit.sites import SiteLabels
from fedsir.audit.tasks import ScoreImages
from fedsir.audit.verdict import SiteVerdict
from fedsir.audit.worklist import LabelScores, Proposal, rank_proposals
from fedsir.clients.spectral_tasks import ProvideSpectra
from fedsir.data.dataset import Dataset
from fedsir.methods.aggregate import average
from fedsir.methods.fedavg import FedAvg
from fedsir.methods.local import la_objective
from fedsir.methods.oct_fedsir import OctFedSIR, OctFedSIRState
from fedsir.methods.spectral_settings import SpectralConfig
from fedsir.methods.stage_one import identify_clients
from fedsir.server import RunServer, predict_test
from fedsir.spectral.identification import Identification
from fedsir.spectral.references import class_references

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Correction:
    """proposals: ranked; `image` is a position in the training set. without, corrected: accuracy of each seed on the
    held-out images of `tested` trusted sites, without and with corrected labels. held_out: how many images these are.
    unreferenced: classes for which no trusted site gives a reference.
    """

    proposals: tuple[Proposal, ...]
    without: tuple[float, ...]
    corrected: tuple[float, ...]
    held_out: int
    unreferenced: tuple[str, ...]


def correct(
    session: Session,
    config: RunFile,
    dataset: Dataset,
    sites: SiteLabels,
    verdicts: Sequence[SiteVerdict],
    seeds: Sequence[int],
    tell: Callable[[str], None],
) -> Correction | None:
    """Train on suspect and inconspicuous sites; None where there are not both of them.

    Undetermined sites take part in neither training: their labels are no reference and are not changed. The models
    are compared on held-out images of the inconspicuous sites, by the labels these have.
    """
    trusted = [k for k, v in enumerate(verdicts) if v.verdict == "inconspicuous"]
    suspect = [k for k, v in enumerate(verdicts) if v.verdict == "suspect"]
    if not trusted or not suspect:
        return None
    members = [np.flatnonzero(sites.sites == k).astype(np.int64) for k in (*trusted, *suspect)]
    clean = np.arange(len(members)) < len(trusted)
    federation = dealt(dataset, sites.labels, members)
    tested = _held_out(dataset, {sites.names[k] for k in trusted})
    images = np.concatenate([members[k] for k in np.flatnonzero(~clean)])
    scores, without, corrected = [], [], []
    unreferenced: tuple[str, ...] = ()
    for seed in seeds:
        tell(f"training with and without corrected labels, seed {seed}")
        seeded = config.model_copy(update={"seed": seed})
        with serving(session, seeded, dataset, federation) as server:
            without.append(_plain(server, seeded, dataset, tested))
            found, accuracy, unreferenced = _with_correction(server, seeded, dataset, clean, tested)
        scores.append(found)
        corrected.append(accuracy)
    proposals = tuple(
        Proposal(**{**vars(p), "image": int(images[p.image])}) for p in rank_proposals(sites.labels[images], scores)
    )
    return Correction(proposals, tuple(without), tuple(corrected), int(tested.sum()), unreferenced)


def _plain(server: RunServer, config: RunFile, dataset: Dataset, tested: NDArray[np.bool_]) -> float:
    method = FedAvg()
    state = method.begin(server)
    for t in range(config.training.rounds):
        state = method.round(server, state, t)
    return _accuracy(predict_test(server, state, len(dataset.test))[0], dataset, tested)


def _with_correction(
    server: RunServer, config: RunFile, dataset: Dataset, clean: NDArray[np.bool_], tested: NDArray[np.bool_]
) -> tuple[LabelScores, float, tuple[str, ...]]:
    """OCT-FedSIR's main stage with the audit's verdict in place of the mixture's."""
    settings = config.method
    assert isinstance(settings, SpectralConfig)
    method, classes = OctFedSIR(settings), dataset.num_classes
    models = identify_clients(
        server, settings.stage_one, settings.identification, lambda k: la_objective(server, k)
    ).models
    reference = average(server, {k: m for k, m in models.items() if clean[k]}, server.initial_weights)
    verdict = Identification.without_spectra(classes, clean.astype(np.float64), clean, "audit")
    state = OctFedSIRState(
        weights=reference, labels=server.federation.observed, identification=verdict, reference_model=reference
    )
    for t in range(config.training.rounds):
        state = method.round(server, state, t)

    noisy = np.flatnonzero(~clean).tolist()
    observed, references = server.federation.observed, settings.references
    providers = {
        k: ProvideSpectra(observed[k], classes, references.kappa, references.residual_directions)
        for k in np.flatnonzero(clean).tolist()
    }
    model, end = {"reference_model": state.reference_model}, config.training.rounds
    spectra = [r.update for r in server.run_clients(providers, end, model).values()]
    formed = class_references(spectra, references)
    found = server.run_clients({k: ScoreImages() for k in noisy}, end, {**model, "references": formed})
    representative, residual = np.concatenate([r.update for r in found.values()], axis=1)
    given = [np.concatenate([checkpoint.labels[k] for k in noisy]) for checkpoint in state.label_history]
    checkpoints = np.stack(given).astype(np.int64) if given else np.empty((0, len(representative)), np.int64)
    accuracy = _accuracy(predict_test(server, state, len(dataset.test))[0], dataset, tested)
    without = tuple(n for n, r in zip(dataset.class_names, formed, strict=True) if r is None)
    return LabelScores(representative, residual, checkpoints), accuracy, without


def _held_out(dataset: Dataset, trusted: set[str]) -> NDArray[np.bool_]:
    assert dataset.test.sites is not None
    return np.array([name in trusted for name in dataset.test.sites], dtype=np.bool_)


def _accuracy(logits: NDArray[np.float32], dataset: Dataset, tested: NDArray[np.bool_]) -> float:
    if not tested.any():
        return float("nan")
    return float(np.mean(logits.argmax(axis=1)[tested] == dataset.test.labels[tested]))
