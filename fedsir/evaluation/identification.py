"""How well noisy clients were told from clean ones; needs the true status, so only the evaluator calls it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsir.spectral.descriptors import client_scores


def flipped_counts(truth: Sequence[NDArray[np.int64]], observed: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(K,) int64 number of images per client whose observed label is wrong."""
    return np.array([np.count_nonzero(o != t) for t, o in zip(truth, observed, strict=True)], dtype=np.int64)


def identification_figures(
    noisy: NDArray[np.bool_],
    predicted_noisy: NDArray[np.bool_],
    descriptors: NDArray[np.float64] | None = None,
    flipped: NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """Figures of a verdict against the true status, both (K,) bool.

    accuracy; clean_precision, clean_recall, clean_f1 (clean is the positive class); noisy_recall;
    missed_noisy and accused_clean are counts. Empty denominators give NaN.

    descriptors: (K, F) float64 adds `margin` (see `identification_margin`; NaN without descriptors).
    flipped: (K,) wrong labels per client adds `unflipped_noisy`, the clients that are noisy by assignment
    although every label survived (for example only non-source classes of an asymmetric map, or classes too
    small to lose an image), and `unflipped_noisy_missed`, those among `missed_noisy`. Nothing in their data
    could give such clients away, so both readings of the other figures can be formed from the two counts.
    """
    clean, called_clean = ~noisy, ~predicted_noisy
    both_clean, missed = _count(clean & called_clean), _count(noisy & called_clean)
    both_noisy, accused = _count(noisy & predicted_noisy), _count(clean & predicted_noisy)
    figures = {
        "accuracy": _ratio(both_clean + both_noisy, noisy.size),
        "clean_precision": _ratio(both_clean, both_clean + missed),
        "clean_recall": _ratio(both_clean, both_clean + accused),
        "clean_f1": _ratio(2 * both_clean, 2 * both_clean + missed + accused),
        "noisy_recall": _ratio(both_noisy, both_noisy + missed),
        "missed_noisy": float(missed),
        "accused_clean": float(accused),
        "margin": float("nan") if descriptors is None else identification_margin(noisy, descriptors),
    }
    if flipped is not None:
        unflipped = noisy & (flipped == 0)
        figures["unflipped_noisy"] = float(_count(unflipped))
        figures["unflipped_noisy_missed"] = float(_count(unflipped & called_clean))
    return figures


def identification_margin(noisy: NDArray[np.bool_], descriptors: NDArray[np.float64]) -> float:
    """Gap between the truly noisy and the truly clean group, in standard deviations over clients.

    The score of a client is the mean of its z-scored descriptors, z-scored over the clients that have
    descriptors at all. The margin is the lowest score of a noisy client minus the highest score of a clean
    one: positive when a threshold separates the groups, negative by as much as they overlap. Clients without
    descriptors (fewer than two classes) have no score; an empty group gives NaN.

    All three descriptors always count, whatever a method's own fit uses, so that the margins of methods compare.
    """
    scores = client_scores(descriptors)
    scored = np.isfinite(scores)
    high, low = scores[scored & noisy], scores[scored & ~noisy]
    return float(high.min() - low.max()) if high.size and low.size else float("nan")


def _count(clients: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(clients))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
