"""Tables of an identification study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan
from statistics import fmean
from typing import TypeVar

from rich.table import Table

from experiments.studies.identification import Row

T = TypeVar("T")


def summary_table(title: str, rows: Sequence[Row]) -> Table:
    """One row per method, split and noise type: mean clean-client F1 over conditions and seeds, as in Table 2.

    exact: share of runs in which every client is judged rightly. sep.: share of runs with a positive margin, where
    some threshold on the mean descriptor would judge every client rightly. accused: clean clients called noisy,
    missed: noisy ones called clean, per run.
    """
    table = Table(title=title)
    table.add_column("method, split", no_wrap=True)
    # Narrow enough for 80 characters.
    table.add_column("noise", no_wrap=True)
    for column in ("runs", "F1 %", "exact\n%", "sep.\n%", "accu-\nsed", "mis-\nsed"):
        table.add_column(column, justify="right", no_wrap=True)
    for method, split in _in_order((r.method, r.split) for r in rows):
        for noise in _in_order(r.noise for r in rows):
            of = [r for r in rows if (r.method, r.split, r.noise) == (method, split, noise)]
            table.add_row(
                f"{method}, {split.replace('_', ' ')}",
                noise.removesuffix("metric"),
                str(len(of)),
                f"{100 * fmean(r.clean_f1 for r in of):.1f}",
                f"{100 * fmean(r.accused_clean + r.missed_noisy == 0 for r in of):.0f}",
                f"{100 * fmean(r.margin > 0 for r in of):.0f}",
                f"{fmean(r.accused_clean for r in of):.2f}",
                f"{fmean(r.missed_noisy for r in of):.2f}",
            )
        table.add_section()
    return table


def condition_table(title: str, rows: Sequence[Row]) -> Table:
    """Rows of one method and split by noise setting and alpha: mean clean-client F1 and, in brackets, worst margin."""
    table = Table(title=title)
    table.add_column("noise")
    table.add_column("ratio", justify="right")
    alphas = _in_order(r.alpha for r in rows)
    for alpha in alphas:
        table.add_column(f"alpha {alpha:g}", justify="right")
    for noise, ratio in _in_order((r.noise, r.ratio) for r in rows):
        cells = []
        for alpha in alphas:
            of = [r for r in rows if (r.noise, r.ratio, r.alpha) == (noise, ratio, alpha)]
            cells.append(f"{100 * fmean(r.clean_f1 for r in of):.0f} ({_worst_margin(of)})" if of else "")
        table.add_row(noise, f"{ratio:g}", *cells)
    return table


def _worst_margin(rows: Sequence[Row]) -> str:
    """The lowest margin; runs without one, where a side has no client with descriptors, do not count."""
    margins = [r.margin for r in rows if not isnan(r.margin)]
    return f"{min(margins):+.1f}" if margins else "–"


def _in_order(values: Iterable[T]) -> list[T]:
    """Distinct values in the order in which they first come."""
    return list(dict.fromkeys(values))
