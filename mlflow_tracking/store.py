"""Opens the MLflow store: everything that can be wrong with it is found here, before any training."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from fedsir.errors import BadInput
from mlflow_tracking.config import SERVER_SCHEMES, TrackingConfig, shown_uri, sqlite_path
from mlflow_tracking.describe import EXPERIMENT_NOTE, TAG_GRID, TAG_NOTE
from mlflow_tracking.problems import StoreProblemError, explained, refusal

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# Creating the schema takes seconds; another process that still does so after this long is stuck.
LOCK_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0
PAGE = 1000


@dataclass(frozen=True)
class Store:
    """An opened store. The client carries its own URI, so MLflow's process-wide settings never matter.

    lock: held by whoever uses the client. Threads that wrote to SQLite at once would wait for each other anyway,
    but by polling with a time limit, and MLflow's cache of artifact folders has no lock of its own.
    """

    uri: str
    experiment: str
    experiment_id: str
    client: MlflowClient
    lock: threading.RLock = field(default_factory=threading.RLock, compare=False, repr=False)

    def runs(self, filter_string: str = "") -> list[Run]:
        """All runs of the experiment that pass MLflow's `filter_string`, newest first; not those above whole grids."""
        return [run for run in self.search(filter_string) if TAG_GRID not in run.data.tags]

    def search(self, filter_string: str = "") -> list[Run]:
        """As `runs`, with those above whole grids."""
        found: list[Run] = []
        token: str | None = None
        while True:
            with self.lock:
                page = self.client.search_runs(
                    [self.experiment_id],
                    filter_string,
                    max_results=PAGE,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            found.extend(page)
            token = page.token
            if not token:
                return found


@dataclass(frozen=True)
class StoreStatus:
    """What `check_store` found. `runs` counts the experiment's runs, None where they cannot be counted."""

    uri: str
    reachable: bool
    runs: int | None
    detail: str


def prepare_store(config: TrackingConfig) -> Store:
    """Open the store, creating folders, schema and experiment where they are missing.

    Safe to call from several processes at once. Raises BadInput with reason and remedy if no run could be
    recorded there.
    """
    path = sqlite_path(config.uri)
    try:
        with _quiet_mlflow():
            if path is not None:
                with _alone_on(path) as artifacts:
                    return _open(config, f"sqlite:///{path}", artifacts)
            _connect(config.uri)
            return _open(config, config.uri, artifacts=None)
    except StoreProblemError as problem:
        raise BadInput(refusal(config.uri, problem)) from None
    except Exception as error:  # database drivers, MLflow and the network share no base class
        raise BadInput(refusal(config.uri, explained(config.uri, error))) from error


def existing_store(config: TrackingConfig) -> Store:
    """Open a store that holds runs already, for reading them; unlike `prepare_store`, creates none.

    Raises BadInput with reason and remedy.
    """
    status = check_store(config)
    if not status.reachable:
        return prepare_store(config)  # says best what is wrong
    if status.runs == 0:
        raise BadInput(
            f"no run is recorded in experiment {config.experiment!r} of {status.uri}.\n"
            "Record one with `fedsir run`, or name the store and experiment that runs were recorded in."
        )
    return prepare_store(config)


def check_store(config: TrackingConfig) -> StoreStatus:
    """Look at the store without creating or changing anything."""
    shown = shown_uri(config.uri)
    path = sqlite_path(config.uri)
    try:
        with _quiet_mlflow():
            if path is not None and not path.exists():
                _creatable(path)
                return StoreStatus(shown, True, 0, "does not exist yet; the first run creates it")
            if path is not None:
                if not os.access(path, os.W_OK):
                    raise StoreProblemError(f"{path} is read-only", "change its permissions or name another file")
                return StoreStatus(shown, True, _count_in_sqlite(path, config.experiment), "ready")
            _connect(config.uri)
            return StoreStatus(shown, True, _count_through_client(config), "ready")
    except Exception as error:
        problem = error if isinstance(error, StoreProblemError) else explained(config.uri, error)
        return StoreStatus(shown, False, None, f"{problem.reason}; {problem.remedy}")


def prepare_database(uri: str) -> None:
    """Create folders and MLflow's tables where they are missing, but no experiment: for those who serve it.

    Raises BadInput with reason and remedy.
    """
    path = sqlite_path(uri)
    try:
        with _quiet_mlflow():
            from mlflow.tracking import MlflowClient

            with contextlib.nullcontext() if path is None else _alone_on(path):
                MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
    except StoreProblemError as problem:
        raise BadInput(refusal(uri, problem)) from None
    except Exception as error:  # database drivers and MLflow share no base class
        raise BadInput(refusal(uri, explained(uri, error))) from error


def lock_file(path: Path) -> Path:
    """Held while something is created in the SQLite file at `path` that must be there once."""
    return path.with_name(path.name + ".lock")


@contextlib.contextmanager
def _alone_on(path: Path) -> Iterator[Path]:
    """The folder for artifacts beside the SQLite file, which no other process opens for the first time meanwhile."""
    from filelock import FileLock, Timeout

    artifacts = path.parent / "artifacts"
    lock = lock_file(path)
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=artifacts), FileLock(lock, timeout=LOCK_TIMEOUT_S):
            _probe_sqlite(path)
            yield artifacts
    except Timeout:
        raise StoreProblemError(
            f"another process has been creating the store for {LOCK_TIMEOUT_S:.0f} s",
            f"end that process, or delete {lock} if there is none",
        ) from None


