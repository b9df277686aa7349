"""`fedsir bench`: the command; light, so that `--help` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsir.errors import BadInput

PARTS = ("ratio", "breakdown", "growth", "memory", "startup", "imports", "preparation")


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join(PARTS)}; default: all.", metavar="[PART]..."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file as well.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that everything works, its figures mean nothing.")
    ] = False,
) -> None:
    """Measure what a federated run costs beside a bare PyTorch loop, how it grows, and how it starts.

    Ratios hold on any machine; seconds are this machine's. Nothing else should run meanwhile: the whole takes about
    an hour on two cores.

    Examples:

        fedsir bench

        fedsir bench ratio memory --json bench.json
    """
    chosen = parts or list(PARTS)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise BadInput(f"unknown part {unknown[0]!r}.\nParts of the benchmark: {', '.join(PARTS)}.")
    if json is not None and not json.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {json.parent} to write {json.name} to.\nName one that exists with --json.")
    from experiments.bench.measure import measure

    measure(tuple(dict.fromkeys(chosen)), json, quick)
