"""From a grid to the job that runs it on a cluster: pure, nothing is sent."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from experiments.config import RunFile, presets
from experiments.expansion import Plan, expanded, parse_shard, require_complete, tracking_of
from experiments.grid import GridFile, grids
from fedsir.config.data import CohortData, KermanyData, MedMnistData
from fedsir.errors import BadInput
from mlflow_tracking.config import shown_uri

GRID_FOLDER = "grid"
STOP_PATIENCE_S = 90
"""How long a stopped job may take to note that its runs were stopped, before Ray kills it; Ray's default is 3 s."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Wish:
    """What the user asks for. store_on_head: folder on the cluster for record and checkpoints."""

    grid: str
    only: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    shard: str | None = None
    retry: bool = False
    store_on_head: str | None = None
    python: str = "python"


@dataclass(frozen=True)
class Submission:
    """A job as Ray takes it.

    job_id: the same for the same runs recorded in the same place. files: what travels beside the packages, by its
    path in the job's folder.
    """

    job_id: str
    entrypoint: str
    files: dict[str, Path]
    runs: int
    record: str
    notes: tuple[str, ...]

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Environment of the job, apart from its folder."""
        return {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_PATIENCE_S)}}


def prepare(wish: Wish) -> Submission:
    """Expand the grid and check what can be known from here. Reads no images.

    Raises BadInput where grid, settings or paths cannot work on the cluster.
    """
    part = None if wish.shard is None else parse_shard(wish.shard)
    overrides = (*_store_overrides(wish.store_on_head), *wish.overrides)
    plan = expanded(wish.grid, wish.only, overrides)
    require_complete(plan)
    if part is not None:
        plan = plan.shard(*part)
    if not plan.runs:
        raise BadInput(f"--shard {wish.shard}: the grid has fewer conditions and seeds than shards.\nAsk for fewer.")
    tracking = tracking_of(plan)
    configs = [run.config for run in plan.runs]
    check_record(configs)
    check_paths(configs)
    name, files = _grid_files(wish.grid, plan.grid)
    return Submission(
        job_id=job_id(plan, wish.retry),
        entrypoint=_entrypoint(wish, name, overrides),
        files=files,
        runs=len(plan.runs),
        record=f"{shown_uri(tracking.uri)}, experiment {tracking.experiment}",
        notes=tuple(_notes(tracking.uri)),
    )


def job_id(plan: Plan, retry: bool) -> str:
    """`fedsir-GRID-8 hex digits`: equal for equal runs that are recorded in the same place."""
    tracking = plan.runs[0].config.tracking
    known = [tracking.uri, tracking.experiment, str(retry), *sorted(run.identity for run in plan.runs)]
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9]+", "-", plan.grid.name.lower()).strip("-")
    return f"fedsir-{name or 'grid'}-{digest}"


def check_record(configs: Sequence[RunFile]) -> None:
    """Raise BadInput where the record would be lost with the job's folder, or would carry a password in plain view."""
    for config in configs:
        uri = config.tracking.uri
        if urlsplit(uri).password is not None:
            raise BadInput(
                f"tracking.uri = {shown_uri(uri)}: a password would be seen in the job's command and in its logs.\n"
                "Leave it out and give it to the cluster's nodes: MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or ~/.pgpass for PostgreSQL."
            )
        scheme, _, path = uri.partition(":///")
        if scheme.partition("+")[0] == "sqlite" and not path.startswith("/"):
            raise BadInput(
                f"tracking.uri = {uri}: a relative path lies in the job's folder on the cluster, which Ray deletes.\n"
                "Give --store-on-head /absolute/folder (of the head, or of a disk that all nodes share), "
                "or --set tracking.uri=http://HOST:5000."
            )
        if not _absolute(config.work_dir):
            raise BadInput(
                f"work_dir = {config.work_dir}: checkpoints would lie in the job's folder on the cluster, which Ray "
                "deletes; an interrupted run could not be continued.\n"
                "Give --set work_dir=/absolute/folder, or --store-on-head /absolute/folder for record and checkpoints."
            )


def check_paths(configs: Sequence[RunFile]) -> None:
    """Raise BadInput for files of data and weights that are named relative to a folder of this machine."""
    found = {key: path for config in configs for key, path in _named_files(config) if not _absolute(path)}
    if found:
        raise BadInput(
            "\n".join(
                [
                    *(f"{key} = {path}: relative to a folder of this machine." for key, path in found.items()),
                    "Images and weights are not sent; give the absolute path that they have on the cluster's head, "
                    "with --set.",
                ]
            )
        )


def _named_files(config: RunFile) -> Iterator[tuple[str, Path]]:
    data = config.data
    match data:
        case KermanyData():
            yield "data.root", data.root
        case CohortData():
            yield "data.manifest", data.manifest
            if data.root is not None:
                yield "data.root", data.root
        case MedMnistData():
            yield "data.path", data.path
    if config.model.weights not in ("imagenet", "random", "phantom-pretext"):
        yield "model.weights", Path(config.model.weights)


def _absolute(path: Path) -> bool:
    # Of the cluster, whatever this machine is.
    return PurePosixPath(path.as_posix()).is_absolute()


def _store_overrides(folder: str | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    if not PurePosixPath(folder).is_absolute():
        raise BadInput(f"--store-on-head {folder}: expected an absolute folder of the cluster, such as /data/fedsir.")
    root = folder.rstrip("/") or "/"
    return (f"tracking.uri=sqlite:///{root}/mlflow.db", f"work_dir={root}")


def _grid_files(source: str, grid: GridFile) -> tuple[str, dict[str, Path]]:
    """What the job calls the grid, and the files that it needs for that."""
    if source in grids():
        return source, {}
    path = Path(source)
    files = {f"{GRID_FOLDER}/{path.name}": path}
    bases = [grid.base, *(value.base for values in grid.axes.values() for value in values)]
    for base in bases:
        if base is None or base in presets():
            continue
        relative = os.path.relpath(base, path.parent)
        # A path that the grid itself writes in full would not be found on the cluster.
        written_in_full = Path(base).is_absolute() and base in path.read_text("utf-8")
        if relative.startswith("..") or written_in_full:
            raise BadInput(
                f"{source}: its base {base} is not in the folder of the grid or below it, so it cannot be sent along.\n"
                "Put it beside the grid and name it by its relative path."
            )
        files[f"{GRID_FOLDER}/{Path(relative).as_posix()}"] = Path(base)
    return f"{GRID_FOLDER}/{path.name}", files


def _entrypoint(wish: Wish, name: str, overrides: Sequence[str]) -> str:
    """The same command as on a laptop, so that whatever starts it again continues."""
    words = ["sweep", "retry" if wish.retry else "run", name, "--quiet"]
    for choice in wish.only:
        words += ["--only", choice]
    if wish.shard is not None:
        words += ["--shard", wish.shard]
    # The job's own cluster, whatever the grid says.
    for override in (*overrides, "execution.ray_address=auto"):
        words += ["--set", override]
    # Not the `fedsir` of the node, which may be another version or missing. `exec`: signals reach it at once.
    starter = [wish.python, "-c", "from experiments.cli import main; main()"]
    return f"exec {shlex.join([*starter, *words])}"


def _notes(uri: str) -> Iterator[str]:
    if urlsplit(uri).hostname in LOOPBACK_NAMES:
        yield f"tracking.uri is {uri}: on the cluster, that is the head node, not this machine"
