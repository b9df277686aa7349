"""`fedsir report`: its options; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.sweeps.command import GridSetOption, OnlyOption

GridOrNone = Annotated[
    str | None,
    typer.Argument(
        help="YAML file or shipped grid; the report is about its runs, and names those that are missing. "
        "Without it: all runs of the experiment.",
        metavar="[GRID]",
        show_default=False,
    ),
]


def report(
    grid: GridOrNone = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store of the runs; default: the grid's, or the default store.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="MLflow experiment of the runs; default: the grid's, or fedsir.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files; those of an earlier report are replaced.")] = Path(
        "report"
    ),
    format: Annotated[str, typer.Option(help="Which files, separated by commas.")] = "html,md,tex,csv",
    only: OnlyOption = None,
    overrides: GridSetOption = None,
) -> None:
    """Write tables and figures of recorded runs beside the paper's: one page, and the tables as text.

    The page holds everything inside itself and works without a network. The report of a whole grid is also stored
    with the MLflow run of its sweep.

    Examples:

        fedsir report quickstart

        fedsir report --experiment fedsir --out demo-report --format html

        fedsir report paper --only task=kermany --set kermany.data.root=/data/OCT2017
    """
    from experiments.report import write_report

    write_report(grid, tracking_uri, experiment, out, format, only or [], overrides or [])