def _probe_sqlite(path: Path) -> None:
    """Fail early, and without MLflow's retries, on files that cannot be written or are not MLflow's."""
    with contextlib.closing(sqlite3.connect(path, timeout=20.0, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        tables = _tables(connection)
    if tables and "experiments" not in tables:
        raise _foreign(path)


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _foreign(path: Path) -> StoreProblemError:
    return StoreProblemError(f"{path} is a SQLite database of another program", "name another file")


def _open(config: TrackingConfig, uri: str, artifacts: Path | None) -> Store:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        try:
            client.create_experiment(
                config.experiment,
                artifact_location=None if artifacts is None else artifacts.as_uri(),
                tags={TAG_NOTE: EXPERIMENT_NOTE},
            )
        except MlflowException as error:
            # On a server the file lock does not help: someone else may have been faster.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        raise StoreProblemError(
            f"experiment {config.experiment!r} was created but cannot be read back",
            "check the permissions of this user on the server",
        )
    if experiment.lifecycle_stage != "active":
        raise StoreProblemError(
            f"experiment {config.experiment!r} has been deleted",
            f"restore it with `mlflow experiments restore --experiment-id {experiment.experiment_id}` "
            "or choose another name",
        )
    return Store(uri, config.experiment, str(experiment.experiment_id), client)


def _connect(uri: str) -> None:
    """Is anybody listening? MLflow itself would retry for minutes before saying no."""
    parts = urlsplit(uri)
    if parts.scheme not in SERVER_SCHEMES or parts.hostname is None:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StoreProblemError(
            f"no server answers at {parts.hostname}:{port} ({error.strerror or error})",
            "start it (`mlflow server --backend-store-uri ...`), correct the address, "
            "or record into a local SQLite file",
        ) from None


def _creatable(path: Path) -> None:
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


def _count_in_sqlite(path: Path, experiment: str) -> int:
    # Read with SQLite alone: an MlflowClient would create or migrate the schema.
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
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


def _count_through_client(config: TrackingConfig) -> int:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)
    experiment = client.get_experiment_by_name(config.experiment)
    if experiment is None:
        return 0
    return len(Store(config.uri, config.experiment, str(experiment.experiment_id), client).runs())


@contextlib.contextmanager
def _quiet_mlflow() -> Iterator[None]:
    """Keep MLflow's and alembic's lines off the console; afterwards only warnings pass."""
    # Hospital machines should not report usage to a third party unless their owner wants that.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow.tracking  # noqa: F401  (its import sets the level of its logger)

    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.WARNING)


__all__ = ["Store", "StoreStatus", "check_store", "existing_store", "prepare_database", "prepare_store"]
