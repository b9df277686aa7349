"""Cells: what went in, what it is compared with, and when it is marked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mlflow_tracking.report.model import Cell
from mlflow_tracking.report.paper import REFERENCES, Printed
from mlflow_tracking.report.statistics import Scores, Summary, summarised

EMPTY = Cell(None)
PERCENT = 100.0


@dataclass(frozen=True)
class Candidate:
    """A cell before it is compared with others of its column. conditions: those that went in."""

    cell: Cell
    conditions: frozenset[object] = frozenset()


def candidate(
    scores: Scores,
    runs: int,
    paper: Printed | None = None,
    images: tuple[Scores, Scores] | None = None,
    scale: float = PERCENT,
) -> Candidate:
    """The cell of some figures, times `scale`.

    runs: different runs behind them. images: ends of the intervals over test images that the runs recorded; their
    means stand where there is one seed, as if the errors of all runs moved together, so they are at most too wide.
    """
    summary = summarised(scores)
    printed = (None, None) if paper is None else (paper.mean, paper.sd)
    if summary is None:
        return Candidate(replace(EMPTY, paper=printed[0], paper_sd=printed[1]))
    low, high = summary.low, summary.high
    if len(summary.seeds) == 1 and images is not None:
        low, high = (_mean(ends, scores) for ends in images)
    cell = Cell(
        mean=scale * summary.mean,
        sd=_scaled(summary.sd, scale),
        low=_scaled(low, scale),
        high=_scaled(high, scale),
        seeds=summary.seeds,
        runs=runs,
        paper=printed[0],
        paper_sd=printed[1],
        warnings=_holes(summary),
    )
    return Candidate(cell, frozenset(condition for (condition, _), value in scores.items() if value == value))


def compared(
    candidates: Mapping[str, Candidate],
    competing: Collection[str] | None = None,
    digits: int = 2,
    lowest: bool = False,
    mark: bool = True,
) -> dict[str, Cell]:
    """The cells of a column by method, with warnings and marks.

    A cell over fewer conditions than others says so, and is neither best nor second best: its mean would be another
    one over all of them. Cells that look equal share a mark. competing: all but the references unless given.
    """
    chosen = [m for m in candidates if m not in REFERENCES] if competing is None else list(competing)
    everything = frozenset(c for candidate in candidates.values() for c in candidate.conditions)
    seeds = sorted({seed for candidate in candidates.values() for seed in candidate.cell.seeds})
    cells = {label: _warned(c, len(everything), seeds) for label, c in candidates.items()}
    whole = [m for m in chosen if m in candidates and everything and candidates[m].conditions == everything]
    if not mark or len(whole) < 2:
        return cells
    shown = {m: round(cells[m].mean or 0.0, digits) for m in whole}
    levels = sorted(set(shown.values()), reverse=not lowest)
    for method, value in shown.items():
        if value == levels[0]:
            cells[method] = replace(cells[method], mark="best")
        elif value == levels[1]:
            cells[method] = replace(cells[method], mark="second")
    return cells


def warned(cell: Cell, *texts: str) -> Cell:
    """`cell` with further warnings, once each."""
    return replace(cell, warnings=tuple(dict.fromkeys((*cell.warnings, *texts))))


def _warned(candidate: Candidate, conditions: int, seeds: Sequence[int]) -> Cell:
    cell = candidate.cell
    if cell.mean is None:
        return cell
    texts = []
    if len(candidate.conditions) < conditions:
        texts.append(f"over {len(candidate.conditions)} of {conditions} conditions")
    if list(cell.seeds) != list(seeds):
        texts.append(f"seeds {_listed(cell.seeds)}; others have {_listed(seeds)}")
    return warned(cell, *texts)


def _holes(summary: Summary) -> tuple[str, ...]:
    lacking = [seed for seed in summary.seeds if seed not in summary.complete]
    if not lacking:
        return ()
    return (f"seeds {_listed(lacking)} lack some of the {summary.conditions} conditions",)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def _mean(ends: Scores, scores: Scores) -> float | None:
    values = [ends[key] for key, value in scores.items() if value == value]
    return None if any(value != value for value in values) else fmean(values)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value
