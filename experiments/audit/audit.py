"""An audit from images to verdicts and proposals; nothing in it sees a true label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from experiments.audit.correction import Correction, correct
from experiments.audit.serving import dealt, serving
from experiments.config import RunFile
from experiments.session import Session
from fedsir.audit.examine import Examination, examine
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels, homogeneous_split, patient_subsample
from fedsir.audit.spectral import SpectralSummary, summarize
from fedsir.audit.tasks import ExtractFeatures
from fedsir.audit.verdict import SiteEvidence, SiteVerdict
from fedsir.data.dataset import Dataset
from fedsir.errors import BadInput
from fedsir.federation.partition import site_names
from fedsir.methods.base import MethodState
from fedsir.methods.registry import find_method
from fedsir.seeding import Stream, generator
from fedsir.spectral.identification import Identification

Ints = NDArray[np.int64]

# Addresses below the audit's random stream, beside those of `fedsir.audit.weigh`.
_STAGE_ONE_SPLITS, _STAGE_ONE_SUBSAMPLES = 10, 11


@dataclass(frozen=True)
class AuditPlan:
    """seeds: of stage I, each on all patients and on a subsample. stage_one_splits: homogeneous splits on which stage
    I runs as well. training_seeds: of the training with and without correction; none: no proposals.
    """

    settings: AuditSettings = field(default_factory=AuditSettings)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    stage_one_splits: int = 20
    training_seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class AuditResult:
    """What an audit found; see the parts. correction: None where no site is suspect or none can be trusted."""

    sites: SiteLabels
    class_names: tuple[str, ...]
    examination: Examination
    spectral: SpectralSummary
    correction: Correction | None

    @property
    def evidence(self) -> SiteEvidence:
        return self.examination.evidence

    @property
    def verdicts(self) -> tuple[SiteVerdict, ...]:
        return self.examination.verdicts

    @property
    def split(self) -> bool:
        """Whether the sites fall into two groups at all: a mixture always says so, the calibration seldom."""
        return any(v.verdict == "suspect" for v in self.verdicts)


def audit(
    session: Session, config: RunFile, dataset: Dataset, plan: AuditPlan, tell: Callable[[str], None]
) -> AuditResult:
    """Audit the training images of `dataset`, whose sites become the clients.

    The method is a spectral one. Raises BadInput for images without sites and for fewer than two sites.
    """
    sites = site_labels(dataset)
    config = for_sites(config, sites)
    session.check_machine(config)
    members = [np.flatnonzero(sites.sites == k).astype(np.int64) for k in range(sites.num_sites)]
    federation = dealt(dataset, sites.labels, members)

    tell(f"features of {len(sites.labels):,} images at {sites.num_sites} sites")
    with serving(session, config, dataset, federation) as server:
        tasks = {k: ExtractFeatures() for k in range(sites.num_sites)}
        found = server.run_clients(tasks, 0, {"weights": server.initial_weights})
    own = np.concatenate([r.update for r in found.values()])
    features = np.empty_like(own)
    features[np.concatenate(members)] = own

    tell(f"calibration on {plan.settings.splits} homogeneous splits")
    examination = examine(features, sites, plan.settings)
    spectral = summarize(*_stage_one(session, config, dataset, sites, plan, tell))
    correction = correct(session, config, dataset, sites, examination.verdicts, plan.training_seeds, tell)
    return AuditResult(sites, dataset.class_names, examination, spectral, correction)


def site_labels(dataset: Dataset) -> SiteLabels:
    """The training images as an audit sees them. Raises BadInput where they name no sites or only one."""
    if dataset.train.sites is None:
        raise BadInput("the manifest has no column site, so there are no sites to compare.\nAdd a column site.")
    names = site_names(dataset.train.sites)
    if len(names) < 2:
        raise BadInput(f"all training images come from one site, {names[0]}: there is nothing to compare it with.")
    position = {name: k for k, name in enumerate(names)}
    _, patients = np.unique(dataset.train.patients, return_inverse=True)
    return SiteLabels(
        names=names,
        num_classes=dataset.num_classes,
        labels=dataset.train.labels.astype(np.int64),
        sites=np.array([position[s] for s in dataset.train.sites], dtype=np.int64),
        patients=patients.astype(np.int64),
    )


def for_sites(config: RunFile, sites: SiteLabels) -> RunFile:
    """`config` with one client per site."""
    federation = config.federation.model_copy(update={"clients": sites.num_sites})
    return config.model_copy(update={"federation": federation})


def _stage_one(
    session: Session,
    config: RunFile,
    dataset: Dataset,
    sites: SiteLabels,
    plan: AuditPlan,
    tell: Callable[[str], None],
) -> tuple[list[Identification], list[Identification]]:
    """Verdicts of stage I on the real sites, over seeds and subsamples, and on homogeneous splits."""

    def verdict(seed: int, owners: Ints, kept: Ints) -> Identification:
        members = [kept[owners[kept] == k] for k in range(sites.num_sites)]
        return _identify(session, config.model_copy(update={"seed": seed}), dataset, sites.labels, members)

    everyone = np.arange(len(sites.labels), dtype=np.int64)
    runs, splits = [], []
    for seed in plan.seeds:
        tell(f"stage I on the sites, seed {seed}")
        rng = generator(plan.settings.seed, Stream.AUDIT, _STAGE_ONE_SUBSAMPLES, seed)
        part = patient_subsample(sites.sites, sites.patients, plan.settings.subsample, rng)
        runs += [verdict(seed, sites.sites, everyone), verdict(seed, sites.sites, part)]
    for r in range(plan.stage_one_splits):
        if r % 5 == 0:
            tell(f"stage I on homogeneous splits, {r + 1} of {plan.stage_one_splits}")
        rng = generator(plan.settings.seed, Stream.AUDIT, _STAGE_ONE_SPLITS, r)
        owners = homogeneous_split(sites.labels, sites.sites, sites.patients, rng)
        splits.append(verdict(plan.seeds[r % len(plan.seeds)], owners, everyone))
    return runs, splits


def _identify(
    session: Session, config: RunFile, dataset: Dataset, labels: Ints, members: Sequence[Ints]
) -> Identification:
    with serving(session, config, dataset, dealt(dataset, labels, members)) as server:
        state: MethodState = find_method(config.method.name).build(config.method).begin(server)
    assert state.identification is not None
    return state.identification
