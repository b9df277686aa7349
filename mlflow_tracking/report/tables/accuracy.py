"""Table 1, and Tables S1-S6 with every condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_tracking.report.model import Cell, Column, Line, Table
from mlflow_tracking.report.paper import (
    ALL_CLEAN,
    PRUNING,
    Condition,
    Printed,
    block_value,
    condition_value,
    mean_value,
    overall_value,
    shown_method,
)
from mlflow_tracking.report.tables.cells import EMPTY, Candidate, candidate, compared, warned
from mlflow_tracking.report.tables.scores import Bench, compared_methods, data_kinds, main_benches
from mlflow_tracking.report.tables.words import INTERVALS, NOISE_HEADS, paper_note, plain

ACCURACY, LOW, HIGH = "final/accuracy", "final/accuracy_low", "final/accuracy_high"
SUPPLEMENT = {
    ("Kermany", "symmetric"): "S1",
    ("Kermany", "asymmetric"): "S2",
    ("UIC", "symmetric"): "S3",
    ("UIC", "asymmetric"): "S4",
    ("WF", "symmetric"): "S5",
    ("WF", "asymmetric"): "S6",
}
MIXED = "phantom and real images have no mean in common"


def accuracy_table(found: Sequence[Bench]) -> Table:
    """The paper's Table 1: a line per method, a column per task and noise, and one over everything."""
    methods = compared_methods(found)
    columns: list[Column] = []
    cells: list[Mapping[str, Cell]] = []
    for bench in found:
        for noise in bench.noises:
            conditions = [c for c in bench.conditions if c[0] == noise]
            facets = {**bench.facets, "noise": noise}
            columns.append(Column(NOISE_HEADS.get(noise, noise), facets, (bench.title,)))
            cells.append(compared({m: _mean_of(bench, m, conditions) for m in methods}))
    main = main_benches(found)
    columns.append(Column("all", {}, ("Overall",)))
    cells.append(_overall(main, methods))
    lines = tuple(
        Line((shown_method(m),), {"method": m}, tuple(column.get(m, EMPTY) for column in cells)) for m in methods
    )
    counts = "; ".join(
        f"{bench.title} {NOISE_HEADS.get(noise, noise)} {sum(c[0] == noise for c in bench.conditions)}"
        for bench in found
        for noise in bench.noises
    )
    caption = (
        "Mean accuracy of the last round over noise ratios and heterogeneity: first over the seeds of a condition, "
        f"then over conditions ({counts}). Best and second best among methods that have every condition; pruning and "
        f"all-clean FedAvg are references. {_which_budgets(main)}{INTERVALS} {paper_note(found)}"
    )
    return Table("1", "Accuracy over conditions", caption, ("Method",), tuple(columns), lines, data_kinds(found))


def _which_budgets(main: Sequence[Bench]) -> str:
    several = [bench for bench in main if not bench.only_budget]
    if not several:
        return ""
    return f"Overall is over the budget with most runs: {'; '.join(bench.title for bench in several)}. "


def _mean_of(bench: Bench, method: str, conditions: Sequence[Condition]) -> Candidate:
    scores = bench.scores(method, ACCURACY, conditions)
    have = {condition for condition, _ in scores}
    paper = mean_value(bench.task, method, [c for c in conditions if c in have]) if have else None
    images = (bench.scores(method, LOW, conditions), bench.scores(method, HIGH, conditions))
    return candidate(scores, bench.runs_of(method, conditions), paper, images)


def _overall(main: Sequence[Bench], methods: Sequence[str]) -> dict[str, Cell]:
    if len({bench.data_kind for bench in main}) > 1:
        return {method: warned(EMPTY, MIXED) for method in methods}
    candidates = {}
    for method in methods:
        scores, low, high = (
            {
                ((bench.task, condition), seed): value
                for bench in main
                for (condition, seed), value in bench.scores(method, metric).items()
            }
            for metric in (ACCURACY, LOW, HIGH)
        )
        have = {bench.task: {c for c, _ in bench.scores(method, ACCURACY)} for bench in main}
        paper = overall_value(method, {task: own for task, own in have.items() if own})
        runs = sum(bench.runs_of(method, bench.conditions) for bench in main)
        candidates[method] = candidate(scores, runs, paper, (low, high))
    return compared(candidates)


