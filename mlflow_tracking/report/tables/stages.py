"""Tables 2-4: finding noisy clients, correcting labels, and what each part contributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_tracking.report.model import Cell, Column, Line, Table
from mlflow_tracking.report.paper import (
    ABLATIONS,
    NUM_CONDITIONS,
    OTHERS,
    OURS,
    Printed,
    conditions,
    shown_method,
    table_value,
)
from mlflow_tracking.report.statistics import Scores
from mlflow_tracking.report.tables.accuracy import ACCURACY, MIXED
from mlflow_tracking.report.tables.cells import EMPTY, Candidate, candidate, compared, warned
from mlflow_tracking.report.tables.scores import Bench, compared_methods, data_kinds, main_benches
from mlflow_tracking.report.tables.words import NOISE_HEADS, OVER_SEEDS, paper_note, several_conditions

CLEAN_F1 = "ident/clean_f1"
RELABELING = {
    "relabel/edit": ("Edit rate", "edit_rate"),
    "relabel/recovery": ("Recovery", "recovery"),
    "relabel/precision": ("Correction precision", "correction_precision"),
    "relabel/false_correction": ("False correction", "false_correction_rate"),
    "relabel/residual": ("Residual noise", "residual_noise"),
}
"""Metric, heading and the paper's name."""
FIRST = [*OTHERS.values(), OURS]


def identification_table(found: Sequence[Bench]) -> Table:
    """The paper's Table 2: F1 of the clean clients, per task and method."""
    noises = list(dict.fromkeys(noise for bench in found for noise in bench.noises))
    lines: list[Line] = []
    for bench in found:
        methods = [m for m in compared_methods([bench]) if _defined(bench.scores(m, CLEAN_F1))]
        methods = [*(m for m in FIRST if m in methods), *(m for m in methods if m not in FIRST)]
        cells: list[dict[str, Cell]] = []
        for noise in noises:
            own = {m: _averaged(bench, m, CLEAN_F1, noise, "2", "clean_client_f1") for m in methods}
            cells.append(compared(own, competing=methods))
        lines += [
            Line((bench.title, shown_method(m)), {**bench.facets, "method": m}, tuple(column[m] for column in cells))
            for m in methods
        ]
    columns = tuple(Column(f"{NOISE_HEADS.get(n, n)} F1", {"noise": n}) for n in noises)
    caption = (
        "F1 score of the clients judged clean, over noise ratios and heterogeneity. The paper compares FedSIR and "
        "OCT-FedSIR; other methods with a verdict on clients follow. Runs without a defined score (no client judged "
        f"clean, none truly clean) are left out. {OVER_SEEDS} {paper_note(found)}"
    )
    return Table(
        "2", "Clean-client identification", caption, ("Data set", "Method"), columns, tuple(lines), data_kinds(found)
    )


def relabeling_table(found: Sequence[Bench]) -> Table:
    """The paper's Table 3: what OCT-FedSIR's relabelling does to the labels of the clients it corrects."""
    lines = [
        Line(
            (bench.title, noise, shown_method(OURS)),
            {**bench.facets, "noise": noise, "method": OURS},
            tuple(
                compared({OURS: _averaged(bench, OURS, metric, noise, "3", printed)})[OURS]
                for metric, (_, printed) in RELABELING.items()
            ),
        )
        for bench in found
        for noise in bench.noises
        if OURS in bench.entries
    ]
    columns = tuple(Column(heading, {}) for heading, _ in RELABELING.values())
    caption = (
        "Relabelling at the clients selected for correction, at the last change of labels, over noise ratios and "
        f"heterogeneity; an undefined share (precision without a correction) is left out. {OVER_SEEDS} "
        f"{paper_note(found)}"
    )
    heads = ("Data set", "Noise", "Method")
    return Table("3", "Spectral relabelling", caption, heads, columns, tuple(lines), data_kinds(found))


