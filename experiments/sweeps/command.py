"""Commands and options of `fedsir sweep`; imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

sweep_app = typer.Typer(
    help="Run whole grids: data sets, noise, heterogeneity, methods and seeds.\n\n"
    "Example:\n\n    fedsir sweep run quickstart",
    no_args_is_help=True,
)

GridArgument = Annotated[
    str, typer.Argument(help="YAML file or shipped grid (quickstart, ablation, rehearsal, paper).", metavar="GRID")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", help="Only this value of an axis, e.g. --only task=kermany. May be repeated."),
]
GridSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a value in all runs, or under one label of an axis: --set kermany.data.root=/data/OCT2017.",
    ),
]
ShardOption = Annotated[
    str | None, typer.Option("--shard", help="Part of the grid for this process, e.g. 1/2; the others take the rest.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Stop after this many runs.")]
InFlightOption = Annotated[
    int | None,
    typer.Option("--in-flight", min=1, help="Runs at the same time; default: as many as memory and workers allow."),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", help="For logs: failures, and otherwise a line of counts at most once a minute.")
]
CalibrateOption = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine for a few seconds and estimate the time.")
]


@sweep_app.command()
def plan(
    grid: GridArgument, only: OnlyOption = None, overrides: GridSetOption = None, calibrate: CalibrateOption = False
) -> None:
    """Count conditions and runs, and say what they share, need and lack; reads no images.

    Exit code 1 if runs cannot work for reasons that are known already.

    Examples:

        fedsir sweep plan paper --calibrate

        fedsir sweep plan paper --only task=kermany --set kermany.data.root=/data/OCT2017
    """
    from experiments.sweeps.commands import plan_grid

    _end(plan_grid(grid, only or [], overrides or [], calibrate))


@sweep_app.command()
def run(
    grid: GridArgument,
    only: OnlyOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    in_flight: InFlightOption = None,
    quiet: QuietOption = False,
    overrides: GridSetOption = None,
) -> None:
    """Run what the record lacks; finished and failed runs are left alone, interrupted ones continue.

    A run that fails is recorded with its error and does not stop the rest. Exit code 1 if any run has failed.

    Examples:

        fedsir sweep run quickstart

        fedsir sweep run rehearsal --only task=wake_forest --only method=oct_fedsir --only method=fedavg

        fedsir sweep run rehearsal --shard 1/2 --quiet
    """
    _run(grid, only, overrides, shard, limit, in_flight, quiet, retry=False)


@sweep_app.command()
def retry(
    grid: GridArgument,
    only: OnlyOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    in_flight: InFlightOption = None,
    quiet: QuietOption = False,
    overrides: GridSetOption = None,
) -> None:
    """Run again what has failed, and nothing else.

    Example:

        fedsir sweep retry rehearsal
    """
    _run(grid, only, overrides, shard, limit, in_flight, quiet, retry=True)


@sweep_app.command()
def status(grid: GridArgument, only: OnlyOption = None, overrides: GridSetOption = None) -> None:
    """Show per method what is finished, failed, interrupted or missing, and why runs failed.

    Example:

        fedsir sweep status rehearsal --only task=uic
    """
    from experiments.sweeps.commands import grid_status

    grid_status(grid, only or [], overrides or [])


def _end(everything_well: bool) -> None:
    if not everything_well:
        raise typer.Exit(1)


def _run(
    grid: str,
    only: list[str] | None,
    overrides: list[str] | None,
    shard: str | None,
    limit: int | None,
    in_flight: int | None,
    quiet: bool,
    retry: bool,
) -> None:
    from experiments.sweeps.commands import RunOptions, run_grid

    _end(run_grid(grid, only or [], overrides or [], RunOptions(shard, limit, in_flight, quiet, retry)))
