"""Writes the events of one run into an MLflow store, as one MLflow run."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedsir.errors import RunFailed
from fedsir.events import (
    FINAL_METRICS,
    ROUND_METRICS,
    DatasetFacts,
    Event,
    RoundFinished,
    RoundRecord,
    RunFinished,
    RunResult,
    RunStarted,
    RunStopped,
)
from mlflow_tracking.config import shown_uri
from mlflow_tracking.describe import (
    TAG_ERROR,
    TAG_RESUMED,
    TAG_RUN_ID,
    TAG_SUPERSEDED,
    error_text,
    parameters,
    run_name,
    tags,
)
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

# MLflow refuses larger batches.
METRICS_PER_BATCH = 1000
MAX_DATASET_DIGEST = 36

Point = tuple[str, float, int]  # key, value, step


@dataclass
class _OpenRun:
    """What the recorder remembers between events.

    logged: every (key, step) already in the store. notes: what was noted in each round, for the final files.
    """

    started: RunStarted
    mlflow_id: str
    logged: set[tuple[str, int]] = field(default_factory=set)
    notes: dict[int, tuple[str, ...]] = field(default_factory=dict)


class MlflowRecorder:
    """Recorder (`fedsir.events.Recorder`) that may serve several runs, one after another.

    MLflow keeps both points when a step is logged twice, so points already in the store are never sent again.
    If the store fails, the MLflow run is set to FAILED as far as the store allows, and RunFailed is raised.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = store.client
        self._open: _OpenRun | None = None

    @property
    def mlflow_run_id(self) -> str | None:
        """Id of the MLflow run being written, None between runs."""
        return None if self._open is None else self._open.mlflow_id

    def record(self, event: Event) -> None:
        """Take note of `event`; raises RunFailed if the store cannot."""
        match event:
            case RunStarted():
                with self._failing_loudly("the start", event):
                    self._start(event)
            case RoundFinished():
                run = self._current("a round")
                with self._failing_loudly(f"round {event.record.round}", run.started):
                    self._log_rounds(run, [event.record])
            case RunFinished():
                run = self._current("the end")
                with self._failing_loudly("the result", run.started):
                    self._finish(run, event.result)
                    self._terminate(run.mlflow_id, "FINISHED")
                    self._open = None
            case RunStopped():
                self._stop(event)

    def _start(self, event: RunStarted) -> None:
        from mlflow_tracking.artifacts import write_start  # with matplotlib and pandas: half a second

        earlier = self._unfinished(event.run_id)
        if event.history and earlier:
            run = self._reopen(event, earlier[0])
        else:
            run = self._create(event)
            for stale in earlier:
                self._supersede(stale, run.mlflow_id)
        self._send_files(run.mlflow_id, partial(write_start, event))
        self._log_rounds(run, event.history)

    def _unfinished(self, run_id: str) -> list[Run]:
        """MLflow runs of this identity that never reached FINISHED, newest first."""
        runs = self._store.runs(f"tags.`{TAG_RUN_ID}` = '{run_id}'")
        return [run for run in runs if run.info.status != "FINISHED"]

    def _create(self, event: RunStarted) -> _OpenRun:
        from mlflow.entities import Param

        created = self._client.create_run(self._store.experiment_id, run_name=run_name(event.config), tags=tags(event))
        self._open = run = _OpenRun(event, created.info.run_id)
        self._client.log_batch(run.mlflow_id, params=[Param(k, v) for k, v in parameters(event).items()])
        self._log_dataset(run.mlflow_id, event.dataset)
        return run

    def _reopen(self, event: RunStarted, earlier: Run) -> _OpenRun:
        from mlflow.entities import Param, RunTag

        mlflow_id = earlier.info.run_id
        self._open = run = _OpenRun(event, mlflow_id)
        self._client.update_run(mlflow_id, status="RUNNING")
        resumed = int(earlier.data.tags.get(TAG_RESUMED, "0")) + 1
        now = {**tags(event), TAG_RESUMED: str(resumed)}
        # MLflow refuses to change a parameter, so only missing ones are sent.
        missing = {k: v for k, v in parameters(event).items() if k not in earlier.data.params}
        self._client.log_batch(
            mlflow_id,
            params=[Param(k, v) for k, v in missing.items()],
            tags=[RunTag(k, v) for k, v in now.items()],
        )
        if TAG_ERROR in earlier.data.tags:
            self._client.delete_tag(mlflow_id, TAG_ERROR)
        if earlier.inputs is None or not earlier.inputs.dataset_inputs:
            self._log_dataset(mlflow_id, event.dataset)
        for key in earlier.data.metrics:
            run.logged.update((key, point.step) for point in self._client.get_metric_history(mlflow_id, key))
        return run

    def _supersede(self, stale: Run, successor: str) -> None:
        """A run that starts anew leaves its interrupted predecessors behind: they will never continue."""
        self._client.set_tag(stale.info.run_id, TAG_SUPERSEDED, successor)
        if stale.info.status == "RUNNING":
            self._terminate(stale.info.run_id, "KILLED")

    def _log_dataset(self, mlflow_id: str, dataset: DatasetFacts) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        counts = {
            "train_images": dataset.train_images,
            "test_images": dataset.test_images,
            "train_patients": dataset.train_patients,
            "test_patients": dataset.test_patients,
            "classes": len(dataset.class_names),
        }
        entity = Dataset(
            name=dataset.name,
            digest=dataset.digest[:MAX_DATASET_DIGEST],
            source_type=dataset.kind,
            source=json.dumps({"kind": dataset.kind, "classes": list(dataset.class_names)}),
            profile=json.dumps(counts),
        )
        context = InputTag("mlflow.data.context", "training and evaluation")
        self._client.log_inputs(mlflow_id, datasets=[DatasetInput(entity, [context])])

    def _log_rounds(self, run: _OpenRun, records: Sequence[RoundRecord]) -> None:
        run.notes.update({record.round: record.notes for record in records if record.notes})
        self._log_points(
            run,
            [point for record in records for point in _points(record.metrics, ROUND_METRICS, record.round)],
        )

    def _log_points(self, run: _OpenRun, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new: list[Metric] = [
            Metric(key, value, now, step) for key, value, step in points if (key, step) not in run.logged
        ]
        for start in range(0, len(new), METRICS_PER_BATCH):
            batch = new[start : start + METRICS_PER_BATCH]
            self._client.log_batch(run.mlflow_id, metrics=batch)
            run.logged.update((metric.key, metric.step) for metric in batch)

    def _finish(self, run: _OpenRun, result: RunResult) -> None:
        from mlflow_tracking.artifacts import write_finish

        self._log_points(run, list(_points(result.final, FINAL_METRICS, 0)))
        self._send_files(run.mlflow_id, partial(write_finish, run.started, result, run.notes))

    def _stop(self, event: RunStopped) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        try:
            self._mark_stopped(run.mlflow_id, event.error, "KILLED" if event.killed else "FAILED")
        except Exception:
            # The error that stopped the run matters more than the one met while noting it.
            logging.getLogger(__name__).warning(
                "run %s stays without an end in %s", run.mlflow_id, shown_uri(self._store.uri), exc_info=True
            )

    def _mark_stopped(self, mlflow_id: str, error: BaseException, status: str) -> None:
        try:
            self._client.set_tag(mlflow_id, TAG_ERROR, error_text(error))
        finally:
            self._terminate(mlflow_id, status)

    def _terminate(self, mlflow_id: str, status: str) -> None:
        self._client.set_terminated(mlflow_id, status)

    def _send_files(self, mlflow_id: str, write: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
            write(Path(folder))
            self._client.log_artifacts(mlflow_id, folder)

    def _current(self, what: str) -> _OpenRun:
        if self._open is None:
            raise RunFailed(f"{what} was reported, but no run has been started on this recorder")
        return self._open

    @contextmanager
    def _failing_loudly(self, what: str, started: RunStarted) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the store, the disk and the plots fail in ways of their own
            if self._open is not None:
                try:
                    self._mark_stopped(self._open.mlflow_id, error, "FAILED")
                except Exception:
                    logging.getLogger(__name__).warning("the run cannot be marked as failed", exc_info=True)
            raise RunFailed(
                f"{run_name(started.config)} ({started.run_id}): {what} could not be recorded in "
                f"{shown_uri(self._store.uri)}: {type(error).__name__}: {error}"
            ) from error


def _points(values: Mapping[str, float], keys: Sequence[str], step: int) -> Iterator[Point]:
    """Known keys in fixed order; undefined figures are left out, since MLflow would draw them."""
    for key in keys:
        value = values.get(key)
        if value is not None and math.isfinite(value):
            yield key, float(value), step
