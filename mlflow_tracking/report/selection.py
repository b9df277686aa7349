"""Which runs of many a figure shows: pure functions of the data frame of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mlflow_tracking.report.figures.style import method_order
from mlflow_tracking.report.grouping import NO_NOISE, TaskRuns, by_task_and_budget
from mlflow_tracking.report.paper import ALL_CLEAN, OURS, shown_method

TYPICAL_RATIO = 0.6
"""Where one noise ratio must stand for all: labels are mostly wrong, yet no method is at its end."""


class Group(TaskRuns):
    """What a figure may show together."""

    @property
    def kinds(self) -> str:
        """`PHANTOM DATA (phantom-kermany)`: what every figure says first."""
        return "  ·  ".join(
            f"{str(kind).upper()} DATA ({', '.join(sorted(rows['dataset'].unique()))})"
            for kind, rows in self.runs.groupby("data_kind")
        )

    @property
    def noisy(self) -> pd.DataFrame:
        """Without the all-clean reference and other runs without noise."""
        return self.runs[self.runs["noise"] != NO_NOISE]


def groups(runs: pd.DataFrame) -> list[Group]:
    """The groups of all runs, in the order of `by_task_and_budget`."""
    return [Group(part.task, part.budget, part.only_budget, part.runs) for part in by_task_and_budget(runs)]


def identifying_method(runs: pd.DataFrame) -> str | None:
    """The method whose verdicts are shown: OCT-FedSIR, else FedSIR, else the first one that judges clients."""
    if "ident/accuracy" not in runs:
        return None
    return _preferred(runs.loc[runs["ident/accuracy"].notna(), "method"].unique().tolist())


def relabeling_method(runs: pd.DataFrame) -> str | None:
    """The method whose changes of labels are shown, chosen as in `identifying_method`."""
    if "relabel/edit" not in runs:
        return None
    return _preferred(runs.loc[runs["relabel/edit"].notna(), "method"].unique().tolist())


def _preferred(methods: Sequence[str]) -> str | None:
    ordered = [*(m for m in (OURS, "fedsir") if m in methods), *method_order(methods)]
    return ordered[0] if ordered else None


def noises(runs: pd.DataFrame) -> list[str]:
    """Kinds of noise, symmetric first, then as named (`asymmetric`, `asymmetric (uic_pair_swap)`)."""
    return sorted(set(runs["noise"]) - {NO_NOISE}, key=lambda noise: (noise != "symmetric", noise))


def hardest(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs at the lowest alpha, where clients differ most."""
    lowest: pd.DataFrame = runs[runs["alpha"] == runs["alpha"].min()]
    return lowest


def typical_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Per noise type the runs at the lowest alpha and the ratio nearest to `TYPICAL_RATIO`."""
    parts = []
    for noise in noises(runs):
        part = hardest(runs[runs["noise"] == noise])
        ratios = np.sort(part["ratio"].unique())
        nearest = ratios[np.argmin(np.abs(ratios - TYPICAL_RATIO))]
        parts.append(part[part["ratio"] == nearest])
    return pd.concat(parts) if parts else runs.iloc[:0]


def middle_client(clients: pd.DataFrame, similarity: pd.DataFrame) -> int | None:
    """Of the clients with most known pairs of classes the median one by mean similarity; None without any pair.

    clients: rows of `descriptors.csv`. similarity: `similarity.csv` of the same run.
    """
    known = clients.dropna(subset=["mean"])
    if known.empty:
        return None
    pairs = similarity.dropna(subset=["similarity"]).groupby("client").size().reindex(known["client"]).to_numpy()
    widest = known[pairs == pairs.max()].sort_values("mean")
    return int(widest.iloc[(len(widest) - 1) // 2]["client"])


def ratio_points(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """alpha, ratio, method, mean and sd (%) over seeds; sd is NaN for one seed."""
    means = runs.dropna(subset=[metric]).groupby(["alpha", "ratio", "method"])[metric].agg(["mean", "std"])
    table = means.mul(100).rename(columns={"std": "sd"}).reset_index()
    return table[["alpha", "ratio", "method", "mean", "sd"]]


def references(runs: pd.DataFrame, metric: str) -> dict[float, float]:
    """The all-clean value (%) per alpha."""
    clean = runs[runs["method"] == ALL_CLEAN].dropna(subset=[metric])
    return {float(str(alpha)): 100 * float(rows[metric].mean()) for alpha, rows in clean.groupby("alpha")}


@dataclass(frozen=True)
class Compared:
    """Runs of methods on the same conditions. conditions: how many. left_out: methods with too few, in words."""

    runs: pd.DataFrame
    conditions: int
    left_out: tuple[str, ...]


CONDITION = ["noise", "ratio", "alpha"]


def on_equal_conditions(runs: pd.DataFrame) -> Compared:
    """Runs on the conditions that all methods have, so that no mean moves because one of them lacks the hard ones.

    Methods with less than nine tenths of the conditions are left out rather than the conditions that they lack.
    """
    per_method = {str(m): set(rows[CONDITION].itertuples(index=False, name=None)) for m, rows in runs.groupby("method")}
    everything: set[tuple[object, ...]] = set().union(*per_method.values())
    enough = {m: found for m, found in per_method.items() if len(found) >= 0.9 * len(everything)}
    left_out = tuple(
        f"{shown_method(m)} ({len(per_method[m])} of {len(everything)})"
        for m in method_order(per_method)
        if m not in enough
    )
    common = set.intersection(*enough.values()) if enough else set()
    keys = pd.Series(list(runs[CONDITION].itertuples(index=False, name=None)), index=runs.index, dtype=object)
    kept = runs[runs["method"].isin(list(enough)) & keys.isin(list(common))]
    return Compared(kept, len(common), left_out)


def mean_over_conditions(runs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Per method the mean over conditions, in each of them over seeds first; `method` is a column."""
    per_condition = runs.groupby(["method", *CONDITION])[list(columns)].mean()
    return per_condition.groupby(level="method").mean().reset_index()