def condition_tables(found: Sequence[Bench]) -> list[Table]:
    """Tables S1-S6, and the same for other tasks, budgets and noises: heterogeneity and method against noise ratio."""
    made: list[Table] = []
    for bench in found:
        for noise in bench.noises:
            key = SUPPLEMENT.get((bench.task, noise), f"S-{plain(bench.task)}-{plain(noise)}")
            used = sum(t.key == key or t.key.startswith(f"{key}.") for t in made)
            made.append(_condition_table(bench, noise, key if used == 0 else f"{key}.{used + 1}"))
    return sorted(made, key=lambda table: (table.key not in SUPPLEMENT.values(), table.key))


def _condition_table(bench: Bench, noise: str, key: str) -> Table:
    own = [c for c in bench.conditions if c[0] == noise]
    ratios = sorted({ratio for _, ratio, _ in own})
    alphas = sorted({alpha for _, _, alpha in own}, reverse=True)
    methods = compared_methods([bench])
    columns = [Column(f"{100 * ratio:g} %", {"ratio": f"{ratio:g}"}) for ratio in ratios]
    columns.append(Column("mean", {}))
    lines: list[Line] = []
    for alpha in alphas:
        cells = [compared({m: _one(bench, m, (noise, ratio, alpha)) for m in methods}) for ratio in ratios]
        block = [c for c in own if c[2] == alpha]
        cells.append(compared({m: _block(bench, m, block) for m in methods}))
        clients = _clients(bench, alpha)
        lines += [
            Line(
                (f"{alpha:g}", clients, shown_method(m)),
                {"alpha": f"{alpha:g}", "method": m},
                tuple(column[m] for column in cells),
            )
            for m in methods
        ]
    caption = (
        f"Accuracy of the last round on {bench.title} under {noise} label noise, mean ± sample standard deviation over "
        "seeds. Best and second best among methods within one α; pruning and all-clean FedAvg are references. "
        f"The paper has one value per α for pruning, beside the mean. {INTERVALS} {paper_note([bench])}"
    )
    facets = {**bench.facets, "noise": noise}
    return Table(
        key,
        f"{bench.title}, {noise} noise",
        caption,
        ("α", "Clean / clients", "Method"),
        tuple(Column(c.label, {**facets, **c.facets}) for c in columns),
        tuple(lines),
        (bench.data_kind,),
    )


def _one(bench: Bench, method: str, condition: Condition) -> Candidate:
    images = (bench.scores(method, LOW, [condition]), bench.scores(method, HIGH, [condition]))
    scores = bench.scores(method, ACCURACY, [condition])
    paper = condition_value(bench.task, *condition, method)
    return candidate(scores, bench.runs_of(method, [condition]), paper, images)


def _block(bench: Bench, method: str, conditions: Sequence[Condition]) -> Candidate:
    """Over the ratios of one heterogeneity."""
    made = _mean_of(bench, method, conditions)
    if method not in (PRUNING, ALL_CLEAN) or made.cell.paper is None:
        return made
    noise, _, alpha = conditions[0]
    printed: Printed | None = block_value(bench.task, noise, alpha, method)
    if printed is None:
        return made
    images = (bench.scores(method, LOW, conditions), bench.scores(method, HIGH, conditions))
    scores = bench.scores(method, ACCURACY, conditions)
    return candidate(scores, bench.runs_of(method, conditions), printed, images)


def _clients(bench: Bench, alpha: float) -> str:
    """`3 / 30`, `1–2 / 5`: clean clients as drawn, of all."""
    rows = bench.runs[(bench.runs["alpha"] == alpha) & (bench.runs["method"] != ALL_CLEAN)]
    low, high = int(rows["clean_clients"].min()), int(rows["clean_clients"].max())
    clean = f"{low}" if low == high else f"{low}–{high}"
    return f"{clean} / {int(rows['clients'].iloc[0])}"
