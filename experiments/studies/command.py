"""`fedsir study`: commands that measure over many conditions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from experiments.options import ConfigArgument, SetOption
from fedsir.errors import BadInput

study_app = typer.Typer(
    help="Measure over many conditions without full runs.\n\n"
    "Example:\n\n    fedsir study identification rehearsal_kermany --seeds 0-2",
    no_args_is_help=True,
)


@study_app.command()
def identification(
    config: ConfigArgument = "rehearsal_kermany",
    methods: Annotated[str, typer.Option(help="Methods with a stage I, separated by commas.")] = "fedsir,oct_fedsir",
    noise: Annotated[
        str, typer.Option(help="`paper` for its 13 settings, or a list such as symmetric:0.6,asymmetric:0.4.")
    ] = "paper",
    alphas: Annotated[str, typer.Option(help="Dirichlet concentrations.")] = "2.0,0.5,0.1",
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2 or 0-4.")] = "0-2",
    out: Annotated[
        Path | None, typer.Option(help="CSV of the verdicts; a study that was stopped goes on from it.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Stage I alone over noise, heterogeneity and seeds: who is taken for clean, and with what margin.

    Settings under method.stage_one hold for every method of the study. Each verdict is made by both splits,
    mixture and largest gap, from the same similarities.

    Examples:

        fedsir study identification rehearsal_uic --noise symmetric:0.6,asymmetric:0.6 --alphas 2.0

        fedsir study identification kermany --set data.root=/data/OCT2017 --methods oct_fedsir,oct_fedsir/equal_steps
    """
    from experiments.commands import study_identification
    from experiments.compare import parse_methods, parse_seeds

    study_identification(
        config,
        overrides or [],
        tuple(parse_methods(methods)),
        parse_noise(noise),
        parse_alphas(alphas),
        tuple(parse_seeds(seeds)),
        out,
    )


def parse_noise(text: str) -> tuple[tuple[str, float], ...]:
    """Settings from `paper` or `symmetric:0.6,asymmetric:0.4`. Raises BadInput for anything else."""
    from experiments.studies.identification import PAPER_NOISE

    if text == "paper":
        return PAPER_NOISE
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(symmetric|asymmetric):(0?\.\d+|0|1|1\.0)", part.strip())
        if match is None:
            raise BadInput(f"--noise {text!r}: expected paper, or settings such as symmetric:0.6,asymmetric:0.4.")
        found.append((match[1], float(match[2])))
    return tuple(found)


def parse_alphas(text: str) -> tuple[float, ...]:
    """Positive numbers from `2.0,0.5,0.1`. Raises BadInput for anything else."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--alphas {text!r}: expected numbers such as 2.0,0.5,0.1.") from error
    if not all(0 < value < float("inf") for value in values):
        raise BadInput(f"--alphas {text!r}: a Dirichlet concentration is a positive number.")
    return values
