"""What a store says about runs of given identities: finished, failed or interrupted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlflow_tracking.describe import TAG_ERROR, TAG_METHOD, TAG_RUN_ID, error_text, run_name
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

    from fedsir.config.run import RunConfig

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class RecordedState:
    """status: `interrupted` is anything that neither finished nor failed, also what another process works on.

    error: of a failed run. accuracy: the final one of a finished run.
    """

    status: Status
    mlflow_id: str
    error: str = ""
    accuracy: float | None = None


def recorded_states(store: Store, identities: Collection[str]) -> dict[str, RecordedState]:
    """State per identity that the store knows, read in one pass over the experiment.

    Of several MLflow runs of one identity a finished one counts, otherwise the latest.
    """
    wanted = set(identities)
    by_identity: dict[str, list[Run]] = {}
    for run in store.runs():
        identity = run.data.tags.get(TAG_RUN_ID)
        if identity in wanted:
            by_identity.setdefault(identity, []).append(run)
    return {identity: _state(runs) for identity, runs in by_identity.items()}


def recorded_state(store: Store, identity: str) -> RecordedState | None:
    """The state of one identity, None if the store does not know it."""
    runs = _runs_of(store, identity)
    return _state(runs) if runs else None


def record_failure(store: Store, config: RunConfig, identity: str, error: BaseException) -> None:
    """Make sure that a run which ended with `error` is FAILED with it, also one that failed before it was recorded."""
    unfinished = [run for run in _runs_of(store, identity) if run.info.status != "FINISHED"]
    if unfinished:
        mlflow_id = unfinished[0].info.run_id
        store.client.set_tag(mlflow_id, TAG_ERROR, error_text(error))
    else:
        tags = {
            TAG_RUN_ID: identity,
            TAG_METHOD: config.method.label,
            TAG_ERROR: error_text(error),
            "mlflow.source.name": "fedsir",
        }
        created = store.client.create_run(store.experiment_id, run_name=run_name(config), tags=tags)
        mlflow_id = created.info.run_id
    store.client.set_terminated(mlflow_id, "FAILED")


def _runs_of(store: Store, identity: str) -> list[Run]:
    return store.runs(f"tags.`{TAG_RUN_ID}` = '{identity}'")


def _state(runs: list[Run]) -> RecordedState:
    run = next((r for r in runs if r.info.status == "FINISHED"), runs[0])
    mlflow_id, status = run.info.run_id, run.info.status
    if status == "FINISHED":
        return RecordedState("finished", mlflow_id, accuracy=run.data.metrics.get("final/accuracy"))
    if status == "FAILED":
        return RecordedState("failed", mlflow_id, error=run.data.tags.get(TAG_ERROR, ""))
    return RecordedState("interrupted", mlflow_id)