def _averaged(bench: Bench, method: str, metric: str, noise: str, table: str, printed: str) -> Candidate:
    own = [c for c in bench.conditions if c[0] == noise]
    scores = {key: value for key, value in bench.scores(method, metric, own).items() if value == value}
    have = {condition for condition, _ in scores}
    paper = table_value(table, bench.task, noise, method, printed)
    made = candidate(scores, bench.runs_of(method, have), paper)
    if paper is None or made.cell.mean is None or have == conditions(noise):
        return made
    note = f"the paper's value is over its {several_conditions(len(conditions(noise)))}, this one over {len(have)}"
    return Candidate(warned(made.cell, note), made.conditions)


def ablation_table(found: Sequence[Bench]) -> Table:
    """The paper's Table 4: OCT-FedSIR without one part at a time, over conditions and seeds that all of them have."""
    main = main_benches(found)
    groups: list[tuple[str, Mapping[str, str], Sequence[Bench]]] = [("Overall", {}, main)]
    groups += [(bench.title, bench.facets, [bench]) for bench in found if _has_parts(bench)]
    columns: list[Column] = []
    cells: list[dict[str, Cell]] = []
    sizes: list[str] = []
    for title, facets, of in groups:
        mean, difference, number = _ablation(of, overall=title == "Overall")
        columns += [Column("Accuracy", facets, (title,)), Column("Δ", facets, (title,))]
        cells += [mean, difference]
        sizes.append(f"{title} {number}")
    lines = tuple(
        Line((theirs,), {"method": ours}, tuple(column.get(ours, EMPTY) for column in cells))
        for theirs, ours in ABLATIONS.items()
    )
    caption = (
        "Mean accuracy of OCT-FedSIR without one of its parts, and its difference to the complete method in percentage "
        "points, condition by condition and seed by seed. Only conditions and seeds that every configuration present "
        f"has; conditions: {', '.join(sizes)}. {OVER_SEEDS} {paper_note(found)} They are over its "
        f"{NUM_CONDITIONS} conditions."
    )
    return Table("4", "Ablation", caption, ("Configuration",), tuple(columns), lines, data_kinds(found))


def _has_parts(bench: Bench) -> bool:
    return OURS in bench.entries and any(label in bench.entries for label in ABLATIONS.values() if label != OURS)


def _ablation(found: Sequence[Bench], overall: bool) -> tuple[dict[str, Cell], dict[str, Cell], int]:
    """Accuracy and difference per configuration, and the number of conditions."""
    used = [bench for bench in found if _has_parts(bench)]
    if len({bench.data_kind for bench in used}) > 1:
        none = {label: warned(EMPTY, MIXED) for label in ABLATIONS.values()}
        return none, none, 0
    scores = {label: _pooled(used, label) for label in ABLATIONS.values()}
    present = [label for label in scores if scores[label]]
    if OURS not in present:
        return {}, {}, 0
    shared = set.intersection(*(set(scores[label]) for label in present))
    number = len({condition for condition, _ in shared})
    left = len({condition for label in present if label != OURS for condition, _ in scores[label]}) - number
    notes = [f"{several_conditions(left)} left out that not every configuration has"] if left else []
    if overall and number != NUM_CONDITIONS:
        notes.append(f"the paper's value is over its {NUM_CONDITIONS} conditions, this one over {number}")
    means, differences = {}, {}
    for label in present:
        own = {key: scores[label][key] for key in shared}
        change = {key: scores[label][key] - scores[OURS][key] for key in shared}
        printed: list[Printed | None] = [
            table_value("4", "ALL", "all", label, metric) if overall else None
            for metric in ("accuracy_mean", "delta_vs_full_pp")
        ]
        means[label] = warned(candidate(own, len(own), printed[0]).cell, *notes)
        if label != OURS:
            differences[label] = warned(candidate(change, len(change), printed[1]).cell, *notes)
    return means, differences, number


def _pooled(found: Sequence[Bench], label: str) -> Scores:
    return {
        ((bench.task, condition), seed): value
        for bench in found
        for (condition, seed), value in bench.scores(label, ACCURACY).items()
    }


def _defined(scores: Scores) -> bool:
    return any(value == value for value in scores.values())
