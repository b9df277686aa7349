"""The paper's numbers, and its names of tasks and methods in ours.

`paper_values/conditions.csv` holds its Tables S1-S6 (one line per condition and method), `paper_values/tables.csv` its
Tables 1-4, both under the paper's own names and in percent.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isclose
from statistics import fmean

OURS = "oct_fedsir"
ALL_CLEAN = "all_clean"
PRUNING = "spectral_pruning"
REFERENCES = (PRUNING, ALL_CLEAN)
"""Shown for comparison; no method competes with them for best and second best."""

METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "RoFL": "rofl",
    "RHFL": "rhfl",
    "FedLSR": "fedlsr",
    "FedCorr": "fedcorr",
    "FedNed": "fedned",
    "FedELC": "fedelc",
    "FedNoRo": "fednoro",
    "OCT-FedSIR": OURS,
    "Pruning": PRUNING,
    "AllClean": ALL_CLEAN,
}
"""The paper's methods in the order of its tables."""
OTHERS = {"FedSIR": "fedsir"}
ABLATIONS = {
    "OCT-FedSIR (Full)": OURS,
    "w/o DaAgg": "oct_fedsir/no_daagg",
    "w/o LA": "oct_fedsir/no_la",
    "w/o KD": "oct_fedsir/no_kd",
    "w/o relabeling": "oct_fedsir/no_relabeling",
}
"""Lines of the paper's Table 4."""
SHOWN = {
    **{ours: theirs for theirs, ours in {**METHODS, **OTHERS}.items()},
    **{ours: theirs for theirs, ours in ABLATIONS.items() if ours != OURS},
    ALL_CLEAN: "FedAvg (all clients clean)",
}

