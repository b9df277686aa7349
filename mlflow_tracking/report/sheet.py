"""What every figure of a report needs: the record, the runs that it may show, and how it becomes a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pandas as pd
from matplotlib.figure import Figure

from mlflow_tracking.report.figures import MethodStyle, as_markup, method_styles
from mlflow_tracking.report.paper import ALL_CLEAN
from mlflow_tracking.report.selection import Group
from mlflow_tracking.report.tables.words import plain


class Record(Protocol):
    """What figures need of `mlflow_tracking.report.results.Results`."""

    @property
    def runs(self) -> pd.DataFrame:
        """One row per finished run."""
        ...

    def curves(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Columns mlflow_id, key, step, value."""
        ...

    def totals(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Sums over rounds, indexed by mlflow_id, a column per key."""
        ...

    def artifact(self, mlflow_id: str, path: str) -> Path | None:
        """A file of a run, None where it has none."""
        ...


@dataclass(frozen=True)
class Picture:
    """A figure in HTML. key: anchor. section: heading it belongs under. facets: see `model.FACETS`."""

    key: str
    section: str
    title: str
    caption: str
    markup: str
    facets: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pictures:
    """All figures of a report, and what could not be drawn."""

    shown: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """One group of runs to draw figures of. prefix: of their ids. notes: takes what cannot be drawn, in words."""

    record: Record
    group: Group
    prefix: str
    notes: list[str]

    @property
    def place(self) -> str:
        """Task, and budget where it has several."""
        return self.group.task if self.group.only_budget else f"{self.group.task}, {self.group.budget}"

    def picture(self, key: str, section: str, title: str, caption: str, figure: Figure, **facets: str) -> Picture:
        """`figure` as part of a page. facets: beside those of the group."""
        name = f"{self.prefix}-{plain(key)}"
        own = {"task": self.group.task, **({} if self.group.only_budget else {"budget": self.group.budget})}
        markup = as_markup(figure, name, f"{title}. {self.group.kinds}. {caption}")
        return Picture(f"figure-{name}", section, title, caption, markup, {**own, **facets})

    def label(self, *more: str) -> str:
        """Second line of a figure's title: first of all whether the images are phantoms."""
        return "  ·  ".join([self.group.kinds, *more])

    def styles(self, methods: Sequence[str]) -> dict[str, MethodStyle]:
        """Styles of some methods, the same in every figure of the report."""
        styles = method_styles([*self.record.runs["method"].unique(), ALL_CLEAN])
        return {method: style for method, style in styles.items() if method in methods}

    def table(self, mlflow_id: str, path: str) -> pd.DataFrame | None:
        """A CSV file of a run, None where it has none."""
        found = self.record.artifact(mlflow_id, path)
        # Only what is empty is unknown: a class may be called NA.
        return None if found is None else pd.read_csv(found, keep_default_na=False, na_values=[""])
