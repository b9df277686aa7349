"""Runs the runs of a plan one after the other; nothing that one of them does stops the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status

from experiments.console import Notes, percent, round_text, say
from experiments.expansion import PlannedRun
from experiments.session import RunHeld, Session
from fedsir.errors import BadInput, first_line
from fedsir.events import Event, RoundFinished, RunFinished, RunResult, RunStarted, RunStopped
from mlflow_tracking.states import RecordedState, record_failure, recorded_state


@dataclass
class Tally:
    """What became of the runs of a sweep.

    finished_before: finished when the sweep came to them. failed_before: failed earlier and not tried again.
    held: another process was still working on them. left: not come to because of the limit.
    """

    done: int = 0
    finished_before: int = 0
    failed: list[PlannedRun] = field(default_factory=list)
    failed_before: list[PlannedRun] = field(default_factory=list)
    held: list[PlannedRun] = field(default_factory=list)
    left: int = 0

    @property
    def all_well(self) -> bool:
        return not self.failed and not self.failed_before


class Sweep:
    """Runs planned runs through one session, whose images, workers and store they share."""

    def __init__(self, session: Session, console: Console, states: dict[str, RecordedState]) -> None:
        """states: what the store knew about the runs at the beginning."""
        self._session = session
        self._console = console
        self._states = states
        self._notes = Notes(console)
        self._tally = Tally()

    def run(self, runs: Sequence[PlannedRun], limit: int | None, retry: bool) -> Tally:
        """Work on interrupted and missing runs, or with `retry` on failed ones; at most `limit` of them."""
        queue = self._queue(runs, retry)
        held: list[tuple[str, PlannedRun]] = []
        worked = 0
        for number, run in enumerate(queue, 1):
            if limit is not None and worked == limit:
                self._tally.left = len(queue) - number + 1
                break
            place = f"{number:>{len(str(len(queue)))}}/{len(queue)} {run.label}"
            try:
                worked += self._visit(place, run)
            except RunHeld:
                say(self._console, f"{place}: another process works on it, to be looked at again")
                held.append((place, run))
        for place, run in held:
            try:
                self._visit(place, run)
            except RunHeld:
                say(self._console, f"{place}: another process still works on it")
                self._tally.held.append(run)
        return self._tally

    def _queue(self, runs: Sequence[PlannedRun], retry: bool) -> list[PlannedRun]:
        queue = []
        for run in runs:
            known = self._states.get(run.identity)
            status = "missing" if known is None else known.status
            if status == "finished":
                self._tally.finished_before += 1
            elif (status == "failed") == retry:
                queue.append(run)
            elif status == "failed":
                self._tally.failed_before.append(run)
        return queue

    def _visit(self, place: str, run: PlannedRun) -> bool:
        """Whether there was work to do. Raises RunHeld."""
        store = self._session.store(run.config)
        # Another process may have finished it since the sweep began.
        known = recorded_state(store, run.identity)
        if known is not None and known.status == "finished":
            say(self._console, f"{place}: finished by another process")
            self._tally.finished_before += 1
            return False
        watch = _Watch(self._console, place, self._notes)
        try:
            result = self._session.run(run.config, [watch])
        except RunHeld:
            raise
        except Exception as error:
            # Whatever it is, it concerns this run; the user finds it in the record and in the table.
            say(self._console, f"{place}: failed: {first_line(error)}", "red")
            self._tally.failed.append(run)
            self._record(run, error)
            if not isinstance(error, BadInput):
                self._session.release_workers()
        else:
            say(self._console, f"{place}: {watch.kind} images, {_outcome(result)}{watch.resumed}")
            self._tally.done += 1
        finally:
            watch.stop()
        return True

    def _record(self, run: PlannedRun, error: Exception) -> None:
        try:
            record_failure(self._session.store(run.config), run.config, run.identity, error)
        except Exception as again:  # the store itself may be what fails
            say(self._console, f"{run.label}: the failure could not be recorded: {first_line(again)}", "red")


def _outcome(result: RunResult) -> str:
    return f"accuracy {percent(result.final['final/accuracy'])} %, {result.seconds:.1f} s"


class _Watch:
    """Recorder that keeps one line about the run at a terminal, gone when the run ends."""

    def __init__(self, console: Console, place: str, notes: Notes) -> None:
        self._console = console
        self._place = place
        self._notes = notes
        self._status: Status | None = None
        self.kind = ""
        self.resumed = ""

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                for note in event.dataset.notes:
                    self._notes(note)
                self.kind = event.dataset.kind
                if event.history:
                    self.resumed = f", continued after round {len(event.history)}"
                if self._console.is_terminal:
                    self._status = self._console.status(self._place)
                    self._status.start()
            case RoundFinished():
                if self._status is not None:
                    shown = f"{self._place}: round {event.record.round}/{event.total_rounds}"
                    self._status.update(f"{shown}, {round_text(event.record, 15)}")
            case RunFinished() | RunStopped():
                self.stop()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
