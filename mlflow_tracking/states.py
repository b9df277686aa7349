"""What a store says about runs of given identities: finished, failed or interrupted.

All of it may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlflow_tracking.describe import TAG_ERROR, TAG_METHOD, TAG_PARENT, TAG_RUN_ID, error_text, run_name
from mlflow_tracking.queries import rows_in_sqlite
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

    from fedsir.config.run import RunConfig

ACCURACY = "final/accuracy"

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


@dataclass(frozen=True)
class _Row:
    """Of one MLflow run only what tells its state."""

    identity: str
    mlflow_id: str
    status: str
    error: str | None
    accuracy: float | None


def recorded_states(store: Store, identities: Collection[str]) -> dict[str, RecordedState]:
    """State per identity that the store knows, read in one pass over the experiment.

    Of several MLflow runs of one identity a finished one counts, otherwise the latest.
    """
    wanted = set(identities)
    by_identity: dict[str, list[_Row]] = {}
    for row in _rows(store):
        if row.identity in wanted:
            by_identity.setdefault(row.identity, []).append(row)
    return {identity: _state(rows) for identity, rows in by_identity.items()}


def recorded_state(store: Store, identity: str) -> RecordedState | None:
    """The state of one identity, None if the store does not know it."""
    rows = _rows(store, identity)
    return _state(rows) if rows else None


def record_failure(
    store: Store, config: RunConfig, identity: str, error: BaseException, parent: str | None = None
) -> None:
    """Make sure that a run which ended with `error` is FAILED with it, also one that failed before it was recorded.

    parent: id of the MLflow run of its sweep.
    """
    with store.lock:
        unfinished = [run for run in runs_of(store, identity) if run.info.status != "FINISHED"]
        if unfinished:
            mlflow_id = unfinished[0].info.run_id
            store.client.set_tag(mlflow_id, TAG_ERROR, error_text(error))
        else:
            tags = {
                TAG_RUN_ID: identity,
                TAG_METHOD: config.method.label,
                TAG_ERROR: error_text(error),
                "mlflow.source.name": "fedsir",
                **({} if parent is None else {TAG_PARENT: parent}),
            }
            created = store.client.create_run(store.experiment_id, run_name=run_name(config), tags=tags)
            mlflow_id = created.info.run_id
        store.client.set_terminated(mlflow_id, "FAILED")


def _rows(store: Store, identity: str | None = None) -> list[_Row]:
    """Every run of the experiment that has an identity (this one, if given), newest first."""
    found = rows_in_sqlite(
        store,
        "SELECT identities.value, runs.run_uuid, runs.status, errors.value,"
        " CASE WHEN accuracies.is_nan THEN NULL ELSE accuracies.value END"
        " FROM tags AS identities JOIN runs ON runs.run_uuid = identities.run_uuid"
        " LEFT JOIN tags AS errors ON errors.run_uuid = runs.run_uuid AND errors.key = ?"
        " LEFT JOIN latest_metrics AS accuracies"
        " ON accuracies.run_uuid = runs.run_uuid AND accuracies.key = ?"
        " WHERE identities.key = ? AND identities.value = COALESCE(?, identities.value)"
        " AND runs.experiment_id = ? AND runs.lifecycle_stage = 'active'"
        " ORDER BY runs.start_time DESC, runs.run_uuid",
        (TAG_ERROR, ACCURACY, TAG_RUN_ID, identity, int(store.experiment_id)),
    )
    if found is not None:
        return [_Row(*values) for values in found]
    return _rows_of(store.runs() if identity is None else runs_of(store, identity))


def _rows_of(runs: Iterable[Run]) -> list[_Row]:
    return [
        _Row(
            run.data.tags[TAG_RUN_ID],
            run.info.run_id,
            run.info.status,
            run.data.tags.get(TAG_ERROR),
            run.data.metrics.get(ACCURACY),
        )
        for run in runs
        if TAG_RUN_ID in run.data.tags
    ]


def runs_of(store: Store, identity: str) -> list[Run]:
    """MLflow runs of an identity in any state, newest first."""
    return store.runs(f"tags.`{TAG_RUN_ID}` = '{identity}'")


def _state(rows: list[_Row]) -> RecordedState:
    """`rows` of one identity, newest first."""
    row = next((r for r in rows if r.status == "FINISHED"), rows[0])
    if row.status == "FINISHED":
        return RecordedState("finished", row.mlflow_id, accuracy=row.accuracy)
    if row.status == "FAILED":
        return RecordedState("failed", row.mlflow_id, error=row.error or "")
    return RecordedState("interrupted", row.mlflow_id)