NOISES = {"sym": "symmetric", "asym": "asymmetric"}
RATIOS = {"symmetric": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "asymmetric": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
ALPHAS = (2.0, 0.5, 0.1)
NUM_CONDITIONS = 117
TASKS = {"Kermany": "kermany", "UIC": "uic", "WF": "wake_forest"}
"""The paper's tasks in its order, and the phantom cohorts that rehearse them."""
CLASSES = {
    "Kermany": {"CNV", "DME", "DRUSEN", "NORMAL"},
    "UIC": {"control", "mild", "moderate", "severe"},
    "WF": {"GA", "NGA"},
}
MAPS = {"Kermany": "kermany", "UIC": "uic_up", "WF": "wake_forest"}
"""Confusions of the asymmetric noise of each task."""

Condition = tuple[str, float, float]
"""Noise, ratio and alpha within a task."""


@dataclass(frozen=True)
class Printed:
    """A value of the paper in percent. sd: over its three seeds, None where it gives none."""

    mean: float
    sd: float | None = None


def task_name(params: Mapping[str, str], classes: Collection[str]) -> str:
    """The paper's task whose images, or phantoms of them, a run is about; otherwise the name of its data set.

    The two cohorts of the paper are private, so a cohort is taken for one of them by its classes.
    """
    source = params.get("source", "")
    if source == "phantom":
        return next((t for t, cohort in TASKS.items() if cohort == params.get("cohort")), params["dataset"])
    if source == "kermany":
        return "Kermany"
    if source == "cohort":
        return next((t for t, names in CLASSES.items() if names == set(classes)), params["dataset"])
    return params["dataset"]


def shown_method(label: str) -> str:
    """The paper's name of a method, or the label itself."""
    return SHOWN.get(label, label)


def conditions(noise: str) -> frozenset[Condition]:
    """The paper's conditions of a task under one noise."""
    return frozenset((noise, ratio, alpha) for ratio in RATIOS.get(noise, ()) for alpha in ALPHAS)


def condition_value(task: str, noise: str, ratio: float, alpha: float, method: str) -> Printed | None:
    """Accuracy in Tables S1-S6, None where the paper has no such condition or method.

    The all-clean reference does not depend on noise, so its value per alpha is that of every ratio. Pruning has one
    value per alpha too, but as a mean over ratios (`block_value`).
    """
    rows = _conditions()
    if method == ALL_CLEAN:
        return rows.get((task, noise, None, alpha, method)) if _has(noise, ratio) else None
    known = next((r for r in RATIOS.get(noise, ()) if isclose(r, ratio, abs_tol=1e-9)), None)
    return None if known is None else rows.get((task, noise, known, alpha, method))


def block_value(task: str, noise: str, alpha: float, method: str) -> Printed | None:
    """Accuracy over all ratios of a noise at one alpha, as printed for pruning and the all-clean reference."""
    return _conditions().get((task, noise, None, alpha, method))


def mean_value(task: str, method: str, wanted: Collection[Condition]) -> Printed | None:
    """The paper's mean accuracy over the same conditions of a task; None unless it has each of them.

    Over all conditions of one of its noises it is the value printed in Table 1.
    """
    noises = {noise for noise, _, _ in wanted}
    if len(noises) == 1 and _is_all_of(next(iter(noises)), wanted):
        return table_value("1", task, next(iter(noises)), method, "accuracy_mean")
    values = _values(task, method, wanted)
    return Printed(fmean(values)) if values else None


def overall_value(method: str, wanted: Mapping[str, Collection[Condition]]) -> Printed | None:
    """The same over conditions of several tasks; over all 117 the value printed in Table 1."""
    complete = all(
        task in wanted and all(_is_all_of(noise, [c for c in wanted[task] if c[0] == noise]) for noise in RATIOS)
        for task in TASKS
    )
    if complete and sum(len(own) for own in wanted.values()) == NUM_CONDITIONS:
        return table_value("1", "ALL", "all", method, "accuracy_mean")
    values: list[float] = []
    for task, own in wanted.items():
        found = _values(task, method, own)
        if not found:
            return None
        values += found
    return Printed(fmean(values)) if values else None


def _values(task: str, method: str, wanted: Collection[Condition]) -> list[float]:
    """One value per condition; none at all where the paper lacks one."""
    values: list[float] = []
    blocks: dict[tuple[str, float], set[float]] = {}
    for noise, ratio, alpha in wanted:
        value = condition_value(task, noise, ratio, alpha, method)
        if value is not None:
            values.append(value.mean)
        elif method == PRUNING and _has(noise, ratio):
            blocks.setdefault((noise, alpha), set()).add(ratio)
        else:
            return []
    for (noise, alpha), ratios in blocks.items():
        block = block_value(task, noise, alpha, method)
        if block is None or len(ratios) < len(RATIOS[noise]):
            return []
        values += [block.mean] * len(ratios)
    return values


def _is_all_of(noise: str, wanted: Collection[Condition]) -> bool:
    return bool(wanted) and set(wanted) == conditions(noise)


def table_value(table: str, task: str, noise: str, method: str, metric: str) -> Printed | None:
    """A value of Tables 1-4 as printed. task, noise: `ALL` and `all` for what is over everything."""
    return _tables().get((table, task, noise, method, metric))


def _has(noise: str, ratio: float) -> bool:
    return any(isclose(r, ratio, abs_tol=1e-9) for r in RATIOS.get(noise, ()))


@cache
def _conditions() -> dict[tuple[str, str, float | None, float, str], Printed]:
    found = {}
    for row in _read("conditions.csv"):
        ratio = float(row["eta"]) if row["eta"] else None
        key = (row["dataset"], NOISES[row["noise_type"]], ratio, float(row["alpha"]), METHODS[row["method"]])
        found[key] = Printed(float(row["accuracy_mean"]), float(row["accuracy_std"]))
    return found


@cache
def _tables() -> dict[tuple[str, str, str, str, str], Printed]:
    names = {**METHODS, **OTHERS, **ABLATIONS}
    found = {}
    for row in _read("tables.csv"):
        noise = NOISES.get(row["noise_type"], row["noise_type"])
        key = (row["table"], row["dataset"], noise, names[row["method"]], row["metric"])
        found[key] = Printed(float(row["value"]), float(row["std"]) if row["std"] else None)
    return found


def _read(name: str) -> list[dict[str, str]]:
    text = (resources.files("mlflow_tracking.report") / "paper_values" / name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
