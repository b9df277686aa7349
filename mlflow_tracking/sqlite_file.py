"""A store's SQLite file without MLflow: whether it can be used, what it holds, and who may create something in it."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from mlflow_tracking.describe import TAG_GRID
from mlflow_tracking.problems import StoreProblemError

# Creating the schema takes seconds; another process that still does so after this long is stuck.
LOCK_TIMEOUT_S = 120.0
# Another process that commits keeps others out for a moment. MLflow's own connections wait as long.
SQLITE_TIMEOUT_S = 20.0


def lock_file(path: Path) -> Path:
    """Held while something is created in the SQLite file at `path` that must be there once."""
    return path.with_name(path.name + ".lock")


@contextlib.contextmanager
def alone_on(path: Path) -> Iterator[Path]:
    """The folder for artifacts beside the SQLite file, which no other process opens for the first time meanwhile."""
    from filelock import FileLock, Timeout

    artifacts = path.parent / "artifacts"
    lock = lock_file(path)
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=artifacts), FileLock(lock, timeout=LOCK_TIMEOUT_S):
            _probe(path)
            yield artifacts
    except Timeout:
        raise StoreProblemError(
            f"another process has been creating the store for {LOCK_TIMEOUT_S:.0f} s",
            f"end that process, or delete {lock} if there is none",
        ) from None


def _probe(path: Path) -> None:
    """Fail early, and without MLflow's retries, on files that cannot be written or are not MLflow's."""
    with contextlib.closing(sqlite3.connect(path, timeout=SQLITE_TIMEOUT_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        tables = _tables(connection)
    if tables and "experiments" not in tables:
        raise _foreign(path)


@contextlib.contextmanager
def opened_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection by which nothing can harm a record, nor create or migrate the schema as an MlflowClient would."""
    uri = f"file:{quote(str(path))}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=SQLITE_TIMEOUT_S)) as connection:
        yield connection


def count_runs(path: Path, experiment: str) -> int:
    """Runs of an experiment but those above whole grids. Raises StoreProblemError for a file that is not MLflow's."""
    with opened_for_reading(path) as connection:
        tables = _tables(connection)
        if not tables:
            return 0
        if not {"experiments", "runs", "tags"} <= tables:
            raise _foreign(path)
        (count,) = connection.execute(
            "SELECT count(*) FROM runs JOIN experiments USING (experiment_id)"
            " WHERE experiments.name = ? AND runs.lifecycle_stage = 'active'"
            " AND NOT EXISTS (SELECT 1 FROM tags WHERE tags.run_uuid = runs.run_uuid AND tags.key = ?)",
            (experiment, TAG_GRID),
        ).fetchone()
    return int(count)


def require_creatable(path: Path) -> None:
    """Raise StoreProblemError if no file can be created at `path`; creates nothing itself."""
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        # Tried rather than asked for: permission bits say nothing about root, full disks and special file systems.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise StoreProblemError(
            f"{path} cannot be created under {parent} ({error.strerror or error})", "name a file in a folder of yours"
        ) from None


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _foreign(path: Path) -> StoreProblemError:
    return StoreProblemError(f"{path} is a SQLite database of another program", "name another file")
