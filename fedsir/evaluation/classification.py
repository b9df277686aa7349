"""Classification figures of the global model on held-out images, from a confusion matrix.

Working from counts lets shards of the test set be evaluated anywhere and added up, and makes the bootstrap
exact and cheap: resampling images with replacement is a multinomial draw over the confusion cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Statistic = Literal["accuracy", "macro_f1", "balanced_accuracy"]


@dataclass(frozen=True)
class ClassificationFigures:
    """Figures of one confusion matrix; NaN where nothing was evaluated.

    macro_f1 and balanced_accuracy average over the classes that occur in the truth: a class without a true
    image has no recall, and counting its F1 as 0 would punish the model for the make-up of the test set.
    A prediction of such a class still costs the true class its recall.
    recall: (C,) float64, NaN for classes absent from the truth. confusion: (C, C) int64, rows are true.
    """

    accuracy: float
    macro_f1: float
    balanced_accuracy: float
    recall: NDArray[np.float64]
    confusion: NDArray[np.int64]


def confusion_matrix(truth: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """(C, C) int64 counts, rows are true classes. Raises ValueError for labels outside 0..C-1."""
    if truth.shape != predicted.shape:
        raise ValueError(f"{truth.shape} true and {predicted.shape} predicted labels do not match")
    for labels in (truth, predicted):
        if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
            raise ValueError(f"labels must lie in 0..{num_classes - 1}")
    flat = np.bincount(truth * num_classes + predicted, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes).astype(np.int64)


def classification_figures(confusion: NDArray[np.int64]) -> ClassificationFigures:
    """All figures of a (C, C) confusion matrix."""
    return ClassificationFigures(
        accuracy=float(_statistic(confusion, "accuracy")),
        macro_f1=float(_statistic(confusion, "macro_f1")),
        balanced_accuracy=float(_statistic(confusion, "balanced_accuracy")),
        recall=_recall(confusion),
        confusion=confusion,
    )


def bootstrap_interval(
    confusion: NDArray[np.int64],
    samples: int,
    confidence: float,
    rng: np.random.Generator,
    statistic: Statistic = "accuracy",
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic; (NaN, NaN) for an empty matrix.

    This is test-set sampling error of one run. It says nothing about the spread over seeds.
    """
    total = int(confusion.sum())
    if total == 0:
        return float("nan"), float("nan")
    draws = rng.multinomial(total, confusion.ravel() / total, size=samples).reshape(samples, *confusion.shape)
    tail = (1.0 - confidence) / 2.0
    low, high = np.nanquantile(_statistic(draws, statistic), [tail, 1.0 - tail])
    return float(low), float(high)


def bootstrap_mean_interval(
    values: NDArray[np.float64], samples: int, confidence: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of one value (N,) per image; (NaN, NaN) without images.

    For correctness averaged over several models: images are drawn, and with an image all of its predictions,
    since the models' mistakes on the same image are not independent.
    """
    if len(values) == 0:
        return float("nan"), float("nan")
    levels, counts = np.unique(values, return_counts=True)
    means = rng.multinomial(len(values), counts / len(values), size=samples) @ levels / len(values)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def mean_log_loss(logits: NDArray[np.floating], truth: NDArray[np.int64]) -> float:
    """Mean of -log softmax(logits (n, C))[y] in float64; NaN without images or with non-finite logits."""
    if len(truth) == 0 or not np.all(np.isfinite(logits)):
        return float("nan")
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(axis=1))
    return float(np.mean(log_total - shifted[np.arange(len(truth)), truth]))


def _recall(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """(..., C) recall of each class, NaN where the class is absent from the truth."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)
    return _ratio(hits, confusion.sum(axis=-1))


def _statistic(confusion: NDArray[np.int64], statistic: Statistic) -> NDArray[np.float64]:
    """(...,) values of a statistic over a stack of (..., C, C) matrices."""
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)
    support = confusion.sum(axis=-1)
    if statistic == "accuracy":
        return _ratio(hits.sum(axis=-1), support.sum(axis=-1))
    if statistic == "balanced_accuracy":
        return _mean_over_present(_recall(confusion), support)
    return _mean_over_present(_ratio(2 * hits, support + confusion.sum(axis=-2)), support)


def _mean_over_present(values: NDArray[np.float64], support: NDArray[np.int64]) -> NDArray[np.float64]:
    present = support > 0
    return _ratio(np.where(present, values, 0.0).sum(axis=-1), present.sum(axis=-1))


def _ratio(numerator: NDArray[np.generic], denominator: NDArray[np.generic]) -> NDArray[np.float64]:
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    out = np.full(np.broadcast(top, bottom).shape, np.nan)
    return np.asarray(np.divide(top, bottom, out=out, where=bottom > 0), dtype=np.float64)
