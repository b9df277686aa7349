"""Writes the events of one run into an MLflow store, as one MLflow run.

A grid has thousands of short runs, several of them going on at once in threads of one process. So rounds are sent
together, and everything that touches the store holds `Store.lock`; files are written and drawn outside of it. The
figures of the start are drawn beside the first rounds (`aside`) and sent with a later round or the end.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedsir.errors import RunFailed, StoreUnreachable
from fedsir.events import (
    FINAL_METRICS,
    ROUND_METRICS,
    Event,
    RoundFinished,
    RoundRecord,
    RunFinished,
    RunResult,
    RunStarted,
    RunStopped,
)
from mlflow_tracking.aside import Drawing, drawing_of_start
from mlflow_tracking.config import TrackingConfig, shown_uri, without_passwords
from mlflow_tracking.delivery import Point, Points, attempt, patiently
from mlflow_tracking.describe import TAG_ERROR, error_text, run_name
from mlflow_tracking.opening import Opening
from mlflow_tracking.outage import is_outage, reason
from mlflow_tracking.store import Store

T = TypeVar("T")


@dataclass
class _OpenRun:
    """What the recorder remembers between events.

    notes: what was noted in each round, for the final files. figures: those of the start while the store lacks them.
    """

    started: RunStarted
    points: Points
    notes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    figures: Drawing | None = None

    @property
    def mlflow_id(self) -> str:
        return self.points.mlflow_id

    def take_rounds(self, records: Sequence[RoundRecord]) -> None:
        """The points and notes of `records`."""
        self.notes.update({record.round: record.notes for record in records if record.notes})
        for record in records:
            self.points.take(_points(record.metrics, ROUND_METRICS, record.round))

    def end_drawing(self) -> None:
        """Nobody needs figures that have not been sent."""
        figures, self.figures = self.figures, None
        if figures is not None:
            figures.end()


class MlflowRecorder:
    """Recorder (`fedsir.events.Recorder`) that may serve several runs, one after another.

    Threads may have a recorder each on one store. Of `settings` only figures, weights, flush_seconds and patience_s
    count here. Rounds are kept and sent together (see `TrackingConfig.flush_seconds`); the start and the end of a run
    are in the store when `record` returns, but for the figures of the start: a thread draws them meanwhile, which
    ends before the run does, and they come with a later round, or with the end. Rounds that are lost with the process
    come again as `RunStarted.history`, and with them a start and its figures.

    A store that is out of reach for a while (see `outage.is_outage`) costs nothing but time: rounds are kept until it
    is back, the start and the end wait for it, at most `TrackingConfig.patience_s`. Then StoreUnreachable is raised.
    The spool on disk is the run's checkpoint, which holds the method's state and the whole history and is written
    before a round is reported: the run is continued, which is one evaluation where all rounds are done, and its
    record delivered. There is no second file of points.

    MLflow keeps both points when a step is logged twice, so points already in the store are never sent again.
    If the store refuses something or drawing fails, the MLflow run is set to FAILED as far as the store allows, and
    RunFailed is raised, at the latest when the next rounds are sent.
    """

    def __init__(
        self,
        store: Store,
        settings: TrackingConfig | None = None,
        parent: str | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """parent: id of the MLflow run above the recorded ones. stopping: ends waiting for the store."""
        self._store = store
        self._client = store.client
        self._settings = TrackingConfig() if settings is None else settings
        self._parent = parent
        self._stopping = stopping
        self._open: _OpenRun | None = None

    @property
    def mlflow_run_id(self) -> str | None:
        """Id of the MLflow run being written, None between runs."""
        return None if self._open is None else self._open.mlflow_id

    def record(self, event: Event) -> None:
        """Take note of `event`; raises RunFailed if the store cannot, StoreUnreachable if it is out of reach."""
        match event:
            case RunStarted():
                with self._failing_loudly("the start", event):
                    self._start(event)
            case RoundFinished():
                run = self._current("a round")
                due = run.points.idle_s >= self._settings.flush_seconds
                with self._failing_loudly(f"round {event.record.round}", run.started):
                    run.take_rounds([event.record])
                    if due:
                        self._try(partial(run.points.send, self._client))
                with self._failing_loudly("the federation's figure", run.started):
                    self._take_figures(run, due)
            case RunFinished():
                run = self._current("the end")
                try:
                    with self._failing_loudly("the result", run.started):
                        self._finish(run, event.result)
                        self._open = None
                finally:
                    run.end_drawing()
            case RunStopped():
                self._stop(event)

    def _start(self, event: RunStarted) -> None:
        from mlflow_tracking.artifacts import write_start  # with pandas: a third of a second

        opening = Opening(self._store, event, self._parent, self._insist)
        self._open = run = _OpenRun(event, Points(opening.find_or_create()))
        run.take_rounds(event.history)
        opening.hand_over(run.points)
        with self._files([partial(write_start, event)]) as folder:
            self._insist(partial(self._client.log_artifacts, run.mlflow_id, folder))
        if self._settings.figures:
            # After everything else, which would wait for the interpreter while it is drawing.
            run.figures = drawing_of_start(event)

    def _take_figures(self, run: _OpenRun, due: bool) -> None:
        """Raise what drawing raised; send the figures of the start if they are ready and `due`."""
        figures = run.figures
        if figures is None or not figures.ready:
            return
        try:
            figures.files()
        except BaseException:
            run.end_drawing()
            raise
        if due:
            self._try(partial(self._send_figures, run, figures))

    def _send_figures(self, run: _OpenRun, figures: Drawing) -> None:
        with self._files([figures.write]) as folder:
            self._client.log_artifacts(run.mlflow_id, folder)
        run.end_drawing()

    def _finish(self, run: _OpenRun, result: RunResult) -> None:
        from mlflow_tracking.artifacts import write_finish, write_weights

        # Before the files: a result whose files cannot be written still has its figures.
        run.points.take(_points(result.final, FINAL_METRICS, 0))
        self._insist(partial(run.points.send, self._client))
        writers: list[Callable[[Path], None]] = [partial(write_finish, run.started, result, run.notes)]
        if run.figures is not None:
            writers.append(run.figures.write)
        if self._settings.weights:
            writers.append(partial(write_weights, result))
        if self._settings.figures:
            from mlflow_tracking.drawings import draw_finish

            writers.append(partial(draw_finish, run.started, result))
        with self._files(writers) as folder:
            self._insist(partial(self._client.log_artifacts, run.mlflow_id, folder))
        self._insist(partial(self._client.set_terminated, run.mlflow_id, "FINISHED"))

    def _insist(self, call: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """What `call` returns, or `again` after it failed, as soon as the store can be reached."""
        return patiently(self._store, call, self._settings.patience_s, self._stopping, again)

    def _try(self, send: Callable[[], None]) -> None:
        """Send something if the store can be reached; otherwise it is tried again with a later round."""
        if self._store.reach.pause:
            return
        with self._store.lock:
            if self._store.reach.pause:
                return  # whoever had the lock has just tried
            try:
                attempt(self._store, send)
            except Exception as error:
                if not is_outage(error):
                    raise

    def _stop(self, event: RunStopped) -> None:
        run, self._open = self._open, None
        if run is None:
            return
        try:
            self._note_stop(run, event)
        finally:
            run.end_drawing()

    def _note_stop(self, run: _OpenRun, event: RunStopped) -> None:
        calls = [(f"the last rounds of run {run.mlflow_id} are missing", partial(run.points.send, self._client))]
        figures = run.figures
        if figures is not None and not self._store.reach.pause:
            figures.wait()  # here, since others may use the store meanwhile
            lost = f"the federation's figure in run {run.mlflow_id} is missing"
            calls.append((lost, partial(self._send_figures, run, figures)))
        mark = partial(self._mark_stopped, run.mlflow_id, event.error, "KILLED" if event.killed else "FAILED")
        calls.append((f"run {run.mlflow_id} stays without an end", mark))
        for lost, call in calls:
            with self._store.lock:
                if event.killed and self._store.reach.pause:
                    # Whoever stops a run does not want to wait, and its checkpoint has what is missing.
                    where = shown_uri(self._store.uri)
                    logging.getLogger(__name__).warning("%s in %s until it is continued", lost, where)
                    return
                # The error that stopped the run matters more than one met while noting it.
                with self._only_warning(lost):
                    attempt(self._store, call)

    def _mark_stopped(self, mlflow_id: str, error: BaseException, status: str) -> None:
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

    def _let_go(self) -> None:
        run, self._open = self._open, None
        if run is not None:
            run.end_drawing()

    @contextmanager
    def _failing_loudly(self, what: str, started: RunStarted) -> Iterator[None]:
        run = f"{run_name(started.config)} ({started.run_id})"
        try:
            yield
        except StoreUnreachable as error:
            # Not marked as failed: it is interrupted, and will be continued.
            self._let_go()
            raise StoreUnreachable(f"{run}: {what} could not be recorded: {error}") from error.__cause__
        except Exception as error:  # the store, the disk and the plots fail in ways of their own
            if is_outage(error):
                # Of the folder for temporary files, since calls of the store have been insisted on.
                self._let_go()
                raise StoreUnreachable(f"{run}: {what} could not be recorded: {reason(error)}") from error
            if self._open is not None:
                with self._only_warning(f"run {self._open.mlflow_id} cannot be marked as failed"):
                    attempt(self._store, partial(self._mark_stopped, self._open.mlflow_id, error, "FAILED"))
            said = f"{type(error).__name__}: {without_passwords(str(error))}"
            raise RunFailed(f"{run}: {what} could not be recorded in {shown_uri(self._store.uri)}: {said}") from error

    @contextmanager
    def _only_warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logging.getLogger(__name__).warning(
                "%s in %s: %s",
                what,
                shown_uri(self._store.uri),
                reason(error),
                exc_info=not is_outage(error),  # which needs no explanation
            )


def _points(values: Mapping[str, float], keys: Sequence[str], step: int) -> Iterator[Point]:
    """Known keys in fixed order; undefined figures are left out, since MLflow would draw them."""
    for key in keys:
        value = values.get(key)
        if value is not None and math.isfinite(value):
            yield key, float(value), step
