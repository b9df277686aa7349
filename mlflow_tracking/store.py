"""Opens the MLflow store: everything that can be wrong with it is found here, before any training."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedsir.errors import BadInput
from fedsir.loading import loading
from mlflow_tracking.config import SERVER_SCHEMES, TrackingConfig, shown_uri, sqlite_path
from mlflow_tracking.describe import EXPERIMENT_NOTE, TAG_GRID, TAG_NOTE
from mlflow_tracking.outage import Reach
from mlflow_tracking.problems import StoreProblemError, explained, refusal
from mlflow_tracking.sqlite_file import alone_on, count_runs, require_creatable

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

CONNECT_TIMEOUT_S = 5.0
PAGE = 1000


@dataclass(frozen=True)
class Store:
    """An opened store. The client carries its own URI, so MLflow's process-wide settings never matter.

    lock: held by whoever uses the client. Threads that wrote to SQLite at once would wait for each other anyway,
    but by polling with a time limit, and MLflow's cache of artifact folders has no lock of its own. reach: what those
    who use the store know of its being out of reach, see `delivery`.
    """

    uri: str
    experiment: str
    experiment_id: str
    client: MlflowClient
    lock: threading.RLock = field(default_factory=threading.RLock, compare=False, repr=False)
    reach: Reach = field(default_factory=Reach, compare=False, repr=False)

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
    with _refusing(config.uri), _quiet_mlflow():
        if path is not None:
            with loading():
                import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  (the client would do so when first used)
            with alone_on(path) as artifacts:
                return _open(config, f"sqlite:///{path}", artifacts)
        _connect(config.uri)
        return _open(config, config.uri, artifacts=None)


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


def check_place(config: TrackingConfig) -> None:
    """Raise BadInput where a look tells that no run could be recorded; without MLflow, and without making a store.

    Quick unless another process is making it.
    """
    path = sqlite_path(config.uri)
    with _refusing(config.uri):
        if path is None:
            _connect(config.uri)
        elif path.exists():
            with alone_on(path):
                pass
        else:
            require_creatable(path)


def check_store(config: TrackingConfig) -> StoreStatus:
    """Look at the store without creating or changing anything."""
    shown = shown_uri(config.uri)
    path = sqlite_path(config.uri)
    try:
        with _quiet_mlflow():
            if path is not None and not path.exists():
                require_creatable(path)
                return StoreStatus(shown, True, 0, "does not exist yet; the first run creates it")
            if path is not None:
                if not os.access(path, os.W_OK):
                    raise StoreProblemError(f"{path} is read-only", "change its permissions or name another file")
                return StoreStatus(shown, True, count_runs(path, config.experiment), "ready")
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
    with _refusing(uri), _quiet_mlflow():
        from mlflow.tracking import MlflowClient

        with contextlib.nullcontext() if path is None else alone_on(path):
            MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)


@contextlib.contextmanager
def _refusing(uri: str) -> Iterator[None]:
    """Whatever goes wrong with the store meanwhile becomes BadInput with reason and remedy."""
    try:
        yield
    except StoreProblemError as problem:
        raise BadInput(refusal(uri, problem)) from None
    except Exception as error:  # database drivers, MLflow and the network share no base class
        raise BadInput(refusal(uri, explained(uri, error))) from error


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
    # MLflow would try again for minutes, with others kept waiting, and without asking first what a request whose
    # answer was lost has done: so a run may be created twice. `delivery` does both, and tries again by itself.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    with loading():
        import mlflow.tracking  # noqa: F401  (its import sets the level of its logger)

    # It logs every error of a database with its traceback, and raises it as well.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL + 1)
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.WARNING)


__all__ = ["Store", "StoreStatus", "check_place", "check_store", "existing_store", "prepare_database", "prepare_store"]
