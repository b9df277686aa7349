"""Synthetic results: frames as `read_results` gives them, without a store.

Helpers are fixtures rather than a module, so that tests run under every import mode of pytest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsir.events import TOTALS
from mlflow_tracking.report.reading import CURVE
from mlflow_tracking.report.results import ENDED, RUNS, Results

BUDGET = "6 rounds × 1 local epoch"


class FakeReader:
    """Curves that rise to each run's final figures in three steps, totals of one per run, files under a folder."""

    def __init__(self, runs: pd.DataFrame, folder: Path | None = None) -> None:
        self.runs = runs.set_index("mlflow_id", drop=False)
        self.folder = folder

    def curves(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        points = [
            (mlflow_id, key, step, self.runs.loc[mlflow_id, key] * step / 3)
            for mlflow_id in mlflow_ids
            for key in keys
            for step in (1, 2, 3)
            if np.isfinite(self.runs.loc[mlflow_id, key])
        ]
        return pd.DataFrame(points, columns=list(CURVE))

    def totals(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        return pd.DataFrame(1.0, index=pd.Index(mlflow_ids, name="mlflow_id"), columns=list(keys))

    def artifact(self, mlflow_id: str, uri: str, path: str) -> Path | None:  # noqa: ARG002
        file = None if self.folder is None else self.folder / mlflow_id / path
        return file if file is not None and file.is_file() else None


class Frames:
    """Rows of `Results.runs` and results made of them."""

    budget = BUDGET
    totals = TOTALS

    def __init__(self) -> None:
        self._ids = itertools.count()

    def run(self, **changes: Any) -> dict[str, Any]:
        """One finished run; `changes` by column, metrics by key (`**{"test/macro_f1": 0.7}`)."""
        number = next(self._ids)
        accuracy = float(changes.get("final/accuracy", 0.8))
        row: dict[str, Any] = {
            "mlflow_id": f"m{number:05d}",
            "run_id": f"r{number:05d}",
            "name": f"run {number}",
            "task": "Kermany",
            "dataset": "phantom-kermany",
            "data_kind": "phantom",
            "noise": "symmetric",
            "ratio": 0.3,
            "alpha": 2.0,
            "clients": 30,
            "clean_clients": 3,
            "method": "fedavg",
            "seed": 0,
            "budget": BUDGET,
            "settings": BUDGET,
            "started": 1_700_000_000_000 + number,
            "seconds": 10.0,
            "artifact_uri": "",
            "final/accuracy": accuracy,
            "final/accuracy_low": accuracy - 0.02,
            "final/accuracy_high": accuracy + 0.02,
            "test/accuracy": accuracy,
            "test/macro_f1": accuracy - 0.01,
            **dict.fromkeys(TOTALS, 1.0),
            **changes,
        }
        if row["method"] == "all_clean":
            row.update(noise="none", ratio=0.0, clean_clients=row["clients"])
        if row["method"].partition("/")[0] in ("oct_fedsir", "fedsir", "spectral_pruning"):
            row = {"ident/clean_f1": 0.9, "ident/accuracy": 0.9, **row}
        if row["method"].partition("/")[0] in ("oct_fedsir", "fedsir"):
            shares = ("edit", "recovery", "precision", "false_correction", "residual")
            row = {**{f"relabel/{share}": 0.1 * (i + 1) for i, share in enumerate(shares)}, **row}
        return row

    def grid(
        self,
        methods: Sequence[str],
        *,
        tasks: Sequence[str] = ("Kermany",),
        noises: Mapping[str, Sequence[float]] | None = None,
        alphas: Sequence[float] = (2.0, 0.1),
        seeds: Sequence[int] = (0, 1, 2),
        accuracy: Callable[[Mapping[str, Any]], float] = lambda _: 0.8,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        """One run per combination (`all_clean` once per task, alpha and seed); `accuracy` sees the run's row."""
        rows = []
        for task, alpha, seed, method in itertools.product(tasks, alphas, seeds, methods):
            settings = {"symmetric": (0.3, 0.6), "asymmetric": (0.4,)} if noises is None else noises
            conditions = [(noise, ratio) for noise, ratios in settings.items() for ratio in ratios]
            for noise, ratio in conditions[:1] if method == "all_clean" else conditions:
                own = {"task": task, "alpha": alpha, "seed": seed, "method": method, "noise": noise, "ratio": ratio}
                row = self.run(**{**own, **changes})
                rows.append(self.run(**{**own, **changes, "final/accuracy": accuracy(row)}))
        return rows

    def results(
        self,
        rows: Iterable[Mapping[str, Any]],
        failed: Iterable[Mapping[str, Any]] = (),
        unfinished: Iterable[Mapping[str, Any]] = (),
        warnings: Sequence[str] = (),
        folder: Path | None = None,
    ) -> Results:
        """folder: holds the files of a run under its mlflow_id."""
        runs = pd.DataFrame(list(rows)).reindex(columns=list(RUNS))
        return Results(
            source="sqlite:///store.db, experiment unit",
            runs=runs,
            failed=pd.DataFrame(list(failed)).reindex(columns=list(ENDED)),
            unfinished=pd.DataFrame(list(unfinished)).reindex(columns=list(ENDED)),
            warnings=tuple(warnings),
            reader=FakeReader(runs, folder),
        )


@pytest.fixture
def frames() -> Frames:
    return Frames()
