"""Writes the events of one run into an MLflow store, as one MLflow run.

A grid has thousands of short runs, several of them going on at once in threads of one process. So rounds are sent
together, and everything that touches the store holds `Store.lock`; files are written and drawn outside of it.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
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
from mlflow_tracking.config import TrackingConfig, shown_uri
from mlflow_tracking.describe import (
    TAG_ERROR,
    TAG_RESUMED,
    TAG_RUN_ID,
    TAG_SUPERSEDED,
    dataset_input,
    error_text,
    parameters,
    run_name,
    tags,
)
from mlflow_tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, Run, RunTag

# MLflow refuses larger batches: metrics, parameters and tags together.
ENTITIES_PER_BATCH = 1000

Point = tuple[str, float, int]  # key, value, step


@dataclass
class _OpenRun:
    """What the recorder remembers between events.

    logged: every (key, step) already in the store. unsent: points that are not, in order, and `sent` when the latest
    ones were (seconds on the monotonic clock). notes: what was noted in each round, for the final files.
    """

    started: RunStarted
    mlflow_id: str
    logged: set[tuple[str, int]] = field(default_factory=set)
    unsent: dict[tuple[str, int], Metric] = field(default_factory=dict)
    sent: float = -math.inf
    notes: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def take(self, points: Iterable[Point]) -> None:
        """Keep points that the store lacks until they are sent, as of now."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for key, value, step in points:
            if (key, step) not in self.logged:
                self.unsent.setdefault((key, step), Metric(key, value, now, step))

    def take_rounds(self, records: Sequence[RoundRecord]) -> None:
        """The points and notes of `records`."""
        self.notes.update({record.round: record.notes for record in records if record.notes})
        for record in records:
            self.take(_points(record.metrics, ROUND_METRICS, record.round))


