"""What was measured, as tables of at most 80 characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from experiments.bench.breakdown import Breakdown
from experiments.bench.growth import Growth
from experiments.bench.imports import Imports
from experiments.bench.memory import Memory, growth_of_memory
from experiments.bench.preparation import Preparation
from experiments.bench.ratio import Comparison
from experiments.bench.startup import Startup

RATIOS = {
    "run": "run / floor, both evaluated every round",
    "rounds": "its rounds alone / floor",
    "training": "training, the workers' time / floor's",
    "unevaluated": "whole run / floor without evaluation",
    "processor": "processor time of all processes / floor's",
}
LISTED = 12
"""Functions that a table shows; the file has more."""

LISTED_PACKAGES = 16
"""Packages that a table shows one by one."""


def ratio_tables(found: Sequence[Comparison]) -> list[Table]:
    """Ratios of all cases, then what the seconds of each went into."""
    ratios = _table("floor ratio, medians of pairs", ["", *(c.name for c in found)])
    for key, words in RATIOS.items():
        ratios.add_row(words, *(f"{c.ratios[key]:.3f}" for c in found), end_section=key == "run")
    ratios.add_section()
    ratios.add_row("pairs", *(str(len(c.pairs)) for c in found))
    ratios.add_row("lowest and highest of run / floor", *(_range(c) for c in found))
    ratios.add_row("same weights, bit for bit", *("yes" if c.same_bits else "NO" for c in found))
    return [ratios, *map(_parts_table, found)]


def _range(found: Comparison) -> str:
    each = [pair.run.wall / pair.floor.wall for pair in found.pairs]
    return f"{min(each):.3f}–{max(each):.3f}"


def _parts_table(found: Comparison) -> Table:
    title = (
        f"{found.name}: {found.clients} clients, {found.images} images, {found.rounds} rounds, {found.steps} steps, "
        f"{found.processes} processes; seconds, medians"
    )
    table = _table(title, ["part", "floor", "run"])
    for part in dict.fromkeys([*found.floor_seconds, *found.run_seconds]):
        cells = (found.floor_seconds.get(part), found.run_seconds.get(part))
        table.add_row(part, *("" if cell is None else f"{cell:.3f}" for cell in cells))
    return table


def breakdown_tables(found: Sequence[Breakdown]) -> list[Table]:
    """One table per case: the dearest functions of a round of local training in one process."""
    tables = []
    for case in found:
        title = (
            f"{case.name}: {case.worker:.3f} s of processor time, bare loop {case.floor:.3f} s "
            f"({case.worker / case.floor:.3f}), {case.per_step:.2f} ms per step beyond it"
        )
        table = _table(title, ["function (under a profiler)", "calls", "seconds"])
        for function in case.functions[:LISTED]:
            table.add_row(function.name, str(function.calls), f"{function.seconds:.3f}")
        tables.append(table)
    return tables


def growth_table(found: Sequence[Growth]) -> Table:
    """Seconds of a round along each axis, and how they grow beside the floor's."""
    table = _table(
        "growth, seconds of a round, medians",
        ["axis", "value", "clients", "images", "steps", "round", "floor", "ratio"],
    )
    for position, row in enumerate(found):
        figures = ("–" if x is None else f"{x:.3f}" for x in (row.floor, row.ratio))
        steps = "–" if row.steps is None else str(row.steps)
        last = position + 1 < len(found) and found[position + 1].axis != row.axis
        table.add_row(
            row.axis,
            row.value,
            str(row.clients),
            str(row.images),
            steps,
            f"{row.round:.3f}",
            *figures,
            end_section=last,
        )
    return table


def memory_table(found: Sequence[Memory]) -> Table:
    """Peaks of everything and of its parts, one column per method and number of clients."""
    growth = ", ".join(f"{method} {times:.2f}" for method, times in growth_of_memory(found).items())
    table = _table(
        f"memory, peaks in MB; from fewest to most clients, times: {growth}",
        ["", *(f"{m.method}, {m.clients} clients" for m in found)],
    )
    for part in sorted(dict.fromkeys(name for m in found for name in m.parts)):
        table.add_row(part, *(f"{m.parts.get(part, 0.0):.0f}" for m in found))
    table.add_section()
    table.add_row("all together", *(f"{m.total:.0f}" for m in found))
    return table


def startup_table(found: Startup) -> Table:
    """Seconds until training begins."""
    table = _table("start, seconds, medians", ["", "seconds"])
    table.add_row("`fedsir run demo` to the first training step", f"{found.first_step:.2f}")
    table.add_row("`fedsir run demo` to the end of the first round", f"{found.first_round:.2f}")
    table.add_row("end of a run to the first training step of the next", f"{found.next_run:.2f}")
    return table


def imports_table(found: Imports) -> Table:
    """The dearest packages that the program and an actor import, and all others together."""
    table = _table(
        "imports of the program to the end of the first round, and of an actor",
        ["package", "program", "seconds", "actor", "seconds"],
    )
    none = (0, 0.0)
    both = {
        package: (*found.program.get(package, none), *found.actor.get(package, none))
        for package in (*found.program, *found.actor)
    }
    rows = sorted(both.items(), key=lambda row: -(row[1][1] + row[1][3]))

    def add(name: str, cells: Sequence[float]) -> None:
        table.add_row(name, f"{cells[0]:.0f}", f"{cells[1]:.2f}", f"{cells[2]:.0f}", f"{cells[3]:.2f}")

    for package, cells in rows[:LISTED_PACKAGES]:
        add(package, cells)
    others = [cells for _, cells in rows[LISTED_PACKAGES:]]
    add(f"{len(others)} others", [sum(column) for column in zip(none + none, *others, strict=True)])
    table.add_section()
    add("all together", [sum(column) for column in zip(none + none, *both.values(), strict=True)])
    return table


def preparation_table(found: Preparation) -> Table:
    """Images per second beside Pillow."""
    table = _table(f"data preparation, {found.images} JPEG files, {found.threads} threads", ["", "images/s"])
    table.add_row("fedsir, into an empty cache", f"{found.prepared:.0f}")
    table.add_row("Pillow, decoding and resizing alone", f"{found.pillow:.0f}")
    table.add_section()
    table.add_row("share", f"{100 * found.share:.1f} %")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
