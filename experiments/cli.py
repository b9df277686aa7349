"""The `fedsir` command."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from experiments.audit.command import register as register_audit
from experiments.bench.command import bench
from experiments.options import ConfigArgument, SetOption
from experiments.report_command import report
from experiments.studies.command import study_app
from experiments.sweeps.command import sweep_app
from experiments.tracking_command import tracking_app, ui
from fedsir import __version__
from fedsir.errors import BadInput, FedsirError

COMMAND_GROUP = "fedsir.commands"
"""Entry points that add commands: each is a function that takes the typer application."""

EXIT_FAILURE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Federated training of retinal OCT classifiers when some clients hold wrongly annotated images.\n\n"
    "Examples:\n\n    fedsir run\n\n    fedsir compare demo --seeds 0-4\n\n"
    "    fedsir sweep run quickstart\n\n    fedsir explain demo-oct_fedsir-s0\n\n    fedsir doctor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="Look at images and federations without training.\n\nExample:\n\n    fedsir data inspect demo",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")
app.add_typer(study_app, name="study")
app.add_typer(sweep_app, name="sweep")
app.command()(bench)
app.add_typer(tracking_app, name="tracking")
app.command()(ui)
app.command()(report)
register_audit(app, data_app, study_app)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fedsir {__version__}")
        raise typer.Exit


@app.command()
def run(
    config: ConfigArgument = "demo",
    overrides: SetOption = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved configuration and exit.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing an interrupted run.")
    ] = False,
) -> None:
    """Train one condition with one method and record it in MLflow.

    Without arguments: OCT-FedSIR on embedded phantom images. An interrupted run continues at its last round.

    Examples:

        fedsir run

        fedsir run demo --set method.name=fedavg --set seed=3

        fedsir run kermany --set data.root=/data/OCT2017 --set federation.noise.ratio=0.9

        fedsir run mine.yaml --print-config
    """
    from experiments.commands import print_configuration, run_one

    if print_config:
        print_configuration(config, overrides or [])
    else:
        run_one(config, overrides or [], fresh)


@app.command()
def compare(
    config: ConfigArgument = "demo",
    methods: Annotated[
        str,
        typer.Option(help="Methods, separated by commas; all_clean is FedAvg on the federation without noise."),
    ] = "oct_fedsir,fedavg",
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1,2 or 0-4; default: the configuration's.")] = None,
    overrides: SetOption = None,
) -> None:
    """Run several methods on the same federation and print one table.

    Examples:

        fedsir compare demo --methods oct_fedsir,fedavg,all_clean

        fedsir compare demo --seeds 0-4
    """
    from experiments.commands import compare_methods

    compare_methods(config, overrides or [], methods, seeds)


@app.command()
def explain(
    wanted: Annotated[
        str,
        typer.Argument(help="MLflow run id, run name or identity of a finished run, or its beginning.", metavar="RUN"),
    ],
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store that holds the run; default: the default store.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="MLflow experiment that holds the run; default: fedsir.")
    ] = None,
) -> None:
    """Show what decided about clients and labels in a recorded run.

    For each client: descriptors, score, posterior and verdict beside the truth; how the clients were split and why
    the closest call went as it did; class references, and what relabelling changed rightly and wrongly.

    Examples:

        fedsir explain demo-oct_fedsir-s0

        fedsir explain 3f2a --tracking-uri http://localhost:5000 --experiment paper
    """
    from experiments.explain import explain_run

    explain_run(wanted, tracking_uri, experiment)


@app.command()
def methods() -> None:
    """List the methods that can be run.

    Example:

        fedsir methods
    """
    from experiments.commands import list_methods

    list_methods()


@data_app.command("inspect")
def data_inspect(config: ConfigArgument = "demo", overrides: SetOption = None) -> None:
    """Show images per class and patient, and the federation before and after label noise; trains nothing.

    Examples:

        fedsir data inspect

        fedsir data inspect kermany --set data.root=/data/OCT2017
    """
    from experiments.commands import inspect_data

    inspect_data(config, overrides or [])


@data_app.command("pretext-weights")
def data_pretext_weights(
    out: Annotated[Path, typer.Argument(help="Where to write the .safetensors file.")],
) -> None:
    """Rebuild the `phantom-pretext` weights of the tiny backbone (minutes).

    The network regresses anatomy parameters of phantoms from a seed range of its own, never disease labels.

    Example:

        fedsir data pretext-weights tiny.safetensors
    """
    from experiments.commands import rebuild_pretext_weights

    rebuild_pretext_weights(out)


def add_plugin_commands(application: typer.Typer) -> None:
    """Let other packages (such as `cluster`) add their commands."""
    for entry in sorted(entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        register: Callable[[typer.Typer], None] = entry.load()
        register(application)


def main() -> None:
    """Entry point; exit codes 0 (done), 1 (failure), 2 (bad input), 130 and 143 (stopped by Ctrl-C or SIGTERM)."""
    # Ray warns at import about a change of default that does not concern runs on CPUs, and reports usage.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Python looks through everything for garbage once more before it ends: for a second or two, with torch and MLflow.
    # What is written to is closed by then, not left to that.
    atexit.register(gc.freeze)
    add_plugin_commands(app)
    try:
        app()
    except BadInput as error:
        _complain(error)
        sys.exit(EXIT_BAD_INPUT)
    except FedsirError as error:
        _complain(error)
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _complain(error: FedsirError) -> None:
    typer.echo(f"fedsir: {error}", err=True)
