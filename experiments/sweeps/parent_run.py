"""The MLflow run of a sweep, which several processes may have at once: reopened by each, ended by the last of them.

A process says by a claim that it works on the grid. It gives the claim back before it looks for others, so that of
processes that end together at least one sees nobody else. Processes that share neither store file nor `work_dir` do
not see each other: there each one sets the status when it ends, and the last one's stays.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from experiments import claim_files
from experiments.claim_files import RunHeld
from experiments.claims import claim, claims_folder
from experiments.expansion import Plan
from fedsir.errors import RunFailed, StoreUnreachable
from mlflow_tracking.config import shown_uri
from mlflow_tracking.delivery import patiently
from mlflow_tracking.outage import is_outage, reason
from mlflow_tracking.sweep_run import SweepFacts, begin_sweep_run, end_sweep_run, find_sweep_run

if TYPE_CHECKING:
    from mlflow_tracking.store import Store


@contextmanager
def sweep_run(store: Store, plan: Plan, about: Sequence[str]) -> Iterator[str]:
    """Id of the MLflow run of the plan's grid, which gets its terminal status however the context ends.

    plan: all that was asked for, not only this process's part. about: lines for its description.
    Raises RunFailed if the store cannot hold it, BadInput if claims cannot be written.
    """
    sweep = _facts(plan, about)
    folder, name = _place(store, plan)
    mlflow_id, stopped = None, True
    try:
        with claim(folder, f"{name}-{uuid.uuid4().hex[:8]}", f"the sweep of grid {sweep.grid}"):
            try:
                begin = partial(begin_sweep_run, store, sweep)
                mlflow_id = patiently(store, begin, plan.runs[0].config.tracking.patience_s)
            except StoreUnreachable:
                raise
            except Exception as error:  # database drivers, MLflow and the network share no base class
                raise RunFailed(
                    f"grid {sweep.grid}: the sweep could not be recorded in {shown_uri(store.uri)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            yield mlflow_id
            stopped = False
    finally:
        if mlflow_id is not None and not _others_work(folder, name):
            _end(store, mlflow_id, sweep, stopped)


def settle_sweep_run(store: Store, plan: Plan, about: Sequence[str]) -> None:
    """End the MLflow run of a grid of which nothing is left to do: a process that was killed leaves it RUNNING."""
    mlflow_id = find_sweep_run(store, plan.grid.name)
    if mlflow_id is not None and not _others_work(*_place(store, plan)):
        _end(store, mlflow_id, _facts(plan, about), stopped=False)


def _end(store: Store, mlflow_id: str, sweep: SweepFacts, stopped: bool) -> None:
    try:
        end_sweep_run(store, mlflow_id, sweep, stopped)
    except Exception as error:  # how the runs themselves ended matters more, and is recorded
        logging.getLogger(__name__).warning(
            "run %s of grid %s stays without an end in %s: %s",
            mlflow_id,
            sweep.grid,
            shown_uri(store.uri),
            reason(error),
            exc_info=not is_outage(error),
        )


def _facts(plan: Plan, about: Sequence[str]) -> SweepFacts:
    values = plan.grid.model_dump(mode="json", exclude_defaults=True)
    for part in (values, *(value for axis in values.get("axes", {}).values() for value in axis)):
        if "set" in part:
            part["set"] = without_tracking(part["set"])
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return SweepFacts(plan.grid.name, text, tuple(about), [run.identity for run in plan.runs])


def without_tracking(settings: Sequence[str]) -> list[str]:
    """Settings but those of the store, which are part of no result and may hold passwords."""
    return [s for s in settings if s.partition("=")[0].strip().partition(".")[0] != "tracking"]


def _place(store: Store, plan: Plan) -> tuple[Path, str]:
    """Where the claims of processes that work on the grid lie, and how their names begin."""
    digest = hashlib.sha256(f"{store.experiment_id} {plan.grid.name}".encode()).hexdigest()
    return claims_folder(plan.runs[0].config), f"sweep-{digest[:16]}"


def _others_work(folder: Path, name: str) -> bool:
    """Whether another process works on the grid; claims of processes that are gone are removed."""
    try:
        for path in folder.glob(f"{name}-*.claim"):
            # Nobody else ever gets a claim of this name, so it may be removed without further ado.
            if claim_files.expired(path, name):
                path.unlink(missing_ok=True)
    except RunHeld:
        return True
    except OSError:
        return False  # nothing can be known of others
    return False
