"""All tables, and what a reader must know beside them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from mlflow_tracking.report.grouping import NO_NOISE
from mlflow_tracking.report.model import Report, Table
from mlflow_tracking.report.paper import ALL_CLEAN
from mlflow_tracking.report.results import Results
from mlflow_tracking.report.tables.accuracy import SUPPLEMENT, accuracy_table, condition_tables
from mlflow_tracking.report.tables.comparison import cost_table, paired_table, rank_table
from mlflow_tracking.report.tables.scores import PARTS, Bench, benches, data_kinds
from mlflow_tracking.report.tables.stages import ablation_table, identification_table, relabeling_table
from mlflow_tracking.report.tables.words import paper_note

PAPER_TABLES = ("1", "2", "3", "4", *SUPPLEMENT.values())


def build_report(results: Results, title: str, missing: Sequence[str] | None = None) -> Report:
    """Everything that is said in words and figures: Tables 1-4 and S1-S6 as far as there are runs for them, then ranks,
    tests and costs.

    missing: cells that a grid asks for and nobody has run, in words. Without it, a complete grid is taken to be every
    condition, method and seed that occurs within a task and budget.
    """
    found = benches(results)
    absent = list(missing) if missing is not None else _missing(found)
    open_ = [f"{row.name}: {row.error}" for row in results.unfinished[["name", "error"]].itertuples(index=False)]
    failed = [f"{row.name}: {row.error}" for row in results.failed[["name", "error"]].itertuples(index=False)]
    tables = _tables(results, found)
    return Report(
        title=title,
        source=results.source,
        data_kinds=results.data_kinds,
        warnings=(*_warnings(results, found), *results.warnings, *_empty_tables(tables)),
        missing=(*absent, *(f"not finished: {text}" for text in open_)),
        failed=tuple(failed),
        tables=tables,
    )


def _tables(results: Results, found: Sequence[Bench]) -> tuple[Table, ...]:
    made = [
        accuracy_table(found),
        identification_table(found),
        relabeling_table(found),
        ablation_table(found),
        *condition_tables(found),
        rank_table(found),
        paired_table(found),
        cost_table(found, results),
    ]
    return tuple(
        table for table in made if table.lines and any(c.mean is not None for x in table.lines for c in x.cells)
    )


def _warnings(results: Results, found: Sequence[Bench]) -> list[str]:
    texts = []
    kinds = data_kinds(found)
    if "phantom" in kinds:
        texts.append(f"{'Some' if len(kinds) > 1 else 'All'} figures are on phantom images. {paper_note(found)}")
    several: dict[str, list[Bench]] = defaultdict(list)
    for bench in found:
        if not bench.only_budget:
            several[bench.task].append(bench)
    for task, own in several.items():
        budgets = "; ".join(f"{bench.budget} ({len(bench.runs)} runs)" for bench in own)
        texts.append(f"{task} has {len(own)} budgets, which never share a cell: {budgets}.")
    runs = results.runs
    clean = int(((runs["noise"] == NO_NOISE) & (runs["method"] != ALL_CLEAN)).sum())
    if clean:
        texts.append(f"{clean} runs without noise of other methods than FedAvg are in no table but that of the costs.")
    for bench in found:
        drawn = bench.runs[bench.runs["method"] != ALL_CLEAN].groupby("alpha")["clean_clients"].nunique()
        texts += [
            f"{bench.title}: the number of clean clients differs between the runs of α = {alpha:g}."
            for alpha in drawn[drawn > 1].index
        ]
    return texts


def _empty_tables(tables: Sequence[Table]) -> list[str]:
    made = {table.key for table in tables}
    absent = [key for key in PAPER_TABLES if key not in made]
    return [f"Of the paper's tables, no run has what {', '.join(absent)} would show."] if absent else []


def _missing(found: Sequence[Bench]) -> list[str]:
    """Per task, noise and method the condition and seed that others have: `η 0.3, α 2, seed 1`.

    Configurations of the ablation are compared with each other, since they are often run on fewer conditions.
    """
    texts = []
    for bench in found:
        seeds = sorted({entry.seed for entries in bench.entries.values() for entry in entries})
        of_parts = {e.condition for part in PARTS for e in bench.entries.get(part, ())}
        for noise, method in itertools.product(bench.noises, bench.methods):
            have = {(e.condition, e.seed) for e in bench.entries[method]}
            everything = of_parts if method in PARTS else bench.conditions
            own = sorted((c for c in everything if c[0] == noise), key=lambda c: (c[1], -c[2]))
            absent = [(c, seed) for c in own for seed in seeds if (c, seed) not in have]
            if absent:
                places = "; ".join(f"η {ratio:g}, α {alpha:g}, seed {seed}" for (_, ratio, alpha), seed in absent)
                texts.append(f"{bench.title}, {noise}, {method}: {len(absent)} of {len(own) * len(seeds)} ({places})")
    return texts
