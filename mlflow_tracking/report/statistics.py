"""Means, intervals, ranks and tests behind the tables: pure functions.

Values are kept per condition and seed. A mean is first over seeds within each condition, then over conditions, so that
a condition with more seeds weighs no more than others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

SAMPLES = 2000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 20260101

Scores = Mapping[tuple[Any, int], float]
"""A figure per (condition, seed); what tells conditions apart is up to the caller."""


@dataclass(frozen=True)
class Summary:
    """mean: over conditions of the means over seeds. sd: sample standard deviation over seeds of a seed's mean over all
    conditions, None unless two seeds have all of them. low, high: percentile bootstrap over these seeds. seeds: all
    that went in; complete: those with every condition."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    complete: tuple[int, ...]
    conditions: int
    runs: int


def summarised(scores: Scores) -> Summary | None:
    """Mean and spread of the finite figures, None without any."""
    finite = {key: value for key, value in scores.items() if math.isfinite(value)}
    if not finite:
        return None
    conditions = list(dict.fromkeys(condition for condition, _ in finite))
    seeds = sorted({seed for _, seed in finite})
    table = np.full((len(conditions), len(seeds)), np.nan)
    row = {condition: i for i, condition in enumerate(conditions)}
    column = {seed: j for j, seed in enumerate(seeds)}
    for (condition, seed), value in finite.items():
        table[row[condition], column[seed]] = value
    complete = ~np.isnan(table).any(axis=0)
    of_seeds = table[:, complete].mean(axis=0)
    several = len(of_seeds) > 1
    low, high = bootstrap_over_seeds(of_seeds) if several else (None, None)
    return Summary(
        mean=float(np.nanmean(table, axis=1).mean()),
        sd=float(of_seeds.std(ddof=1)) if several else None,
        low=low,
        high=high,
        seeds=tuple(seeds),
        complete=tuple(seed for seed, whole in zip(seeds, complete, strict=True) if whole),
        conditions=len(conditions),
        runs=len(finite),
    )


def bootstrap_over_seeds(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Percentile interval of the mean of one value per seed, seeds drawn with replacement, always the same draws.

    A seed is drawn with all of its conditions, since they share federations and test images. Three seeds give ten
    different means at most, so the interval is coarse and rather too narrow.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    means = data[rng.integers(0, len(data), (SAMPLES, len(data)))].mean(axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def ranks(block: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks of methods within each condition, 1 for the highest, ties averaged; block: (conditions, methods)."""
    return np.asarray(stats.rankdata(-block, axis=1), dtype=np.float64)


@dataclass(frozen=True)
class Friedman:
    """Whether methods differ at all. statistic: chi-square with methods - 1 degrees of freedom."""

    statistic: float
    p: float
    conditions: int
    methods: int


def friedman(block: NDArray[np.float64]) -> Friedman | None:
    """Friedman's test over conditions; None with fewer than three methods or two conditions, or where all are equal."""
    conditions, methods = block.shape
    if methods < 3 or conditions < 2 or np.all(block == block[:, :1]):
        return None
    found = stats.friedmanchisquare(*block.T)
    return Friedman(float(found.statistic), float(found.pvalue), conditions, methods)


@dataclass(frozen=True)
class Paired:
    """One method against another over the conditions that both have.

    difference: mean over conditions, of means over the seeds that both have there. better, equal, worse: conditions.
    p: two-sided Wilcoxon signed-rank test, None where nothing differs.
    """

    difference: float
    conditions: int
    better: int
    equal: int
    worse: int
    p: float | None


def paired(ours: Scores, theirs: Scores) -> Paired | None:
    """Compare condition by condition; None without a condition and seed in common."""
    common: dict[object, list[float]] = {}
    for (condition, seed), value in ours.items():
        other = theirs.get((condition, seed), math.nan)
        if math.isfinite(value) and math.isfinite(other):
            common.setdefault(condition, []).append(value - other)
    if not common:
        return None
    # What float arithmetic leaves of equal accuracies is no difference.
    differences = np.array([np.mean(values) for values in common.values()]).round(12)
    p = float(stats.wilcoxon(differences).pvalue) if np.any(differences) else None
    return Paired(
        difference=float(differences.mean()),
        conditions=len(differences),
        better=int((differences > 0).sum()),
        equal=int((differences == 0).sum()),
        worse=int((differences < 0).sum()),
        p=p,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p-values that keep the chance of any false rejection among them."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for position, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - position) * p_values[i]))
        corrected[i] = highest
    return corrected