class MlflowRecorder:
    """Recorder (`fedsir.events.Recorder`) that may serve several runs, one after another.

    Threads may have a recorder each on one store. Of `settings` only figures, weights and flush_seconds count here.
    Rounds are kept and sent together (see `TrackingConfig.flush_seconds`); the start and the end of a run are in
    the store when `record` returns. Rounds that are lost with the process come again as `RunStarted.history`.

    MLflow keeps both points when a step is logged twice, so points already in the store are never sent again.
    If the store fails, the MLflow run is set to FAILED as far as the store allows, and RunFailed is raised, at the
    latest when the next rounds are sent.
    """

    def __init__(self, store: Store, settings: TrackingConfig | None = None, parent: str | None = None) -> None:
        """parent: id of the MLflow run that the recorded ones are nested under."""
        self._store = store
        self._client = store.client
        self._settings = TrackingConfig() if settings is None else settings
        self._parent = parent
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
                    run.take_rounds([event.record])
                    if monotonic() - run.sent >= self._settings.flush_seconds:
                        self._send(run)
            case RunFinished():
                run = self._current("the end")
                with self._failing_loudly("the result", run.started):
                    self._finish(run, event.result)
                    self._open = None
            case RunStopped():
                self._stop(event)

    def _start(self, event: RunStarted) -> None:
        from mlflow_tracking.artifacts import write_start  # with pandas: a third of a second

        with self._store.lock:
            earlier = self._unfinished(event.run_id)
            if event.history and earlier:
                run = self._reopen(event, earlier[0])
            else:
                run = self._create(event)
                for stale in earlier:
                    self._supersede(stale, run.mlflow_id)
        writers = [partial(write_start, event)]
        if self._settings.figures:
            from mlflow_tracking.drawings import draw_start  # with matplotlib, another third

            writers.append(partial(draw_start, event))
        with self._files(writers) as folder, self._store.lock:
            self._client.log_artifacts(run.mlflow_id, folder)

    def _unfinished(self, run_id: str) -> list[Run]:
        """MLflow runs of this identity that never reached FINISHED, newest first."""
        return self._store.runs(f"tags.`{TAG_RUN_ID}` = '{run_id}' and attributes.status != 'FINISHED'")

    def _create(self, event: RunStarted) -> _OpenRun:
        from mlflow.entities import Param

        created = self._client.create_run(
            self._store.experiment_id, run_name=run_name(event.config), tags=tags(event, self._parent)
        )
        self._open = run = _OpenRun(event, created.info.run_id)
        run.take_rounds(event.history)
        self._send(run, params=[Param(k, v) for k, v in parameters(event).items()])
        self._log_dataset(run.mlflow_id, event.dataset)
        return run

    def _reopen(self, event: RunStarted, earlier: Run) -> _OpenRun:
        from mlflow.entities import Param, RunTag

        mlflow_id = earlier.info.run_id
        self._open = run = _OpenRun(event, mlflow_id)
        self._client.update_run(mlflow_id, status="RUNNING")
        resumed = int(earlier.data.tags.get(TAG_RESUMED, "0")) + 1
        now = {**tags(event, self._parent), TAG_RESUMED: str(resumed)}
        # MLflow refuses to change a parameter, so only missing ones are sent.
        missing = {k: v for k, v in parameters(event).items() if k not in earlier.data.params}
        for key in earlier.data.metrics:
            run.logged.update((key, point.step) for point in self._client.get_metric_history(mlflow_id, key))
        run.take_rounds(event.history)
        self._send(
            run,
            params=[Param(k, v) for k, v in missing.items()],
            tags=[RunTag(k, v) for k, v in now.items()],
        )
        if TAG_ERROR in earlier.data.tags:
            self._client.delete_tag(mlflow_id, TAG_ERROR)
        if earlier.inputs is None or not earlier.inputs.dataset_inputs:
            self._log_dataset(mlflow_id, event.dataset)
        return run

    def _supersede(self, stale: Run, successor: str) -> None:
        """A run that starts anew leaves its interrupted predecessors behind: they will never continue."""
        self._client.set_tag(stale.info.run_id, TAG_SUPERSEDED, successor)
        if stale.info.status == "RUNNING":
            self._client.set_terminated(stale.info.run_id, "KILLED")

    def _log_dataset(self, mlflow_id: str, dataset: DatasetFacts) -> None:
        from mlflow.exceptions import MlflowException

        inputs = [dataset_input(dataset)]
        try:
            self._client.log_inputs(mlflow_id, datasets=inputs)
        except MlflowException:
            # MLflow looks for the data set, then adds it; of processes that start at once only one succeeds in that.
            self._client.log_inputs(mlflow_id, datasets=inputs)

    def _send(self, run: _OpenRun, params: Sequence[Param] = (), tags: Sequence[RunTag] = ()) -> None:
        """Everything unsent, with `params` and `tags`, in as few calls as MLflow allows."""
        with self._store.lock:
            while run.unsent or params or tags:
                points = list(islice(run.unsent.items(), ENTITIES_PER_BATCH - len(params) - len(tags)))
                self._client.log_batch(
                    run.mlflow_id, metrics=[metric for _, metric in points], params=params, tags=tags
                )
                for place, _ in points:
                    del run.unsent[place]
                    run.logged.add(place)
                params, tags = (), ()
        run.sent = monotonic()

    def _finish(self, run: _OpenRun, result: RunResult) -> None:
        from mlflow_tracking.artifacts import write_finish, write_weights

        # Before the files: a result whose files cannot be written still has its figures.
        run.take(_points(result.final, FINAL_METRICS, 0))
        self._send(run)
        writers = [partial(write_finish, run.started, result, run.notes)]
        if self._settings.weights:
            writers.append(partial(write_weights, result))
        if self._settings.figures:
            from mlflow_tracking.drawings import draw_finish

            writers.append(partial(draw_finish, run.started, result))
        with self._files(writers) as folder, self._store.lock:
            self._client.log_artifacts(run.mlflow_id, folder)
            self._client.set_terminated(run.mlflow_id, "FINISHED")

    def _stop(self, event: RunStopped) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        # The error that stopped the run matters more than one met while noting it.
        with self._only_warning(f"the last rounds of run {run.mlflow_id} are missing"):
            self._send(run)
        with self._only_warning(f"run {run.mlflow_id} stays without an end"):
            self._mark_stopped(run.mlflow_id, event.error, "KILLED" if event.killed else "FAILED")

    def _mark_stopped(self, mlflow_id: str, error: BaseException, status: str) -> None:
        with self._store.lock:
            try:
                self._client.set_tag(mlflow_id, TAG_ERROR, error_text(error))
            finally:
                self._client.set_terminated(mlflow_id, status)

    @staticmethod
    @contextmanager
    def _files(writers: Iterable[Callable[[Path], None]]) -> Iterator[str]:
        """A folder with what `writers` write, gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="fedsir-") as folder:
            for write in writers:
                write(Path(folder))
            yield folder

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
                with self._only_warning(f"run {self._open.mlflow_id} cannot be marked as failed"):
                    self._mark_stopped(self._open.mlflow_id, error, "FAILED")
            raise RunFailed(
                f"{run_name(started.config)} ({started.run_id}): {what} could not be recorded in "
                f"{shown_uri(self._store.uri)}: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def _only_warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            logging.getLogger(__name__).warning("%s in %s", what, shown_uri(self._store.uri), exc_info=True)


def _points(values: Mapping[str, float], keys: Sequence[str], step: int) -> Iterator[Point]:
    """Known keys in fixed order; undefined figures are left out, since MLflow would draw them."""
    for key in keys:
        value = values.get(key)
        if value is not None and math.isfinite(value):
            yield key, float(value), step
