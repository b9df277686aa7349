"""Beyond the paper's tables: ranks, tests and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsir.events import TOTALS
from mlflow_tracking.report.model import Cell, Column, Line, Table
from mlflow_tracking.report.paper import OURS, REFERENCES, shown_method
from mlflow_tracking.report.results import Results
from mlflow_tracking.report.statistics import Scores, friedman, holm, paired, ranks
from mlflow_tracking.report.tables.accuracy import ACCURACY, MIXED
from mlflow_tracking.report.tables.cells import EMPTY, Candidate, compared, warned
from mlflow_tracking.report.tables.scores import Bench, compared_methods, data_kinds, main_benches
from mlflow_tracking.report.tables.words import NOISE_HEADS, several_conditions

SECONDS = ("seconds/data", "seconds/compute")
TOO_FEW = 6
"""Conditions that differ, from which on a two-sided signed-rank test can fall below 0.05 at all."""


def rank_table(found: Sequence[Bench]) -> Table:
    """Mean rank of each method over conditions, 1 for the best."""
    methods = [m for m in compared_methods(found) if m not in REFERENCES]
    columns: list[Column] = []
    cells: list[dict[str, Cell]] = []
    said: list[str] = []
    for heading, facets, group, scores in _scopes(found):
        columns.append(Column(heading, facets, (group,)))
        column, words = _ranked(scores) if scores is not None else ({m: warned(EMPTY, MIXED) for m in methods}, "")
        cells.append(column)
        if words:
            said.append(f"{group} {heading}: {words}")
    lines = tuple(
        Line((shown_method(m),), {"method": m}, tuple(column.get(m, EMPTY) for column in cells)) for m in methods
    )
    caption = (
        "Mean rank by accuracy within each condition (means over seeds; ties share the mean of their ranks), over "
        "conditions that all ranked methods have. A method that lacks more than half of them is not ranked. Friedman's "
        f"test of no difference among methods: {'; '.join(said) or 'not possible'}."
    )
    return Table("ranks", "Ranks", caption, ("Method",), tuple(columns), lines, data_kinds(found), unit="")


def _scopes(found: Sequence[Bench]) -> list[tuple[str, dict[str, str], str, dict[str, Scores] | None]]:
    """Heading, facets, group and accuracies per method: each task and noise, then everything at the main budgets."""
    scopes: list[tuple[str, dict[str, str], str, dict[str, Scores] | None]] = []
    for bench in found:
        methods = [m for m in compared_methods([bench]) if m not in REFERENCES]
        for noise in bench.noises:
            own = [c for c in bench.conditions if c[0] == noise]
            scores = {m: bench.scores(m, ACCURACY, own) for m in methods}
            scopes.append((NOISE_HEADS.get(noise, noise), {**bench.facets, "noise": noise}, bench.title, scores))
    main = main_benches(found)
    if len({bench.data_kind for bench in main}) > 1:
        return [*scopes, ("all", {}, "Overall", None)]
    everything: dict[str, Scores] = {
        m: {
            ((bench.task, condition), seed): value
            for bench in main
            for (condition, seed), value in bench.scores(m, ACCURACY).items()
        }
        for m in compared_methods(main)
        if m not in REFERENCES
    }
    return [*scopes, ("all", {}, "Overall", everything)]


def _ranked(scores: dict[str, Scores]) -> tuple[dict[str, Cell], str]:
    """A cell per ranked method, and Friedman's test in words."""
    means = {m: _over_seeds(own) for m, own in scores.items()}
    everything = {condition for own in means.values() for condition in own}
    ranked = [m for m, own in means.items() if 2 * len(own) >= len(everything) and own]
    shared = [c for c in everything if all(c in means[m] for m in ranked)]
    cells = {m: warned(EMPTY, "lacks more than half of the conditions") for m in means if m not in ranked and means[m]}
    if len(ranked) < 2 or not shared:
        return {**cells, **{m: warned(EMPTY, "no condition in common with the others") for m in ranked}}, ""
    block: NDArray[np.float64] = np.array([[means[m][c] for m in ranked] for c in shared])
    mean_ranks = ranks(block.round(12)).mean(axis=0)
    note = () if len(shared) == len(everything) else (f"over {len(shared)} of {len(everything)} conditions",)
    chosen = set(shared)
    candidates = {}
    for method, value in zip(ranked, mean_ranks, strict=True):
        used = [seed for condition, seed in scores[method] if condition in chosen]
        cell = Cell(float(value), seeds=tuple(sorted(set(used))), runs=len(used), warnings=note)
        candidates[method] = Candidate(cell, frozenset(chosen))
    test = friedman(block.round(12))
    words = (
        f"{several_conditions(len(shared))}, {len(ranked)} methods"
        if test is None
        else f"χ² = {test.statistic:.1f}, p = {_p(test.p)} ({several_conditions(len(shared))}, {len(ranked)} methods)"
    )
    return {**cells, **compared(candidates, lowest=True)}, words


