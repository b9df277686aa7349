"""All evidence on a consortium's sites from features and labels: statistics, splits, subsamples, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsir.audit.calibration import Calibrated, calibrate
from fedsir.audit.evidence import (
    FOLDS,
    cross_site_log_p,
    disagreement,
    disagreement_share,
    inconsistency,
    principal_components,
    shift,
    without_site_offsets,
)
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels, homogeneous_split, patient_subsample
from fedsir.audit.verdict import SiteEvidence
from fedsir.seeding import Stream, generator

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_DETECTION_DRAWS = 20
# Addresses below the audit's random stream.
_FOLDS, _SPLITS, _SUBSAMPLES, _ERRORS = range(4)


def weigh(features: NDArray[np.floating], sites: SiteLabels, settings: AuditSettings) -> SiteEvidence:
    """Evidence on every site from features (N, d) that no label of the consortium has touched.

    Deterministic in `settings.seed`. The inconsistency is NaN but for sites that are both accused and shifted: no
    other verdict asks for it.
    """
    x = principal_components(features, settings.components)
    everyone = range(sites.num_sites)

    def against_and_apart(dealt: Ints) -> Array:
        log_p = _log_p(x, sites.labels, dealt, sites, settings)
        return np.stack(
            [
                disagreement(log_p, sites.labels, dealt, sites.num_sites),
                shift(x, sites.labels, dealt, sites.num_sites, sites.num_classes, settings.shrinkage),
            ]
        )

    null = np.stack([against_and_apart(_split(sites, settings, r)) for r in range(settings.splits)])
    observed = against_and_apart(sites.sites)
    against, apart = (calibrate(observed[i], null[:, i], settings.rate) for i in range(2))
    open_questions = [k for k in everyone if max(against.family[k], apart.family[k]) <= settings.rate]
    log_p = _log_p(x, sites.labels, sites.sites, sites, settings)
    return SiteEvidence(
        disagreement=against,
        inconsistency=_inconsistency(x, sites, settings, open_questions),
        shift=apart,
        stability=_stability(x, sites, against, settings),
        detection=_detection(x, sites, against, log_p, settings),
        share=disagreement_share(log_p, sites.labels, sites.sites, sites.num_sites),
    )


def _split(sites: SiteLabels, settings: AuditSettings, r: int) -> Ints:
    rng = generator(settings.seed, Stream.AUDIT, _SPLITS, r)
    return homogeneous_split(sites.labels, sites.sites, sites.patients, rng)


def _log_p(
    x: Array,
    labels: Ints,
    dealt: Ints,
    sites: SiteLabels,
    settings: AuditSettings,
    judged: Sequence[int] | None = None,
) -> Array:
    """What the other sites say about each image (N, C)."""
    k, c = sites.num_sites, sites.num_classes
    centred = without_site_offsets(x, labels, dealt, k, c)
    return cross_site_log_p(centred, labels, dealt, k, c, settings.shrinkage, settings.min_class_count, judged)


def _inconsistency(x: Array, sites: SiteLabels, settings: AuditSettings, judged: Sequence[int]) -> Calibrated:
    observed = np.full(sites.num_sites, np.nan)
    null = np.full((settings.splits, sites.num_sites), np.nan)
    if judged:
        people = int(sites.patients.max()) + 1
        folds = generator(settings.seed, Stream.AUDIT, _FOLDS).integers(FOLDS, size=people)

        def within(dealt: Ints) -> Array:
            return inconsistency(x, sites.labels, dealt, sites.patients, judged, settings.shrinkage, folds)

        observed[judged] = within(sites.sites)
        for r in range(settings.splits):
            null[r, judged] = within(_split(sites, settings, r))
    return calibrate(observed, null, settings.rate)


def _stability(x: Array, sites: SiteLabels, against: Calibrated, settings: AuditSettings) -> Array:
    exceeded = np.zeros(sites.num_sites)
    for r in range(settings.resamples):
        rng = generator(settings.seed, Stream.AUDIT, _SUBSAMPLES, r)
        kept = patient_subsample(sites.sites, sites.patients, settings.subsample, rng)
        labels, dealt = sites.labels[kept], sites.sites[kept]
        log_p = _log_p(x[kept], labels, dealt, sites, settings)
        exceeded += disagreement(log_p, labels, dealt, sites.num_sites) >= against.critical
    return exceeded / settings.resamples


def _detection(x: Array, sites: SiteLabels, against: Calibrated, log_p: Array, settings: AuditSettings) -> Array:
    """Chance of noticing `detectable` further wrong labels at each site, each wrong in the least visible way."""
    chance = np.full(sites.num_sites, np.nan)
    rivals = np.where(np.isfinite(log_p), log_p, -np.inf)
    rivals[np.arange(len(sites.labels)), sites.labels] = -np.inf
    mistaken_for = rivals.argmax(axis=1)
    possible = np.isfinite(rivals.max(axis=1))
    for k in np.flatnonzero(np.isfinite(against.critical)).tolist():
        members = np.flatnonzero((sites.sites == k) & possible)
        found = 0
        for draw in range(_DETECTION_DRAWS):
            rng = generator(settings.seed, Stream.AUDIT, _ERRORS, k, draw)
            wrong = rng.permutation(members)[: round(settings.detectable * len(members))]
            labels = sites.labels.copy()
            labels[wrong] = mistaken_for[wrong]
            said = _log_p(x, labels, sites.sites, sites, settings, [k])
            found += bool(disagreement(said, labels, sites.sites, sites.num_sites)[k] >= against.critical[k])
        chance[k] = found / _DETECTION_DRAWS
    return chance
