"""The MLflow run above the runs of a grid: one per grid name and experiment, reopened whenever somebody works on it.

Its children carry all of their parameters themselves; it holds what concerns the grid as a whole. It is no run of the
grid: it has no identity, and `Store.runs` leaves it out.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlflow_tracking.config import sqlite_path
from mlflow_tracking.describe import EXPERIMENT_NOTE, TAG_GRID, TAG_NOTE
from mlflow_tracking.sqlite_file import LOCK_TIMEOUT_S, lock_file
from mlflow_tracking.states import RecordedState, recorded_states
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

TAG_PLANNED, TAG_FINISHED = "fedsir.planned", "fedsir.finished"
TAG_FAILED, TAG_MISSING = "fedsir.failed", "fedsir.missing"
GRID_FILE = "grid.yaml"
MAX_NOTE = 4000
SETTLE_S = 2.0
"""Longer than a server takes to show what another process has begun to create."""

YOUNG_S = 30.0
"""A run that is older has been agreed upon, also where the clocks of machines differ a little."""

Ending = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class SweepFacts:
    """What a sweep is asked for.

    grid: name of the grid. text: the grid file. about: what people should know, line by line. identities: of all runs
    that are asked for, whichever process does them.
    """

    grid: str
    text: str
    about: tuple[str, ...]
    identities: Collection[str]


def find_sweep_run(store: Store, grid: str) -> str | None:
    """Id of the MLflow run above the runs of the grid of this name, None if no sweep has begun in the experiment."""
    found = _found(store, grid)
    return None if found is None else str(found.info.run_id)


def _found(store: Store, grid: str) -> Run | None:
    # Compared here, since MLflow's filters have no way to write a name with quotes.
    mine = [run for run in store.search(f"tags.`{TAG_GRID}` LIKE '%'") if run.data.tags[TAG_GRID] == grid]
    return min(mine, key=lambda run: (run.info.start_time, run.info.run_id)) if mine else None


def begin_sweep_run(store: Store, sweep: SweepFacts) -> str:
    """Id of the run of the sweep, which is RUNNING from now on; created where it is missing.

    Processes that begin at once agree on one.
    """
    with store.lock:
        known = _agreed(store, sweep.grid)
        store.client.update_run(known, status="RUNNING")
        store.client.log_text(known, sweep.text, GRID_FILE)
        _describe_experiment(store)
        _note(store, known, sweep, recorded_states(store, sweep.identities))
    return known


def _agreed(store: Store, grid: str) -> str:
    """Id of the one run of a grid, created where it has had none."""
    path = sqlite_path(store.uri)
    if path is not None:
        from filelock import FileLock

        with FileLock(lock_file(path), timeout=LOCK_TIMEOUT_S):
            return find_sweep_run(store, grid) or _created(store, grid)
    # A server has nothing that would keep others waiting: of several that are created at once the eldest stays, once
    # all that were begun are visible.
    known = _found(store, grid)
    if known is not None and time.time() - known.info.start_time / 1000 > YOUNG_S:
        return str(known.info.run_id)
    created = _created(store, grid) if known is None else None
    time.sleep(SETTLE_S)
    eldest = find_sweep_run(store, grid) or _created(store, grid)
    if created is not None and created != eldest:
        store.client.delete_run(created)
    return eldest


def _created(store: Store, grid: str) -> str:
    tags = {TAG_GRID: grid, "mlflow.source.name": "fedsir"}
    return str(store.client.create_run(store.experiment_id, run_name=f"sweep {grid}", tags=tags).info.run_id)


def end_sweep_run(store: Store, mlflow_id: str, sweep: SweepFacts, stopped: bool) -> Ending:
    """Give the run its terminal status, from what the store knows of the runs that were asked for.

    FINISHED if all of them are, FAILED if some have failed, KILLED if the sweep was `stopped` before or left runs out.
    """
    with store.lock:
        states = recorded_states(store, sweep.identities)
        counts = _note(store, mlflow_id, sweep, states)
        ending: Ending = "FINISHED"
        if counts[TAG_FINISHED] < counts[TAG_PLANNED]:
            ending = "FAILED" if counts[TAG_FAILED] and not stopped else "KILLED"
        store.client.set_terminated(mlflow_id, ending)
    return ending


def _note(store: Store, mlflow_id: str, sweep: SweepFacts, states: dict[str, RecordedState]) -> dict[str, int]:
    """Write counts and description into the run of the sweep; the counts by tag."""
    from mlflow.entities import RunTag

    planned = len(set(sweep.identities))
    statuses = [state.status for state in states.values()]
    finished, failed = statuses.count("finished"), statuses.count("failed")
    missing = planned - finished - failed
    counts = {TAG_PLANNED: planned, TAG_FINISHED: finished, TAG_FAILED: failed, TAG_MISSING: missing}
    head = f"**Grid {sweep.grid}**: {planned} runs planned, {finished} finished, {failed} failed, {missing} missing"
    note = "\n".join([head, "", *(f"- {line}" for line in sweep.about)])[:MAX_NOTE]
    values = {TAG_NOTE: note, **{key: str(number) for key, number in counts.items()}}
    store.client.log_batch(mlflow_id, tags=[RunTag(key, value) for key, value in values.items()])
    return counts


def _describe_experiment(store: Store) -> None:
    """An experiment that somebody else created may have no description yet; one that people wrote is left alone."""
    if TAG_NOTE not in store.client.get_experiment(store.experiment_id).tags:
        store.client.set_experiment_tag(store.experiment_id, TAG_NOTE, EXPERIMENT_NOTE)