def _over_seeds(scores: Scores) -> dict[object, float]:
    values: dict[object, list[float]] = {}
    for (condition, _), value in scores.items():
        values.setdefault(condition, []).append(value)
    return {condition: fmean(own) for condition, own in values.items()}


def paired_table(found: Sequence[Bench]) -> Table:
    """OCT-FedSIR against every other method, condition by condition."""
    lines: list[Line] = []
    for heading, facets, group, scores in _scopes(found):
        if scores is None or not scores.get(OURS):
            continue
        outcomes = {m: paired(scores[OURS], own) for m, own in scores.items() if m != OURS}
        known = {m: o for m, o in outcomes.items() if o is not None}
        tested = {m: o.p for m, o in known.items() if o.p is not None}
        corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
        everything = {condition for own in scores.values() for condition, _ in own}
        for method, outcome in known.items():
            notes = []
            if outcome.conditions < len(everything):
                notes.append(f"over {outcome.conditions} of {len(everything)} conditions")
            if outcome.better + outcome.worse < TOO_FEW:
                notes.append("too few conditions for a p below 0.05")
            p = tested.get(method)
            cells = (Cell(p, warnings=tuple(notes)), Cell(corrected.get(method), warnings=tuple(notes)))
            labels = (
                f"{group} {heading}",
                shown_method(method),
                str(outcome.conditions),
                f"{100 * outcome.difference:+.2f}",
                f"{outcome.better} / {outcome.equal} / {outcome.worse}",
            )
            lines.append(Line(labels, {**facets, "method": method}, cells))
    caption = (
        "OCT-FedSIR against each method: mean difference in accuracy (percentage points), conditions in which it is "
        "better, equal and worse, and the two-sided Wilcoxon signed-rank test over conditions (means over the seeds "
        "that both have), before and after Holm's correction over the methods of a scope. Conditions of a task share "
        "test images and partitions, so the tests take them for more independent than they are."
    )
    return Table(
        "tests",
        "Paired tests",
        caption,
        ("Scope", "Against", "Conditions", "Difference", "Better / equal / worse"),
        (Column("p", {}), Column("p (Holm)", {})),
        tuple(lines),
        data_kinds(found),
        unit="",
        digits=4,
    )


def cost_table(found: Sequence[Bench], results: Results) -> Table:
    """What a run of each method costs, and its accuracy."""
    totals = results.totals((*TOTALS, *SECONDS), results.runs["mlflow_id"].tolist())
    lines: list[Line] = []
    for bench in found:
        runs = bench.runs.join(totals, on="mlflow_id", rsuffix=" (total)")
        for method in compared_methods([bench]):
            rows = runs[runs["method"] == method]
            worked = rows[[f"{key} (total)" for key in SECONDS]].sum(axis=1, min_count=1)
            cells = (
                _cost(rows["seconds"], rows),
                _cost(worked, rows),
                _cost(rows["cost/client_epochs (total)"], rows),
                _cost(rows["cost/forward_units (total)"], rows),
                _cost(rows["bytes/up (total)"] / 1e6, rows),
                _cost(rows["bytes/down (total)"] / 1e6, rows),
                _cost(100 * rows[ACCURACY], rows),
            )
            lines.append(Line((bench.title, shown_method(method)), {**bench.facets, "method": method}, cells))
    heads = (
        "Seconds per run",
        "Seconds of client work",
        "Client-epochs",
        "Forward passes",
        "MB up",
        "MB down",
        "Accuracy %",
    )
    caption = (
        "Means over all runs ± standard deviation over runs. Seconds per run are those of the clock, also while other "
        "runs went on beside it, without runs that were interrupted; client work is the time that workers spent on "
        "batches and computing. Client-epochs: passes of training over a client's images, stage I included; forward "
        "passes: passes without gradients, in client-epochs. A method that lacks conditions has costs of those it has."
    )
    columns = tuple(Column(head, {}) for head in heads)
    return Table(
        "costs", "Costs", caption, ("Data set", "Method"), columns, tuple(lines), data_kinds(found), unit="", digits=1
    )


def _cost(values: pd.Series[float], rows: pd.DataFrame) -> Cell:
    known = values[values.notna()]
    if known.empty:
        return EMPTY
    sd = float(known.std(ddof=1))
    seeds = tuple(sorted({int(seed) for seed in rows.loc[known.index, "seed"]}))
    return replace(EMPTY, mean=float(known.mean()), sd=sd if math.isfinite(sd) else None, seeds=seeds, runs=len(known))


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"
