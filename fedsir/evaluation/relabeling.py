"""How well labels were corrected (eq. 40-44); needs true labels, so only the evaluator calls it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def relabeling_figures(
    truth: Sequence[NDArray[np.int64]],
    observed: Sequence[NDArray[np.int64]],
    corrected: Sequence[NDArray[np.int64]],
    predicted_noisy: NDArray[np.bool_],
) -> dict[str, float]:
    """Figures pooled over all images of the predicted-noisy clients, whose labels a method may change.

    truth, observed, corrected: K aligned arrays (n_k,) int64; predicted_noisy: (K,) bool, all true where a method
    changes labels without a verdict on clients.

    edit: changed labels among all (eq. 40). recovery: corrupted labels set right among corrupted (eq. 41).
    precision: changes that gave the true label among changes (eq. 42). false_correction: correct labels made
    wrong among correct ones (eq. 43). residual: wrong labels afterwards among all (eq. 44). An empty
    denominator gives NaN, never 0 or 1, so means over runs can leave it out.
    """
    chosen = np.flatnonzero(predicted_noisy).tolist()
    y, before, after = (_pooled(labels, chosen) for labels in (truth, observed, corrected))
    wrong, edited, right_after = before != y, after != before, after == y
    return {
        "edit": _share(edited, np.ones_like(edited)),
        "recovery": _share(right_after, wrong),
        "precision": _share(right_after, edited),
        "false_correction": _share(~right_after, ~wrong),
        "residual": _share(~right_after, np.ones_like(edited)),
    }


def _pooled(labels: Sequence[NDArray[np.int64]], clients: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(labels[k] for k in clients)])


def _share(event: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    return float(event[among].mean()) if among.any() else float("nan")
