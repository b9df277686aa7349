"""What graders found about proposed label changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Precision:
    """Of `reviewed` proposals graders confirmed `confirmed`, kept the observed label of `kept`, gave a third one to
    `other`; `unsure` ones are not among the reviewed. share: confirmed / reviewed, with a 95 % Wilson interval from
    low to high; NaN where nothing was reviewed.
    """

    reviewed: int
    confirmed: int
    kept: int
    other: int
    unsure: int
    share: float
    low: float
    high: float


def measured_precision(rows: Sequence[tuple[str, str, str | None]]) -> Precision:
    """Precision from (observed, proposed, grader's label) of each graded row; None where the grader was unsure."""
    decided = [(observed, proposed, given) for observed, proposed, given in rows if given is not None]
    confirmed = sum(given == proposed for _, proposed, given in decided)
    kept = sum(given == observed for observed, _, given in decided)
    low, high = wilson(confirmed, len(decided))
    return Precision(
        reviewed=len(decided),
        confirmed=confirmed,
        kept=kept,
        other=len(decided) - confirmed - kept,
        unsure=len(rows) - len(decided),
        share=confirmed / len(decided) if decided else float("nan"),
        low=low,
        high=high,
    )


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share; NaN without trials."""
    if trials == 0:
        return float("nan"), float("nan")
    share, square = successes / trials, z * z / trials
    centre = (share + square / 2.0) / (1.0 + square)
    half = z * sqrt(share * (1.0 - share) / trials + square / (4.0 * trials)) / (1.0 + square)
    return max(0.0, centre - half), min(1.0, centre + half)
