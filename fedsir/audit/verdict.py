"""From evidence to a verdict: suspect, inconspicuous, or undetermined for a named reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.audit.calibration import Calibrated
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels

Verdict = Literal["suspect", "inconspicuous", "undetermined"]
Array = NDArray[np.float64]

REASONS = {
    "few_sites": "too few sites with two classes",
    "single_class": "fewer than two classes to compare",
    "few_images": "too few images or patients",
    "shift_may_explain": "another scanner may explain the disagreement",
    "unstable": "evidence depends on few patients",
    "insensitive": "many wrong labels could go unnoticed",
    "evidence": "labels fit worse than chance explains",
    "no_evidence": "nothing speaks against its labels",
}
"""What each reason of a verdict means, for people."""


@dataclass(frozen=True)
class SiteVerdict:
    """Verdict on one site. reason: a key of `REASONS`. shifted: its images differ from the others'."""

    verdict: Verdict
    reason: str
    shifted: bool


@dataclass(frozen=True)
class SiteEvidence:
    """Evidence on K sites, as `judge` weighs it.

    disagreement, inconsistency, shift: see `fedsir.audit.evidence`. stability: (K,) share of subsamples in which the
    disagreement exceeds the critical value. detection: (K,) estimated chance of noticing `detectable` wrong labels.
    share: (K,) share of images that the other sites would label otherwise.
    """

    disagreement: Calibrated
    inconsistency: Calibrated
    shift: Calibrated
    stability: Array
    detection: Array
    share: Array


def comparable_classes(sites: SiteLabels, min_class_count: int) -> NDArray[np.int64]:
    """(K,) classes of which a site and the other sites together hold at least `min_class_count` images each."""
    counts = sites.counts()
    others = counts.sum(axis=0) - counts
    both = (counts >= min_class_count) & (others >= min_class_count)
    return np.asarray(both.sum(axis=1), dtype=np.int64)


def judge(sites: SiteLabels, evidence: SiteEvidence, settings: AuditSettings) -> tuple[SiteVerdict, ...]:
    """One verdict per site.

    A site is suspect where its labels disagree with the other sites beyond the stated rate and do so in most
    subsamples; where its images are shifted, they must also disagree with its own images, since a classifier of
    other scanners may simply not fit. What cannot be judged is undetermined, for the first reason that holds.
    """
    classes = comparable_classes(sites, settings.min_class_count)
    images, patients = sites.counts().sum(axis=1), sites.patient_counts()
    enough_sites = np.count_nonzero(classes >= 2) >= settings.min_sites
    # Not so where a site shares its classes with nobody but sites that were set aside.
    weighed = np.isfinite(evidence.disagreement.family)
    verdicts = []
    for k in range(sites.num_sites):
        shifted = bool(evidence.shift.family[k] <= settings.rate)
        accused = bool(evidence.disagreement.family[k] <= settings.rate)
        if not enough_sites:
            verdict = SiteVerdict("undetermined", "few_sites", shifted)
        elif classes[k] < 2 or not weighed[k]:
            verdict = SiteVerdict("undetermined", "single_class", shifted)
        elif images[k] < settings.min_images or patients[k] < settings.min_patients:
            verdict = SiteVerdict("undetermined", "few_images", shifted)
        elif accused and shifted and not evidence.inconsistency.p[k] <= settings.rate:
            verdict = SiteVerdict("undetermined", "shift_may_explain", shifted)
        elif accused and evidence.stability[k] < settings.stable:
            verdict = SiteVerdict("undetermined", "unstable", shifted)
        elif accused:
            verdict = SiteVerdict("suspect", "evidence", shifted)
        elif evidence.detection[k] < settings.detection:
            verdict = SiteVerdict("undetermined", "insensitive", shifted)
        else:
            verdict = SiteVerdict("inconspicuous", "no_evidence", shifted)
        verdicts.append(verdict)
    return tuple(verdicts)
