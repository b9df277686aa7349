"""Commands `fedsir submit` and `fedsir jobs`; imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

AddressOption = Annotated[
    str,
    typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="Dashboard of the Ray cluster; the default suits an SSH tunnel to it."
    ),
]
JobArgument = Annotated[str, typer.Argument(help="Id that `fedsir submit` has printed.", metavar="ID")]

DEFAULT_ADDRESS = "http://127.0.0.1:8265"

jobs_app = typer.Typer(
    help="Look at, follow and stop submitted grids.\n\nExample:\n\n    fedsir jobs status", no_args_is_help=True
)


def register(application: typer.Typer) -> None:
    """Add the commands to the `fedsir` application."""
    application.command()(submit)
    application.add_typer(jobs_app, name="jobs")


def submit(
    grid: Annotated[str, typer.Argument(help="YAML file or name of a shipped grid.", metavar="GRID")],
    address: AddressOption = DEFAULT_ADDRESS,
    store_on_head: Annotated[
        str | None,
        typer.Option(
            help="Folder for record and checkpoints: absolute, of the cluster's head or of a disk that nodes share.",
            metavar="FOLDER",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this value of an axis, as for `fedsir sweep run`.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value; paths are the cluster's.")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="Part of the grid for this job, e.g. 1/2.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what has failed, and nothing else.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the log until the job has ended.")] = True,
    python: Annotated[str, typer.Option(help="Python of the cluster's nodes, where fedsir's requirements are.")] = (
        "python"
    ),
) -> None:
    """Run a grid on a Ray cluster through its Jobs API.

    The package and the grid are sent, no data; images must be where the cluster's head finds them. A grid that is
    running already is joined instead of being started twice; one that was interrupted continues. Ctrl-C leaves the
    job running. Exit code 1 if the job or any run has failed.

    Examples:

        fedsir submit quickstart --store-on-head /data/fedsir

        fedsir submit paper --only task=kermany --set kermany.data.root=/data/OCT2017 --store-on-head /data/fedsir

        fedsir submit mine.yaml --set tracking.uri=http://mlflow:5000 --set work_dir=/data/fedsir --no-wait
    """
    from cluster.commands import submit_grid
    from cluster.submission import Wish

    submit_grid(
        Wish(grid, tuple(only or ()), tuple(overrides or ()), shard, retry, store_on_head, python), address, wait
    )


@jobs_app.command()
def status(
    job: Annotated[str | None, typer.Argument(help="Id of one job; default: all of fedsir's.", metavar="[ID]")] = None,
    address: AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Show the state of submitted jobs; of one that has failed also why.

    Exit code 1 if the one that is asked for has failed or was stopped.

    Examples:

        fedsir jobs status

        fedsir jobs status fedsir-quickstart-3f2a91c0
    """
    from cluster.commands import show_status

    show_status(job, address)


@jobs_app.command()
def logs(
    job: JobArgument,
    address: AddressOption = DEFAULT_ADDRESS,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the log until the job has ended.")] = True,
) -> None:
    """Show the log of a job from its beginning, and follow it.

    Example:

        fedsir jobs logs fedsir-quickstart-3f2a91c0 --no-wait
    """
    from cluster.commands import show_logs

    show_logs(job, address, wait)


@jobs_app.command()
def stop(job: JobArgument, address: AddressOption = DEFAULT_ADDRESS) -> None:
    """Stop a job and wait until its runs are recorded as stopped; submitting the grid again continues them.

    Example:

        fedsir jobs stop fedsir-quickstart-3f2a91c0
    """
    from cluster.commands import stop_job

    stop_job(job, address)
