"""Figures per condition and seed, looked up from the frame of finished runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mlflow_tracking.report.grouping import NO_NOISE, TaskRuns, by_task_and_budget
from mlflow_tracking.report.paper import (
    ABLATIONS,
    ALL_CLEAN,
    METHODS,
    OTHERS,
    OURS,
    RATIOS,
    REFERENCES,
    Condition,
)
from mlflow_tracking.report.results import Results
from mlflow_tracking.report.statistics import Scores

PARTS = tuple(label for label in ABLATIONS.values() if label != OURS)
"""Configurations that only the table of the ablation shows."""
ORDER = {label: i for i, label in enumerate([*METHODS.values(), *OTHERS.values(), *PARTS])}
NOISE_ORDER = {noise: i for i, noise in enumerate(RATIOS)}


@dataclass(frozen=True)
class Entry:
    """A run as the result of a condition; `all_clean` is that of many."""

    condition: Condition
    seed: int
    row: int


@dataclass(frozen=True)
class Bench(TaskRuns):
    """What may be compared in a table. entries: by method. conditions: all that some method has."""

    data_kind: str
    entries: dict[str, tuple[Entry, ...]]

    @cached_property
    def methods(self) -> list[str]:
        """The paper's first and in its order, references last."""
        return ordered_methods(self.entries)

    @cached_property
    def conditions(self) -> frozenset[Condition]:
        """All that a run with noise has."""
        return frozenset(
            entry.condition for label, found in self.entries.items() if label != ALL_CLEAN for entry in found
        )

    @cached_property
    def noises(self) -> list[str]:
        found = {noise for noise, _, _ in self.conditions}
        return sorted(found, key=lambda noise: (NOISE_ORDER.get(noise, len(NOISE_ORDER)), noise))

    @property
    def title(self) -> str:
        """Task, kind of images and, where there are several, budget."""
        kind = "" if self.data_kind == "real" else f" ({self.data_kind} images)"
        return f"{self.task}{kind}" if self.only_budget else f"{self.task}{kind}, {self.budget}"

    @property
    def facets(self) -> dict[str, str]:
        return {"task": self.task, "budget": self.budget}

    def scores(self, method: str, metric: str, conditions: Iterable[Condition] | None = None) -> Scores:
        """Values of a metric by condition and seed, NaN where undefined; all conditions unless some are given."""
        wanted = None if conditions is None else set(conditions)
        values = self._columns[metric]
        return {
            (entry.condition, entry.seed): values[entry.row]
            for entry in self.entries.get(method, ())
            if wanted is None or entry.condition in wanted
        }

    def runs_of(self, method: str, conditions: Iterable[Condition]) -> int:
        """How many different runs stand behind these conditions."""
        wanted = set(conditions)
        return len({entry.row for entry in self.entries.get(method, ()) if entry.condition in wanted})

    @cached_property
    def _columns(self) -> dict[str, list[float]]:
        return {str(name): self.runs[name].tolist() for name in self.runs.columns}


def benches(results: Results) -> list[Bench]:
    """The benches of all runs, in the order of `by_task_and_budget`."""
    return [_bench(part) for part in by_task_and_budget(results.runs)]


def main_benches(found: Sequence[Bench]) -> list[Bench]:
    """Of every task the budget with most runs."""
    first: dict[str, Bench] = {}
    for bench in found:
        first.setdefault(bench.task, bench)
    return list(first.values())


def data_kinds(found: Iterable[Bench]) -> tuple[str, ...]:
    return tuple(sorted({bench.data_kind for bench in found}))


def _bench(part: TaskRuns) -> Bench:
    runs = part.runs.reset_index(drop=True)
    entries: dict[str, list[Entry]] = defaultdict(list)
    clean: list[tuple[float, int, int]] = []
    columns = (runs[name].tolist() for name in ("method", "noise", "ratio", "alpha", "seed"))
    for row, (method, noise, ratio, alpha, seed) in enumerate(zip(*columns, strict=True)):
        if method == ALL_CLEAN:
            clean.append((alpha, seed, row))
        elif noise != NO_NOISE:
            entries[method].append(Entry((noise, ratio, alpha), seed, row))
    by_alpha: dict[float, set[Condition]] = defaultdict(set)
    for known in entries.values():
        for entry in known:
            by_alpha[entry.condition[2]].add(entry.condition)
    for alpha, seed, row in clean:
        # One run for every noise setting of its heterogeneity and seed.
        entries[ALL_CLEAN] += [Entry(condition, seed, row) for condition in sorted(by_alpha[alpha])]
    data_kind = str(runs["data_kind"].iloc[0])
    by_method = {label: tuple(e) for label, e in entries.items() if e}
    return Bench(part.task, part.budget, part.only_budget, runs, data_kind, by_method)


def ordered_methods(labels: Iterable[str]) -> list[str]:
    """Without repetition: the paper's in its order, others by name, references last."""

    def key(label: str) -> tuple[bool, int, int, str]:
        reference = REFERENCES.index(label) if label in REFERENCES else -1
        return label in REFERENCES, reference, ORDER.get(label, len(ORDER)), label

    return sorted(set(labels), key=key)


def compared_methods(found: Iterable[Bench]) -> list[str]:
    """Methods and references, without the configurations of the ablation."""
    return ordered_methods(label for bench in found for label in bench.entries if label not in PARTS)
