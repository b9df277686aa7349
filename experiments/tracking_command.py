"""Commands and options of `fedsir tracking`, and `fedsir ui`; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

tracking_app = typer.Typer(
    help="Serve the record to other machines, or carry it there in a file.\n\nExample:\n\n    fedsir tracking serve",
    no_args_is_help=True,
)

StoreOption = Annotated[
    str | None, typer.Option("--tracking-uri", help="MLflow store; default: the default store, fedsir-runs/mlflow.db.")
]
PortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]


@tracking_app.command()
def serve(
    backend_store_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_BACKEND_STORE_URI",
            help="SQLite file or postgresql+psycopg://USER:PASSWORD@HOST/DB; default: the default store.",
            show_envvar=True,
        ),
    ] = None,
    artifacts: Annotated[
        str | None,
        typer.Option(help="Folder or s3://BUCKET/FOLDER for the files of runs; default: beside the SQLite file."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, without a password.")
    ] = "127.0.0.1",
    port: PortOption = 5000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 4,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Names under which other machines reach it, separated by commas, e.g. node1,node1:5000."),
    ] = None,
) -> None:
    """Start an MLflow tracking server, for sweeps of several machines; ends with Ctrl-C.

    It asks for no password: leave it on this machine and reach it through SSH, or put a proxy in front of it.

    Examples:

        fedsir tracking serve

        fedsir tracking serve --backend-store-uri postgresql+psycopg://fedsir@localhost/db --artifacts /data/artifacts

        fedsir sweep run paper --set tracking.uri=http://127.0.0.1:5000
    """
    from experiments.tracking import serve_store

    serve_store(backend_store_uri, artifacts, host, port, workers, allowed_hosts)


@tracking_app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(help="Archive to write.", metavar="FILE")],
    experiment: Annotated[
        list[str] | None, typer.Option(help="Only this MLflow experiment. May be repeated; default: all.")
    ] = None,
    tracking_uri: StoreOption = None,
) -> None:
    """Write runs with their figures, files, tags and data sets into one archive.

    For clusters without a network: export there, carry the file, import here.

    Example:

        fedsir tracking export runs.zip --experiment paper
    """
    from experiments.tracking import export_store

    export_store(file, experiment or [], tracking_uri)


@tracking_app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="Archive that `fedsir tracking export` has written.", metavar="FILE")],
    tracking_uri: StoreOption = None,
) -> None:
    """Add the runs of an archive to a store; runs that are there already are skipped.

    Example:

        fedsir tracking import runs.zip --tracking-uri http://localhost:5000
    """
    from experiments.tracking import import_store

    import_store(file, tracking_uri)


def ui(
    tracking_uri: StoreOption = None,
    port: PortOption = 5000,
) -> None:
    """Show the MLflow dashboard of a store in the browser of this machine; ends with Ctrl-C.

    Examples:

        fedsir ui

        fedsir ui --tracking-uri sqlite:////data/fedsir-runs/mlflow.db --port 5001
    """
    from experiments.tracking import show_store

    show_store(tracking_uri, port)
