"""Correct labels of predicted-noisy clients where two spectral criteria agree (eq. 23-27).

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.spectral.references import ClassReference

RelabelingRule = Literal["agree", "sr", "sn"]


@dataclass(frozen=True)
class Relabeling:
    """Outcome for one client's n images.

    targets: (n,) int64 corrected labels y*. agreement: (n,) bool, both criteria name the same class and the
    image was up for relabelling. representative, residual: (n,) int64 class named by each criterion, -1 where
    none could be formed. representative_margin, residual_margin: (n,) float64 >= 0, distance between best and
    second-best score for a feature of length 1; NaN where no class was named.
    """

    targets: NDArray[np.int64]
    agreement: NDArray[np.bool_]
    representative: NDArray[np.int64]
    residual: NDArray[np.int64]
    representative_margin: NDArray[np.float64]
    residual_margin: NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceFacts:
    """Where the reference of a class came from.

    providers: ids of the clean clients behind it. directions: residual rows, 0 without a reference.
    strength: see `ClassReference`, NaN without a reference.
    """

    class_name: str
    providers: tuple[int, ...]
    directions: int
    strength: float


@dataclass(frozen=True)
class RelabelingEvidence:
    """What decided the last relabelling checkpoint.

    margins: per client (n_k, 2) float32, S_R and S_N margin, NaN where nothing was decided. agreement: per client
    (n_k,) bool, images on which both criteria agreed; true at clients that were not relabelled. references: one
    per class.
    """

    margins: tuple[NDArray[np.float32], ...]
    agreement: tuple[NDArray[np.bool_], ...]
    references: tuple[ReferenceFacts, ...]


def spectral_scores(
    features: NDArray[np.floating], references: Sequence[ClassReference | None]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S_R and S_N (n, C) float64 of features (n, d); NaN columns for unreferenced classes.

    S_R = |v_c . z| (eq. 23; absolute, since the sign of v_c is arbitrary, Q12). S_N = ||V_c^T z|| over
    the root of the actual number of rows (eq. 24), so that a class with fewer directions gains nothing by it.
    """
    rows = np.asarray(features, dtype=np.float64)
    alignment = np.full((len(rows), len(references)), np.nan)
    leakage = np.full((len(rows), len(references)), np.nan)
    for c, reference in enumerate(references):
        if reference is not None:
            alignment[:, c] = np.abs(rows @ reference.leading)
            inside = rows @ reference.residual.T
            leakage[:, c] = np.sqrt(np.square(inside).sum(axis=1) / max(len(reference.residual), 1))
    return alignment, leakage


def relabel(
    features: NDArray[np.floating],
    references: Sequence[ClassReference | None],
    observed: NDArray[np.int64],
    rule: RelabelingRule = "agree",
    keep_unreferenced: bool = True,
) -> Relabeling:
    """Corrected labels from features (n, d) and observed labels (n,) (eq. 25-27).

    `agree` changes a label only if arg max S_R = arg min S_N; `sr` and `sn` follow one criterion. Candidates
    are the referenced classes. `keep_unreferenced`: images labelled with a class without reference keep their
    label, since the criteria cannot argue for it. Images whose features are zero or not finite keep theirs,
    and with fewer than two referenced classes nothing changes.
    """
    count = len(observed)
    referenced = [c for c, r in enumerate(references) if r is not None]
    length = np.linalg.norm(np.asarray(features, dtype=np.float64), axis=1)
    decidable = np.isfinite(length) & (length > 0)
    representative, residual = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    first_margin, second_margin = np.full(count, np.nan), np.full(count, np.nan)
    targets = observed.astype(np.int64)
    if len(referenced) < 2 or not decidable.any():
        none = np.zeros(count, dtype=np.bool_)
        return Relabeling(targets, none, representative, residual, first_margin, second_margin)

    # Scores of unit features: dividing by a positive number changes no decision and makes margins comparable.
    unit = np.asarray(features, dtype=np.float64)[decidable] / length[decidable, None]
    alignment, leakage = (scores[:, referenced] for scores in spectral_scores(unit, references))
    names = np.asarray(referenced, dtype=np.int64)
    representative[decidable] = names[alignment.argmax(axis=1)]  # eq. 25
    residual[decidable] = names[leakage.argmin(axis=1)]  # eq. 26
    first_margin[decidable] = _lead(alignment)
    second_margin[decidable] = _lead(-leakage)

    eligible = decidable & np.isin(observed, names) if keep_unreferenced else decidable
    agreement = eligible & (representative == residual)
    proposal = residual if rule == "sn" else representative
    accepted = agreement if rule == "agree" else eligible
    targets = np.where(accepted, proposal, targets)  # eq. 27
    return Relabeling(targets, agreement, representative, residual, first_margin, second_margin)


def _lead(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) best minus second-best of scores (n, C), C >= 2."""
    ordered = np.sort(scores, axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2], dtype=np.float64)
