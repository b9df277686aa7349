"""What relabelling did to the labels, as tables; pure functions of arrays that know the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsir.evaluation.relabeling import relabeling_figures
from fedsir.events import RunResult
from fedsir.federation.federation import Federation, Truth
from fedsir.spectral.relabeling import ReferenceFacts

Labels = Sequence[NDArray[np.integer]]
Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

OUTCOMES = ("corrected rightly", "corrected wrongly", "kept right", "kept wrong")
CRITERIA = ("S_R", "S_N")
FLOWS = ("true to observed", "observed to corrected", "true to corrected")
FIGURES = ("edit", "recovery", "precision", "false_correction", "residual")
MARGIN_BINS = 40


@dataclass(frozen=True)
class Relabeled:
    """Labels of the clients whose labels a method may change, client by client.

    clients: their ids. true, observed: per client (n_k,) labels. checkpoints: rounds finished before each change
    of labels, with the labels after it. margins: per client (n_k, 2) margins of S_R and S_N at the last
    checkpoint, NaN without a decision. agreement: per client (n_k,) bool, both criteria agreed there.
    """

    class_names: tuple[str, ...]
    clients: tuple[int, ...]
    true: Labels
    observed: Labels
    checkpoints: tuple[tuple[int, Labels], ...]
    margins: tuple[NDArray[np.floating], ...] | None = None
    agreement: tuple[Flags, ...] | None = None

    @property
    def corrected(self) -> Labels:
        """Labels after the last checkpoint."""
        return self.checkpoints[-1][1] if self.checkpoints else self.observed


def relabeled(federation: Federation, truth: Truth, result: RunResult) -> Relabeled | None:
    """What a finished run says about relabelling; None if its labels never came up for a change.

    Where a method judges clients, it relabels those that it takes for noisy; if labels changed elsewhere, or
    without a verdict, all clients count.
    """
    history = result.label_history
    if not history:
        return None
    judged = result.predicted_noisy
    chosen = np.ones(federation.num_clients, dtype=np.bool_) if judged is None else judged
    elsewhere = any(
        (now != seen).any()
        for checkpoint in history
        for now, seen, inside in zip(checkpoint.labels, federation.observed, chosen, strict=True)
        if not inside
    )
    clients = range(federation.num_clients) if elsewhere else np.flatnonzero(chosen).tolist()
    return Relabeled(
        class_names=federation.class_names,
        clients=tuple(clients),
        true=[truth.labels[k] for k in clients],
        observed=[federation.observed[k] for k in clients],
        checkpoints=tuple((c.round, [c.labels[k] for k in clients]) for c in history),
        margins=None if result.margins is None else tuple(result.margins[k] for k in clients),
        agreement=None if result.agreement is None else tuple(result.agreement[k] for k in clients),
    )


def outcomes(true: NDArray[np.integer], observed: NDArray[np.integer], corrected: NDArray[np.integer]) -> Counts:
    """(n,) positions in `OUTCOMES`: was the label changed, and is it right now?"""
    return np.where(corrected != observed, 0, 2) + np.where(corrected == true, 0, 1)


def checkpoint_table(done: Relabeled) -> pd.DataFrame:
    """One row per checkpoint: counts of images and the shares of `fedsir.evaluation.relabeling`.

    after_round: rounds finished before the change. corrupted: wrong as observed. edited: other than observed; of
    these, recovered were wrong and are right now, spoiled were right before. still_wrong: wrong now.
    """
    everyone = np.ones(len(done.clients), dtype=np.bool_)
    true, observed = [np.asarray(y, dtype=np.int64) for y in done.true], _int64(done.observed)
    return pd.DataFrame(
        [
            {
                "after_round": round_,
                **_counts(_pooled(done.true), _pooled(done.observed), _pooled(labels)),
                **relabeling_figures(true, observed, _int64(labels), everyone),
            }
            for round_, labels in done.checkpoints
        ],
        columns=["after_round", *_COUNTS, *FIGURES],
    )


def relabeled_clients_table(done: Relabeled) -> pd.DataFrame:
    """One row per client: the counts of `checkpoint_table` after the last checkpoint and, with margins, how many
    images had no decision, on how many both criteria agreed, and the median margins of edited and kept images."""
    rows = []
    for position, client in enumerate(done.clients):
        true, observed, corrected = (labels[position] for labels in (done.true, done.observed, done.corrected))
        row: dict[str, float] = {"client": client, **_counts(true, observed, corrected)}
        if done.margins is not None:
            margins, edited = done.margins[position], corrected != observed
            row["undecided"] = int(np.isnan(margins).any(axis=1).sum())
            if done.agreement is not None:
                row["agreed"] = int((done.agreement[position] & ~np.isnan(margins).any(axis=1)).sum())
            for column, criterion in enumerate(CRITERIA):
                row[f"{criterion} edited"] = _median(margins[edited, column])
                row[f"{criterion} kept"] = _median(margins[~edited, column])
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["client", *_COUNTS])


def outcome_table(done: Relabeled) -> pd.DataFrame:
    """One row per outcome after the last checkpoint: images and, with margins, decided images and median margins."""
    outcome = _pooled_outcomes(done)
    table = pd.DataFrame({"outcome": OUTCOMES, "images": np.bincount(outcome, minlength=len(OUTCOMES))})
    if done.margins is not None:
        margins = np.concatenate([np.empty((0, 2)), *done.margins])
        decided = ~np.isnan(margins).any(axis=1)
        table["decided"] = np.bincount(outcome[decided], minlength=len(OUTCOMES))
        for criterion, medians in zip(CRITERIA, margin_medians(done), strict=True):
            table[f"{criterion} median"] = medians
    return table


def margin_counts(done: Relabeled) -> tuple[Array, Counts] | None:
    """Histograms of the margins: edges (2, bins + 1) per criterion and counts (2, 4, bins) per outcome.

    None without margins or without any decided image.
    """
    if done.margins is None:
        return None
    margins = np.concatenate([np.empty((0, 2)), *done.margins])
    decided = ~np.isnan(margins).any(axis=1)
    if not decided.any():
        return None
    margins, outcome = margins[decided], _pooled_outcomes(done)[decided]
    edges = np.stack([np.linspace(0.0, max(float(column.max()), 1e-6), MARGIN_BINS + 1) for column in margins.T])
    counts = np.stack(
        [
            [np.histogram(column[outcome == o], edge)[0] for o in range(len(OUTCOMES))]
            for column, edge in zip(margins.T, edges, strict=True)
        ]
    )
    return edges, counts.astype(np.int64)


def margin_medians(done: Relabeled) -> Array:
    """(2, 4) median margin per criterion and outcome; NaN where there is none."""
    if done.margins is None:
        return np.full((len(CRITERIA), len(OUTCOMES)), np.nan)
    margins, outcome = np.concatenate([np.empty((0, 2)), *done.margins]), _pooled_outcomes(done)
    return np.array([[_median(column[outcome == o]) for o in range(len(OUTCOMES))] for column in margins.T])


def margin_table(edges: Array, counts: Counts) -> pd.DataFrame:
    """`margin_counts` with one row per criterion, outcome and bin: low, high, images."""
    return pd.DataFrame(
        [
            {"criterion": criterion, "outcome": outcome, "low": edge[b], "high": edge[b + 1], "images": int(count[b])}
            for criterion, edge, per_outcome in zip(CRITERIA, edges, counts, strict=True)
            for outcome, count in zip(OUTCOMES, per_outcome, strict=True)
            for b in range(len(count))
        ]
    )


def label_flows(done: Relabeled, labels: Labels) -> dict[str, Counts]:
    """(C, C) images from each class (rows) to each class, per entry of `FLOWS`; `labels` are the corrected ones."""
    true, observed, corrected = _pooled(done.true), _pooled(done.observed), _pooled(labels)
    pairs = ((true, observed), (observed, corrected), (true, corrected))
    classes = len(done.class_names)
    flows = {}
    for name, (source, target) in zip(FLOWS, pairs, strict=True):
        flows[name] = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(flows[name], (source, target), 1)
    return flows


def flow_table(done: Relabeled) -> pd.DataFrame:
    """`label_flows` of every checkpoint, one row per pair of classes: after_round, flow, from, to, images."""
    return pd.DataFrame(
        [
            {"after_round": round_, "flow": name, "from": source, "to": target, "images": int(matrix[i, j])}
            for round_, labels in done.checkpoints
            for name, matrix in label_flows(done, labels).items()
            for i, source in enumerate(done.class_names)
            for j, target in enumerate(done.class_names)
        ]
    )


def reference_table(references: Sequence[ReferenceFacts]) -> pd.DataFrame:
    """One row per class: clients that provided its reference, directions of its residual space, strength.

    A class without providers has no reference, so no label can become it.
    """
    return pd.DataFrame(
        {
            "class": [r.class_name for r in references],
            "providers": [" ".join(map(str, r.providers)) for r in references],
            "directions": [r.directions for r in references],
            "strength": [r.strength for r in references],
        }
    )


_COUNTS = ("images", "corrupted", "edited", "recovered", "spoiled", "still_wrong")


def _counts(true: NDArray[np.integer], observed: NDArray[np.integer], corrected: NDArray[np.integer]) -> dict[str, int]:
    wrong, edited, right = observed != true, corrected != observed, corrected == true
    values = (np.ones_like(wrong), wrong, edited, wrong & right, ~wrong & edited, ~right)
    return {name: int(np.count_nonzero(value)) for name, value in zip(_COUNTS, values, strict=True)}


def _pooled(labels: Labels) -> Counts:
    return np.concatenate([np.empty(0, dtype=np.int64), *labels]).astype(np.int64)


def _int64(labels: Labels) -> list[Counts]:
    return [np.asarray(y, dtype=np.int64) for y in labels]


def _pooled_outcomes(done: Relabeled) -> Counts:
    return outcomes(_pooled(done.true), _pooled(done.observed), _pooled(done.corrected))


def _median(values: NDArray[np.floating]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")
