"""What `fedsir sweep plan` says about shared work, images, time, disk and memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from experiments.checks import device_of
from experiments.sweeps.estimate import RUN_SECONDS, TASK_SECONDS, WORKER_BYTES, Estimate, slots
from experiments.sweeps.words import duration, many, size
from fedsir.clients.machine import STORE_SHARE, machine_limits
from fedsir.config.data import FileSource
from mlflow_tracking.config import TrackingConfig, shown_uri, sqlite_path

COSTLIEST = 3
"""Kinds of runs that are named as the costliest."""


def shared_line(estimate: Estimate) -> str:
    """What is done once for several runs."""
    shared = estimate.shared
    parts = [many(shared.federations, "federation"), f"{many(shared.decoded, 'set')} of images decoded"]
    if shared.stage_one_runs:
        parts.append(f"{many(shared.stage_one, 'stage')} I for {many(shared.stage_one_runs, 'run')}")
    return f"done once: {', '.join(parts)}"


def image_lines(estimate: Estimate) -> list[str]:
    """How many images each base has, and how that is known."""
    return [f"images of {source}: {numbers}" for source, numbers in estimate.origins]


def time_lines(estimate: Estimate, seconds: Mapping[str, float]) -> list[str]:
    """Totals, the costliest runs and what the estimate assumes; `seconds` of one worker by identity."""
    known = [e for e in estimate.runs if e.run.identity in seconds]
    if not known:
        return [f"time: not known without the numbers of images of {', '.join(estimate.unknown_images)}"]
    config = known[0].run.config
    if device_of(config.execution) == "cuda":
        unit, workers = "GPU", many(slots(config), "GPU")
    else:
        threads = config.execution.threads
        unit, workers = "core", f"{many(slots(config), 'worker')} with {many(threads, 'thread')}"
    total = sum(seconds[e.run.identity] * _cores(e.run.config.execution.threads, unit) for e in known)
    at_once = {run.execution: slots(run) for run in estimate.placements}
    wall = sum(seconds[e.run.identity] / at_once[e.run.config.execution] for e in known)
    lines = [f"time: {total / 3600:,.1f} {unit}-hours, about {duration(wall)} on this machine ({workers})"]
    if len(known) < len(estimate.runs):
        left_out = many(len(estimate.runs) - len(known), "run")
        lines.append(f"  without {left_out} of {', '.join(estimate.unknown_images)}, whose images are not known")
    lines.append(f"  costliest: {'; '.join(_costliest(estimate, seconds))}")
    if estimate.unknown_costs:
        lines.append(f"  cost unknown, taken as FedAvg's: {', '.join(estimate.unknown_costs)}")
    lines.append(
        "  assumes that workers never wait nor slow each other down, that clients are judged rightly, and beside the "
        f"networks {1000 * TASK_SECONDS:g} ms for each client's task and {RUN_SECONDS:g} s for each run"
    )
    return lines


def _cores(threads: int, unit: str) -> int:
    return threads if unit == "core" else 1


def _costliest(estimate: Estimate, seconds: Mapping[str, float]) -> list[str]:
    """Runs of one method on the same images cost about the same: the kinds of runs that cost most."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for e in estimate.runs:
        if e.run.identity in seconds:
            kinds.setdefault((e.run.source, e.run.cells[0].method), []).append(seconds[e.run.identity])
    first = sorted(kinds.items(), key=lambda kind: -max(kind[1]))[:COSTLIEST]
    return [
        f"{source} {method}, {duration(max(times))} each ({many(len(times), 'run')})"
        for (source, method), times in first
    ]


def disk_line(estimate: Estimate, tracking: TrackingConfig) -> tuple[str, str | None]:
    """Disk that record and image cache take; and a warning where the record needs more than there is."""
    needed = estimate.record_bytes()
    text = f"disk: about {size(needed)} of record in {shown_uri(tracking.uri)}"
    file = sqlite_path(tracking.uri)
    warning = None
    if file is not None:
        free = shutil.disk_usage(_existing(file)).free
        text += f", {size(free)} free"
        if free < needed:
            warning = f"the record takes about {size(needed)}, but {file.parent} has {size(free)} left"
    decoded = {
        e.run.config.data.model_dump_json(): e.image_bytes
        for e in estimate.runs
        if isinstance(e.run.config.data, FileSource)
    }
    if any(decoded.values()):
        text += f"; {size(sum(decoded.values()))} of decoded images in the cache"
    return text, warning


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that is there already."""
    return next(folder for folder in path.parents if folder.is_dir())


def memory_line(estimate: Estimate) -> tuple[str, str | None]:
    """Memory of images, workers and runs in flight; and a warning where it is more than there is."""
    workers = max(slots(config) for config in estimate.placements)
    images = max(e.image_bytes for e in estimate.runs)
    flight = max(e.flight_bytes for e in estimate.runs)
    have = machine_limits().usable_memory
    needed = images + workers * WORKER_BYTES + flight
    text = (
        f"memory: about {size(needed)} of {size(have)}: {size(images)} of images, once for all, "
        f"{many(workers, 'worker')} of {size(WORKER_BYTES)} and up to {size(flight)} for each run in flight"
    )
    if needed > have:
        return text, f"about {size(needed)} of memory are needed, but only {size(have)} may be used on this machine"
    store = STORE_SHARE * have
    if images > store:
        return text, f"the images take {size(images)}, more than Ray's object store usually holds ({size(store)})"
    return text, None
