"""What several captions say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlflow_tracking.report.tables.scores import Bench

NOISE_HEADS = {"symmetric": "sym.", "asymmetric": "asym."}
OVER_SEEDS = (
    "Standard deviations are those of the seeds' means over all conditions, intervals 95 % percentile bootstrap over "
    "seeds, coarse and rather too narrow with few of them."
)
INTERVALS = (
    "Intervals: 95 % percentile bootstrap over seeds, coarse and rather too narrow with few of them; in cells with a "
    "single seed, mean of the intervals over test images that its runs recorded."
)


def paper_note(found: Sequence[Bench]) -> str:
    """Whose numbers stand beside the own ones."""
    if any(bench.data_kind != "real" for bench in found):
        return (
            "The paper's values are on real images and stand beside figures on phantoms for orientation only: "
            "the difference says nothing about either."
        )
    return "The paper's values are on its own images and at its budget."


def plain(text: str) -> str:
    """`text` as part of a key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def several_conditions(number: int) -> str:
    """`1 condition`, `21 conditions`."""
    return f"{number} condition{'' if number == 1 else 's'}"
