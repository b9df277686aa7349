"""What `fedsir tracking` and `fedsir ui` do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from experiments import validation_errors
from experiments.console import new_console, say, waiting
from experiments.sweeps.words import many
from fedsir.errors import BadInput
from mlflow_tracking.config import DEFAULT_URI, TrackingConfig, shown_uri, sqlite_path
from mlflow_tracking.serving import ServerSettings, artifact_place, host_of, refuse_server, run_tables, serve

MAX_NAMED = 10


def serve_store(
    uri: str | None, artifacts: str | None, host: str, port: int, workers: int, allowed_hosts: str | None
) -> None:
    """Serve a store with its artifacts until somebody stops it."""
    store = _store(uri)
    refuse_server(store)
    settings = ServerSettings(store, artifact_place(store, artifacts), host_of(host), port, workers, allowed_hosts)
    console = new_console()
    if settings.is_open:
        say(
            console,
            f"Whoever reaches {settings.listens_at} may read, change and delete every run: it asks for no password.",
            "yellow",
        )
    say(console, f"starting MLflow on {shown_uri(store)}, artifacts in {settings.artifacts}")
    serve(settings, partial(_serving, console, settings))
    say(console, "stopped")


def _serving(console: Console, settings: ServerSettings) -> None:
    say(console, f"tracking server at {settings.address}, Ctrl-C ends it", "bold")
    say(console, f"record there with: --set tracking.uri={settings.address}")


def show_store(uri: str | None, port: int) -> None:
    """Serve the dashboard of a store on the loopback interface until somebody stops it."""
    store = _store(uri)
    refuse_server(store)
    path = sqlite_path(store)
    if path is not None and not path.exists():
        raise BadInput(
            f"nothing is recorded in {store} yet: there is no such file.\n"
            "Record a run with `fedsir run`, or name another store with --tracking-uri."
        )
    settings = ServerSettings(store, port=port)
    console = new_console()
    say(console, f"starting MLflow on {shown_uri(store)}")
    serve(settings, partial(_showing, console, settings))


def _showing(console: Console, settings: ServerSettings) -> None:
    say(console, f"MLflow at {settings.address}, Ctrl-C ends it", "bold")
    tables = run_tables(settings)
    for name, address in list(tables.items())[:MAX_NAMED]:
        say(console, f"runs of {name}: {address}")
    if len(tables) > MAX_NAMED:
        say(console, f"and {len(tables) - MAX_NAMED} more experiments")


def export_store(file: Path, experiments: Sequence[str], uri: str | None) -> None:
    """Write runs into an archive."""
    store, console = _store(uri), new_console()
    with waiting(console, "reading the MLflow store"):
        from mlflow_tracking.transfer import export_runs

        count = export_runs(store, experiments, file, partial(say, console))
    say(console, f"{many(count, 'run')} of {shown_uri(store)} written to {file}")


def import_store(file: Path, uri: str | None) -> None:
    """Add the runs of an archive to a store."""
    store, console = _store(uri), new_console()
    with waiting(console, "writing into the MLflow store"):
        from mlflow_tracking.transfer import import_runs

        done = import_runs(store, file, partial(say, console))
    counts = (many(done.added, "run") + " added", f"{done.replaced} replaced since they have gone on")
    say(console, f"{', '.join(counts)}, {done.skipped} there already")
    say(console, f"recorded in {shown_uri(store)}, experiments {', '.join(done.experiments) or 'none'}")


def _store(uri: str | None) -> str:
    """A valid address, the default one if none is given. Raises BadInput."""
    try:
        return TrackingConfig(uri=DEFAULT_URI if uri is None else uri).uri
    except ValidationError as error:
        raise BadInput(
            "the store cannot be used.\n" + validation_errors.explain(error, TrackingConfig, "tracking.")
        ) from error
