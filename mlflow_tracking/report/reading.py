"""Reads the runs of an experiment: a SQLite store by its tables, read-only in a few queries; others by searching."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import pandas as pd

from fedsir.events import FINAL_METRICS, ROUND_METRICS
from mlflow_tracking.config import sqlite_path
from mlflow_tracking.describe import TAG_ERROR, TAG_RESUMED, TAG_RUN_ID
from mlflow_tracking.sqlite_file import opened_for_reading
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

TAGS = (TAG_RUN_ID, TAG_ERROR, TAG_RESUMED)
METRICS = (*FINAL_METRICS, *ROUND_METRICS)
CURVE = ("mlflow_id", "key", "step", "value")
# Fewer than the variables that SQLite allows in one statement.
IDS_PER_QUERY = 500

Value = TypeVar("Value")


@dataclass(frozen=True)
class Recorded:
    """One MLflow run that has an identity, as the store has it.

    started: milliseconds since 1970. seconds: until its end, None where it has none or was resumed, since the time
    between its parts is no work. metrics: last values. classes, digest: of the images, empty where no data set was
    noted.
    """

    mlflow_id: str
    name: str
    status: str
    started: int
    seconds: float | None
    artifact_uri: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    classes: tuple[str, ...] = ()
    digest: str = ""

    @property
    def identity(self) -> str:
        """Equal exactly for runs whose configurations must give the same result."""
        return self.tags[TAG_RUN_ID]


class Reader(Protocol):
    """What is read only when it is asked for."""

    def curves(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Every recorded value: columns mlflow_id, key, step, value, sorted by them."""
        ...

    def totals(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Sums over all rounds: one row per run (index mlflow_id), one column per key, NaN where never recorded."""
        ...

    def artifact(self, mlflow_id: str, uri: str, path: str) -> Path | None:
        """A file of a run, None where it has none. uri: of the run's artifacts."""
        ...


def read_records(store: Store) -> list[Recorded]:
    """Every run of the experiment that has an identity, newest first."""
    path = sqlite_path(store.uri)
    if path is not None:
        # The tables are MLflow's own and may change, so whatever SQLite objects to is left to the search.
        with contextlib.suppress(sqlite3.Error), store.lock, opened_for_reading(path) as connection:
            return _records_in_sqlite(connection, int(store.experiment_id))
    return [_recorded(run) for run in store.runs() if TAG_RUN_ID in run.data.tags]


@dataclass(frozen=True)
class StoreReader:
    """Reads curves, totals and files of the runs of a store."""

    store: Store
    # Downloads live as long as the reader.
    _downloads: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list, repr=False, compare=False)
    # By key; the longest query of a report, which several parts of it need.
    _totals: dict[str, pd.Series[float]] = field(default_factory=dict, repr=False, compare=False)

    def curves(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        path = sqlite_path(self.store.uri)
        if path is not None:
            with contextlib.suppress(sqlite3.Error), self.store.lock, opened_for_reading(path) as connection:
                return _curve_table(_points_in_sqlite(connection, "run_uuid, key, step, value", "", keys, mlflow_ids))
        return _curve_table(self._history(keys, mlflow_ids))

    def totals(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        wanted = pd.Index(mlflow_ids, name="mlflow_id")
        lacking = [k for k in keys if k not in self._totals or not wanted.isin(self._totals[k].index).all()]
        if lacking:
            table = self._summed(lacking, mlflow_ids)
            self._totals.update({key: table[key] for key in lacking})
        return pd.DataFrame({key: self._totals[key].reindex(wanted) for key in keys}, index=wanted)

    def _summed(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        path = sqlite_path(self.store.uri)
        if path is not None:
            with contextlib.suppress(sqlite3.Error), self.store.lock, opened_for_reading(path) as connection:
                group = "GROUP BY run_uuid, key"
                rows = list(_points_in_sqlite(connection, "run_uuid, key, sum(value)", group, keys, mlflow_ids))
                return _total_table(rows, keys, mlflow_ids)
        points = self.curves(keys, mlflow_ids)
        sums = points.groupby(["mlflow_id", "key"], as_index=False)["value"].sum()
        return _total_table(sums.itertuples(index=False, name=None), keys, mlflow_ids)

    def artifact(self, mlflow_id: str, uri: str, path: str) -> Path | None:
        folder = local_folder(uri)
        if folder is not None:
            file = folder / path
            return file if file.is_file() else None
        return self._download(mlflow_id, path)

    def _history(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> Iterator[tuple[str, str, int, float]]:
        for mlflow_id in mlflow_ids:
            for key in keys:
                with self.store.lock:
                    points = self.store.client.get_metric_history(mlflow_id, key)
                yield from ((mlflow_id, key, point.step, point.value) for point in points)

    def _download(self, mlflow_id: str, path: str) -> Path | None:
        from mlflow.exceptions import MlflowException

        folder, _, name = path.rpartition("/")
        with self.store.lock:
            try:
                # Asked first: what a missing file raises depends on where artifacts are kept.
                known = {item.path.rpartition("/")[2] for item in self.store.client.list_artifacts(mlflow_id, folder)}
                if name not in known:
                    return None
                if not self._downloads:
                    self._downloads.append(tempfile.TemporaryDirectory(prefix="fedsir-report-"))
                target = Path(self._downloads[0].name) / mlflow_id
                target.mkdir(exist_ok=True)
                return Path(self.store.client.download_artifacts(mlflow_id, path, str(target)))
            except (MlflowException, OSError):
                return None


def local_folder(uri: str) -> Path | None:
    """The folder that an artifact URI means, None for those that only a server can read."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    # A one-letter scheme is a Windows drive.
    return Path(uri) if len(parts.scheme) < 2 else None


def _records_in_sqlite(connection: sqlite3.Connection, experiment: int) -> list[Recorded]:
    runs = connection.execute(
        "SELECT run_uuid, name, status, start_time, end_time, artifact_uri FROM runs"
        " WHERE experiment_id = ? AND lifecycle_stage = 'active' ORDER BY start_time DESC, run_uuid",
        (experiment,),
    ).fetchall()
    tags = _by_run(connection.execute(_of_experiment("tags", TAGS), (experiment, *TAGS)))
    params = _by_run(connection.execute(_of_experiment("params"), (experiment,)))
    metrics = _by_run(
        connection.execute(_of_experiment("latest_metrics", METRICS) + " AND NOT is_nan", (experiment, *METRICS))
    )
    datasets = {
        mlflow_id: (_classes(source), digest)
        for mlflow_id, source, digest in connection.execute(
            "SELECT inputs.destination_id, datasets.dataset_source, datasets.digest FROM inputs"
            " JOIN datasets ON datasets.dataset_uuid = inputs.source_id"
            " WHERE inputs.source_type = 'DATASET' AND inputs.destination_type = 'RUN' AND datasets.experiment_id = ?",
            (experiment,),
        )
    }
    return [
        Recorded(
            mlflow_id=mlflow_id,
            name=name or "",
            status=status,
            started=started or 0,
            seconds=_seconds(started, ended, tags[mlflow_id]),
            artifact_uri=uri or "",
            tags=tags[mlflow_id],
            params=params.get(mlflow_id, {}),
            metrics=metrics.get(mlflow_id, {}),
            classes=datasets.get(mlflow_id, ((), ""))[0],
            digest=datasets.get(mlflow_id, ((), ""))[1],
        )
        for mlflow_id, name, status, started, ended, uri in runs
        if TAG_RUN_ID in tags.get(mlflow_id, {})
    ]


def _of_experiment(table: str, keys: Sequence[str] = ()) -> str:
    chosen = f" AND {table}.key IN ({_marks(keys)})" if keys else ""
    return (
        f"SELECT run_uuid, {table}.key, {table}.value FROM {table} JOIN runs USING (run_uuid)"
        f" WHERE runs.experiment_id = ? AND runs.lifecycle_stage = 'active'{chosen}"
    )


def _marks(values: Sequence[str]) -> str:
    return ",".join("?" * len(values))


def _by_run(rows: Iterable[tuple[str, str, Value]]) -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = {}
    for mlflow_id, key, value in rows:
        found.setdefault(mlflow_id, {})[key] = value
    return found


def _recorded(run: Run) -> Recorded:
    datasets = [] if run.inputs is None else [item.dataset for item in run.inputs.dataset_inputs]
    tags = {key: run.data.tags[key] for key in TAGS if key in run.data.tags}
    return Recorded(
        mlflow_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        started=run.info.start_time or 0,
        seconds=_seconds(run.info.start_time, run.info.end_time, tags),
        artifact_uri=run.info.artifact_uri or "",
        tags=tags,
        params=dict(run.data.params),
        metrics={key: run.data.metrics[key] for key in METRICS if key in run.data.metrics},
        classes=_classes(datasets[0].source) if datasets else (),
        digest=datasets[0].digest if datasets else "",
    )


def _seconds(started: int | None, ended: int | None, tags: Mapping[str, str]) -> float | None:
    return None if started is None or ended is None or TAG_RESUMED in tags else (ended - started) / 1000


def _classes(source: str) -> tuple[str, ...]:
    try:
        return tuple(str(name) for name in json.loads(source)["classes"])
    except (ValueError, KeyError, TypeError):
        return ()


def _points_in_sqlite(
    connection: sqlite3.Connection, select: str, group: str, keys: Sequence[str], mlflow_ids: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Rows of `select` per group of one value per run, key and step; MLflow keeps both where a step is logged twice."""
    for start in range(0, len(mlflow_ids), IDS_PER_QUERY):
        some = mlflow_ids[start : start + IDS_PER_QUERY]
        yield from connection.execute(
            f"SELECT {select} FROM (SELECT run_uuid, key, step, max(value) AS value FROM metrics"
            f" WHERE run_uuid IN ({_marks(some)}) AND key IN ({_marks(keys)}) AND NOT is_nan"
            f" GROUP BY run_uuid, key, step) {group}",
            (*some, *keys),
        )


def _total_table(
    rows: Iterable[tuple[str, str, float]], keys: Sequence[str], mlflow_ids: Sequence[str]
) -> pd.DataFrame:
    table = pd.DataFrame(list(rows), columns=["mlflow_id", "key", "value"])
    wide = table.pivot(index="mlflow_id", columns="key", values="value")
    return wide.reindex(index=list(mlflow_ids), columns=list(keys)).astype(float)


def _curve_table(points: Iterable[tuple[str, str, int, float]]) -> pd.DataFrame:
    table = pd.DataFrame(list(points), columns=list(CURVE))
    table = table.drop_duplicates(["mlflow_id", "key", "step"], keep="last")
    return table.sort_values(["mlflow_id", "key", "step"], ignore_index=True)
