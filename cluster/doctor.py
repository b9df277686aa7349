"""`fedsir doctor`: what this machine, torch, Ray and the store say about themselves, side by side."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

GIB = 2**30
PACKAGES = ("torch", "torchvision", "lightning", "ray", "mlflow", "numpy", "scikit-learn", "pydantic")
CLUSTER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_CPUS_ON_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "RAY_ADDRESS",
    "OMP_NUM_THREADS",
)


def register(application: typer.Typer) -> None:
    """Add the command to the `fedsir` application."""
    application.command()(doctor)


def doctor(
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store to look at; default: the default store.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Look at this Ray cluster instead of starting a local one.")
    ] = None,
) -> None:
    """Check Python, torch, devices, Ray's view, disk and the MLflow store; starts nothing that stays.

    Exit code 1 when something needed does not work.

    Examples:

        fedsir doctor

        fedsir doctor --tracking-uri http://localhost:5000

        fedsir doctor --ray-address auto
    """
    from rich.console import Console
    from rich.table import Table

    rows = [*_python(), *_torch(), *_environment(), *_ray(ray_address), *_disk(), *_store(tracking_uri)]
    table = Table(title="fedsir doctor", show_header=False)
    for name, value, healthy in rows:
        table.add_row(name, value, "[green]ok[/green]" if healthy else "[red]problem[/red]")
    Console().print(table)
    if not all(healthy for _, _, healthy in rows):
        raise typer.Exit(1)


Row = tuple[str, str, bool]


def _python() -> list[Row]:
    rows: list[Row] = [("python", f"{platform.python_version()} at {sys.executable}", True)]
    for package in PACKAGES:
        try:
            rows.append((package, version(package), True))
        except PackageNotFoundError:
            rows.append((package, "not installed; run pip install -e .", False))
    return rows


def _torch() -> list[Row]:
    import torch

    from fedsir.clients.machine import machine_limits

    limits = machine_limits()
    usable = f"{limits.usable_cpus} cores usable ({limits.text()}), torch uses {torch.get_num_threads()} threads"
    memory = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in limits.memory.items())
    rows: list[Row] = [("cpu", usable, True), ("memory", memory, True)]
    if not torch.cuda.is_available():
        build = torch.version.cuda
        reason = "a CPU build of torch" if build is None else f"torch was built for CUDA {build} but sees no device"
        rows.append(("gpu", f"none ({reason})", True))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"gpu {index}", f"{properties.name}, {properties.total_memory / GIB:.1f} GiB", True))
    return rows


def _environment() -> list[Row]:
    return [(name, os.environ[name] or "(empty)", True) for name in CLUSTER_VARIABLES if name in os.environ]


def _ray(address: str | None) -> list[Row]:
    import ray

    from fedsir.clients.local_ray import start_ray
    from fedsir.clients.placement import live_nodes
    from fedsir.config.training import ExecutionConfig
    from fedsir.errors import BadInput

    try:
        start_ray(ExecutionConfig(ray_address=address))
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        nodes = live_nodes()
    except BadInput as error:
        return [("ray cluster", str(error), False)]
    finally:
        ray.shutdown()
    memory = resources.get("memory", 0) / GIB
    store = resources.get("object_store_memory", 0) / GIB
    devices = f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
    seen = f"{devices}, {memory:.1f} GiB, object store {store:.1f} GiB"
    rows: list[Row] = [("ray cluster", seen, True)]
    if len(nodes) > 1:
        rows += [(f"node {node.name}", f"{node.cpus:g} CPU, {node.gpus:g} GPU", True) for node in nodes]
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        enough = free >= min(store, 1.0)
        hint = "" if enough else "; the object store spills to disk, enlarge it (containers: --shm-size)"
        rows.append(("shared memory", f"{free:.1f} GiB free at {shared}{hint}", enough))
    return rows


def _disk() -> list[Row]:
    from fedsir.data.cache import cache_root

    folder = cache_root(None)
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / GIB
    except OSError as error:
        reason = error.strerror or error
        return [("image cache", f"{folder} cannot be written ({reason}); set FEDSIR_CACHE to a folder of yours", False)]
    return [("image cache", f"{folder}, {free:.1f} GiB free", True)]


def _store(uri: str | None) -> list[Row]:
    from pydantic import ValidationError

    from mlflow_tracking.config import TrackingConfig
    from mlflow_tracking.store import check_store

    try:
        config = TrackingConfig() if uri is None else TrackingConfig(uri=uri)
    except ValidationError as error:
        return [("store", str(error.errors()[0]["msg"]).removeprefix("Value error, "), False)]
    status = check_store(config)
    runs = "" if status.runs is None else f", {status.runs} runs"
    return [("store", f"{status.uri}: {status.detail}{runs}", status.reachable)]
