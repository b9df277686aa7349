"""Runs the parts of the benchmark one after the other, prints their tables and writes their figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.bench import tables
from experiments.bench.breakdown import breakdowns
from experiments.bench.growth import growth
from experiments.bench.imports import imports
from experiments.bench.memory import memory
from experiments.bench.preparation import preparation
from experiments.bench.programs import Say
from experiments.bench.ratio import floor_ratios
from experiments.bench.startup import startup
from experiments.commands import terminated_like_interrupted
from experiments.console import new_console, say

Part = Callable[[bool, Say], tuple[object, Sequence[Table]]]


def _ratio(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = floor_ratios(quick, note)
    return [f.as_json() for f in found], tables.ratio_tables(found)


def _breakdown(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = breakdowns(quick, note)
    return [f.as_json() for f in found], tables.breakdown_tables(found)


def _growth(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = growth(quick, note)
    return [f.as_json() for f in found], [tables.growth_table(found)]


def _memory(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = memory(quick, note)
    return [f.as_json() for f in found], [tables.memory_table(found)]


def _startup(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = startup(quick, note)
    return found.as_json(), [tables.startup_table(found)]


def _imports(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = imports(quick, note)
    return found.as_json(), [tables.imports_table(found)]


def _preparation(quick: bool, note: Say) -> tuple[object, Sequence[Table]]:
    found = preparation(quick, note)
    return found.as_json(), [tables.preparation_table(found)]


MEASUREMENTS: Mapping[str, Part] = {
    "ratio": _ratio,
    "breakdown": _breakdown,
    "growth": _growth,
    "memory": _memory,
    "startup": _startup,
    "imports": _imports,
    "preparation": _preparation,
}


def measure(parts: Sequence[str], file: Path | None, quick: bool) -> None:
    """Measure `parts` in order; the file is written anew after each, so that stopping loses only the last."""
    console = new_console()
    found: dict[str, Any] = {"machine": machine(), "quick": quick, "parts": {}}
    with terminated_like_interrupted():
        for part in parts:
            figures, shown = MEASUREMENTS[part](quick, partial(say, console))
            found["parts"][part] = figures
            for table in shown:
                console.print(table)
            if file is not None:
                file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if quick:
        say(console, "sizes were tiny: these figures mean nothing")


def machine() -> dict[str, object]:
    """What a reader must know of the machine to make sense of seconds."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "ray", "lightning", "numpy", "pillow", "mlflow")},
    }
