"""Options that several commands share; light, so that `--help` needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigArgument = Annotated[
    str,
    typer.Argument(
        help="YAML file or preset (demo, kermany, uic, wake_forest, rehearsal_kermany, ...).", metavar="CONFIG"
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value, e.g. --set federation.noise.ratio=0.8. May be repeated."),
]
