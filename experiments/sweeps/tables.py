"""Tables of `fedsir sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from experiments.expansion import Plan

if TYPE_CHECKING:
    from experiments.sweeps.sweep import Tally
    from mlflow_tracking.states import RecordedState

STATUSES = ("finished", "failed", "interrupted", "missing")


def plan_table(plan: Plan) -> Table:
    """Axes with their chosen values, then methods and seeds."""
    table = Table(title=f"grid {plan.grid.name}")
    table.add_column("axis", no_wrap=True)
    table.add_column("values", justify="right")
    table.add_column("which", overflow="fold")
    for axis, labels in plan.chosen.items():
        table.add_row(axis, str(len(labels)), ", ".join(labels))
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
