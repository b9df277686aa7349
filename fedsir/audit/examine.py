"""Evidence and verdicts on all sites, with accused sites set aside before the others are weighed once more."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fedsir.audit.calibration import Calibrated
from fedsir.audit.settings import AuditSettings
from fedsir.audit.sites import SiteLabels
from fedsir.audit.verdict import SiteEvidence, SiteVerdict, comparable_classes, judge
from fedsir.audit.weigh import weigh

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Examination:
    """evidence: of the last pass that weighed a site. passes: (K,) int64 number of that pass, from 1."""

    evidence: SiteEvidence
    verdicts: tuple[SiteVerdict, ...]
    passes: Ints


def examine(features: NDArray[np.floating], sites: SiteLabels, settings: AuditSettings) -> Examination:
    """Weigh all sites; while some are accused, set them aside and weigh the rest among themselves.

    Wrong labels of one site spoil what the others are compared with: they raise the homogeneous splits, so that a
    further noisy site hides behind the first and nobody could tell clean sites from undetected ones. Each pass keeps
    the stated rate for the sites it weighs, hence all together do (a step-down procedure): unless a clean site is
    accused already, the next pass is the first that could. It ends where nobody is accused or too few sites are left.
    """
    left = np.arange(sites.num_sites, dtype=np.int64)
    passes = np.zeros(sites.num_sites, dtype=np.int64)
    evidence: SiteEvidence | None = None
    while True:
        mask = np.isin(sites.sites, left)
        part = SiteLabels(
            names=tuple(sites.names[k] for k in left),
            num_classes=sites.num_classes,
            labels=sites.labels[mask],
            sites=np.searchsorted(left, sites.sites[mask]).astype(np.int64),
            patients=sites.patients[mask],
        )
        if evidence is not None and np.count_nonzero(comparable_classes(part, settings.min_class_count) >= 2) < (
            settings.min_sites
        ):
            break
        found = weigh(features[mask], part, settings)
        evidence = _merged(evidence, found, left, sites.num_sites)
        passes[left] += 1
        accused = found.disagreement.family <= settings.rate
        if not accused.any():
            break
        left = left[~accused]
    return Examination(evidence, judge(sites, evidence, settings), passes)


def _merged(before: SiteEvidence | None, found: SiteEvidence, left: Ints, num_sites: int) -> SiteEvidence:
    """Evidence on all sites: what was `found` of those at `left`, and what was known of the others."""

    def put(name: str, of: str | None = None) -> NDArray[np.float64]:
        old = None if before is None else _value(before, name, of)
        merged = np.full(num_sites, np.nan) if old is None else old.copy()
        merged[left] = _value(found, name, of)
        return merged

    calibrated = {
        name: Calibrated(**{f.name: put(name, f.name) for f in fields(Calibrated)})
        for name in ("disagreement", "inconsistency", "shift")
    }
    return SiteEvidence(**calibrated, stability=put("stability"), detection=put("detection"), share=put("share"))


def _value(evidence: SiteEvidence, name: str, of: str | None) -> NDArray[np.float64]:
    value = getattr(evidence, name)
    return np.asarray(value if of is None else getattr(value, of), dtype=np.float64)
