"""Tables of `fedsir sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from experiments.console import percent
from experiments.expansion import Plan
from experiments.grid import METHOD, SEED
from experiments.sweeps.words import duration

if TYPE_CHECKING:
    from experiments.sweeps.estimate import Estimate
    from experiments.sweeps.queue import Tally
    from mlflow_tracking.states import RecordedState

STATUSES = ("finished", "failed", "interrupted", "missing")


def plan_table(plan: Plan) -> Table:
    """Axes with their chosen values, then methods and seeds; beside each value the runs that serve it."""
    table = Table(title=f"grid {plan.grid.name}")
    table.add_column("axis", no_wrap=True)
    table.add_column("values", justify="right")
    table.add_column("which (runs)", overflow="fold")
    for axis, runs in runs_per_value(plan).items():
        table.add_row(axis, str(len(runs)), _which(runs))
    return table


def _which(runs: Mapping[str, int]) -> str:
    if len(set(runs.values())) == 1:
        each = " each" if len(runs) > 1 else ""
        return f"{', '.join(runs)} ({next(iter(runs.values()))}{each})"
    return ", ".join(f"{label} ({number})" for label, number in runs.items())


def runs_per_value(plan: Plan) -> dict[str, dict[str, int]]:
    """Per axis and value the number of runs; one that does not depend on an axis counts for each of its values."""
    counts: dict[str, Counter[str]] = {axis: Counter() for axis in plan.chosen}
    axes = list(plan.grid.axes)
    for run in plan.runs:
        values = {axis: {cell.condition[i] for cell in run.cells} for i, axis in enumerate(axes)}
        values[METHOD] = {cell.method for cell in run.cells}
        values[SEED] = {str(cell.seed) for cell in run.cells}
        for axis, labels in values.items():
            counts[axis].update(labels)
    return {axis: {label: counts[axis][label] for label in labels} for axis, labels in plan.chosen.items()}


def time_table(estimate: Estimate, seconds: Mapping[str, float]) -> Table:
    """Expected time of a run by method and images, and of all runs of the method."""
    spent: dict[tuple[str, str], list[float]] = {}
    for e in estimate.runs:
        if e.run.identity in seconds:
            spent.setdefault((e.run.cells[0].method, e.run.source), []).append(seconds[e.run.identity])
    methods, sources = (list(dict.fromkeys(key[i] for key in spent)) for i in (0, 1))
    table = Table(title="expected time of one run, mean")
    table.add_column("method", no_wrap=True)
    for name in (*sources, "all runs"):
        table.add_column(name, justify="right", overflow="fold")
    for method in methods:
        of = {source: spent.get((method, source), []) for source in sources}
        means = [duration(sum(times) / len(times)) if times else "" for times in of.values()]
        table.add_row(method, *means, duration(sum(map(sum, of.values()))))
    return table


def outcome_table(title: str, tally: Tally) -> Table:
    """How many runs ended how."""
    table = Table(title=title)
    table.add_column("runs")
    table.add_column("number", justify="right")
    table.add_row("done", str(tally.done))
    table.add_row("failed", str(len(tally.failed)))
    table.add_row("skipped: finished before", str(tally.finished_before))
    for words, number in (
        ("skipped: failed before", len(tally.failed_before)),
        ("skipped: another process works on it", len(tally.held)),
        ("not recorded: the store was out of reach", len(tally.undelivered)),
        ("left because of --limit", tally.left),
    ):
        if number:
            table.add_row(words, str(number))
    return table


def status_table(plan: Plan, states: Mapping[str, RecordedState]) -> Table:
    """Per method how many of its runs are in which state; a run that several results share counts once."""
    counts: dict[str, Counter[str]] = {}
    for run in plan.runs:
        state = states.get(run.identity)
        counts.setdefault(run.cells[0].method, Counter())["missing" if state is None else state.status] += 1
    table = Table(title=f"grid {plan.grid.name}")
    table.add_column("method")
    for name in ("runs", *STATUSES):
        table.add_column(name, justify="right")
    methods = [label for label in plan.grid.methods if label in counts]
    for label in methods:
        table.add_row(label, str(counts[label].total()), *(str(counts[label][s]) for s in STATUSES))
    total = sum(counts.values(), Counter())
    table.add_section()
    table.add_row("all", str(total.total()), *(str(total[s]) for s in STATUSES))
    return table


def usage_lines(tally: Tally) -> list[str]:
    """What the workers' time went into; empty where there was nothing to do or there were no actors."""
    if tally.work is None or not tally.done or not tally.seconds:
        return []
    whole = tally.seconds * tally.slots
    training, clients = tally.work.training + tally.work.data, tally.work.compute - tally.work.training
    idle = max(0.0, whole - tally.work.data - tally.work.compute)
    return [
        f"{tally.done} runs in {duration(tally.seconds)} on {tally.slots} workers: {percent(training / whole)} % of "
        f"their time in training steps and the batches for them, {percent(clients / whole)} % in other work of clients "
        f"(forward passes, spectra), {percent(idle / whole)} % without work ({idle / tally.done:.2f} s per run)"
    ]
