"""The finished runs of an experiment as one table, and what did not finish."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from mlflow_tracking.config import shown_uri
from mlflow_tracking.report.assembly import (
    CELL,
    by_outcome,
    name_budgets,
    newest_of_cell,
    row_of,
    tell_maps_apart,
    tell_settings_apart,
)
from mlflow_tracking.report.budgets import CONFIG_FILE
from mlflow_tracking.report.reading import METRICS, Reader, Recorded, StoreReader, local_folder, read_records
from mlflow_tracking.store import Store

FACTS = (
    "mlflow_id",
    "run_id",
    "name",
    "task",
    "dataset",
    "data_kind",
    "noise",
    "ratio",
    "alpha",
    "clients",
    "clean_clients",
    "method",
    "seed",
    "budget",
    "settings",
    "started",
    "seconds",
    "artifact_uri",
)
RUNS = (*FACTS, *METRICS)
"""Columns of `Results.runs`; see there."""
ENDED = ("mlflow_id", "run_id", "name", "error")
"""Columns of `Results.failed` and `Results.unfinished`."""


@dataclass(frozen=True)
class Results:
    """What an experiment holds.

    source: store and experiment, without passwords.
    runs: one row per finished run. `task`: the paper's name of the task (`Kermany`, `UIC`, `WF`), also for its phantom
    rehearsal, otherwise the data set's; `data_kind`: `phantom` or `real`; `noise`: `symmetric`, `asymmetric` (with
    the name of the map, `asymmetric (uic_pair_swap)`, where a task has several) or `none`; `ratio`, `alpha`: float;
    `clean_clients`: as drawn; `method`: label, `all_clean` for FedAvg without noise (noise `none`, ratio 0: one run for
    every noise setting); `budget`: short words for what runs of a cell have in common, unique within the task;
    `settings`: the same in full; `started`: ms since 1970; `seconds`: until the end, NaN for resumed runs; then the
    last value of each of `fedsir.events.FINAL_METRICS` and `ROUND_METRICS` (shares between 0 and 1), NaN where a
    method has none. No two rows agree in all of `CELL`.
    failed, unfinished: of identities that never finished, the latest run, with its error or what it is doing.
    warnings: what a reader of figures made of these runs should know.
    """

    source: str
    runs: pd.DataFrame
    failed: pd.DataFrame
    unfinished: pd.DataFrame
    warnings: tuple[str, ...]
    reader: Reader = field(repr=False)

    def curves(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Figures over rounds: columns mlflow_id, key, step (finished rounds), value."""
        return self.reader.curves(keys, mlflow_ids)

    def totals(self, keys: Sequence[str], mlflow_ids: Sequence[str]) -> pd.DataFrame:
        """Sums over all rounds, indexed by mlflow_id, one column per key; NaN where never recorded."""
        return self.reader.totals(keys, mlflow_ids)

    def artifact(self, mlflow_id: str, path: str) -> Path | None:
        """A file of a finished run, such as `identification/similarity.csv`; None where it has none.

        Raises KeyError for ids that are not in `runs`.
        """
        found = self.runs.loc[self.runs["mlflow_id"] == mlflow_id, "artifact_uri"]
        if found.empty:
            raise KeyError(mlflow_id)
        return self.reader.artifact(mlflow_id, str(found.iloc[0]), path)

    @property
    def data_kinds(self) -> tuple[str, ...]:
        return tuple(sorted(self.runs["data_kind"].unique()))


def read_results(store: Store, identities: Collection[str] | None = None) -> Results:
    """Everything about the experiment of `store` but curves and files, which are read when they are asked for.

    identities: of the runs that count, such as those of a grid; None for all. Others must not even be read, since of
    runs of one cell only the newest counts.
    """
    source = f"{shown_uri(store.uri)}, experiment {store.experiment}"
    records = read_records(store)
    chosen = None if identities is None else set(identities)
    wanted = [record for record in records if chosen is None or record.identity in chosen]
    results = results_of(wanted, source, StoreReader(store), config_text)
    left = len({r.identity for r in records}) - len({r.identity for r in wanted})
    if not left:
        return results
    note = f"{left} other run{'' if left == 1 else 's'} of the experiment {'is' if left == 1 else 'are'} left out."
    return replace(results, warnings=(*results.warnings, note))


def config_text(record: Recorded) -> str | None:
    """The configuration of a run as recorded, None where it cannot be read without asking a server."""
    folder = local_folder(record.artifact_uri)
    try:
        return None if folder is None else (folder / CONFIG_FILE).read_text("utf-8")
    except OSError:
        return None


def results_of(
    records: Sequence[Recorded], source: str, reader: Reader, config_of: Callable[[Recorded], str | None]
) -> Results:
    """Results from MLflow runs, newest first. config_of: text of a run's configuration."""
    outcomes = by_outcome(records)
    rows = [row_of(record, config_of(record)) for record in outcomes.finished]
    name_budgets(rows)
    tell_maps_apart(rows)
    mixed = tell_settings_apart(rows)
    kept, doubled = newest_of_cell(rows)
    runs = pd.DataFrame(kept).reindex(columns=list(RUNS)).sort_values(list(CELL), ignore_index=True)
    warnings = (*outcomes.warnings, *mixed, *doubled)
    return Results(source, runs, _ended(outcomes.failed), _ended(outcomes.unfinished), warnings, reader)


def _ended(records: Sequence[tuple[Recorded, str]]) -> pd.DataFrame:
    rows = [(record.mlflow_id, record.identity, record.name, error) for record, error in records]
    return pd.DataFrame(rows, columns=list(ENDED)).sort_values("name", ignore_index=True)


__all__ = ["CELL", "ENDED", "RUNS", "Results", "read_results"]
