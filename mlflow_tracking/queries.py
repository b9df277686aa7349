"""Questions that a SQLite file answers without MLflow.

MLflow's search loads all metrics, parameters and tags of every run, about 3 ms of computing each, so a grid of 4000
runs would take more than 10 s before anything begins. A SQLite file tells the same in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Any

from mlflow_tracking.config import sqlite_path
from mlflow_tracking.sqlite_file import opened_for_reading
from mlflow_tracking.store import Store


def rows_in_sqlite(store: Store, query: str, values: Sequence[object]) -> list[tuple[Any, ...]] | None:
    """What the tables of a SQLite store say; None for other stores.

    The tables are MLflow's own and may change, so None also stands for whatever SQLite objects to: the caller then
    asks MLflow.
    """
    path = sqlite_path(store.uri)
    if path is None:
        return None
    with contextlib.suppress(sqlite3.Error), store.lock, opened_for_reading(path) as connection:
        return connection.execute(query, tuple(values)).fetchall()
    return None
