"""What a sweep shows while its runs work: a live region at a terminal, lines elsewhere, few lines in quiet logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from experiments.console import Notes, say
from experiments.expansion import PlannedRun
from experiments.sweeps.progress_text import (
    Counts,
    Running,
    done_text,
    elapsed_text,
    place_text,
    remedy_lines,
    summary_text,
    time_left,
)
from fedsir.errors import first_line
from fedsir.events import Event, Recorder, RoundFinished, RunStarted

if TYPE_CHECKING:
    from fedsir.events import RunResult

QUIET_SECONDS = 60.0
"""Least time between two lines of a quiet sweep that is going well."""

KNOWN_SHARE = 0.01
"""Share of the work that must be done before anything is said about the time left."""

MAX_SHOWN = 12
"""Running runs that get a line of their own."""

BAR = 30
"""Width of the bar in characters."""


class SweepProgress:
    """Shows the runs of a sweep; its methods may be called from several threads.

    A context manager: at a terminal the live region is there while the context lasts. `quiet` prints failures, and
    otherwise one line of counts a minute.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        quiet: bool = False,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """total: runs this sweep is to do. weights: their expected cost by identity, in any unit, for the time left."""
        self._console = console
        self._queued = total
        self._quiet = quiet
        self._weights = weights or {}
        self._mean_weight = sum(self._weights.values()) / len(self._weights) if self._weights else 1.0
        self._clock = clock
        self._begin = clock()
        self._last_summary = self._begin
        self._before = Counts(total=0)
        self._done = self._failed = self._elsewhere = 0
        self._worked = self._settled = 0.0
        self._running: dict[str, Running] = {}
        self._postponed: set[str] = set()
        self._notes = Notes(console)
        self._said: set[str] = set()
        self._live: Live | None = None
        # Two locks: the live region takes its own while it asks for the state, and printing takes that one too.
        self._state = threading.Lock()
        self._printing = threading.Lock()

    def already(self, finished: int, failed: int) -> None:
        """Runs of the grid that had finished or failed before and are not done now."""
        with self._state:
            self._before = Counts(finished + failed, finished, failed)

    def __enter__(self) -> Self:
        self._begin = self._last_summary = self._clock()
        if self._console.is_terminal and not self._quiet and self._queued:
            self._live = Live(get_renderable=self._region, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._quiet:
            self._summary(always=True)

    def watch(self, run: PlannedRun) -> Recorder:
        """A recorder that follows `run`, which counts as running from now on."""
        state = Running(run)
        with self._state:
            self._running[run.identity] = state
        return _Watch(self, state)

    def done(self, run: PlannedRun, result: RunResult) -> None:
        """The run has finished."""
        with self._printing:
            with self._state:
                state = self._ended(run, worked=True)
                self._done += 1
                place = self._place()
            self._line(f"{place} {run.label}: {done_text(state, result)}")
        self._summary()

    def failed(self, run: PlannedRun, error: BaseException) -> None:
        """The run has ended with `error`."""
        with self._printing:
            with self._state:
                self._ended(run, worked=False)
                self._failed += 1
                place = self._place()
            say(self._console, f"{place} {run.label}: failed: {first_line(error)}", "red")
            remedy = remedy_lines(error)
            # Where one cause fails many runs, its remedy is not repeated for each.
            if remedy and "\n".join(remedy) not in self._said:
                self._said.add("\n".join(remedy))
                for line in remedy:
                    say(self._console, f"    {line}")
        self._summary()

    def held(self, run: PlannedRun) -> None:
        """Another process works on the run; said twice of one run, it will not be looked at again."""
        with self._printing:
            if self._put_off(run):
                self._line(f"{run.label}: another process still works on it")
            else:
                self._line(f"{run.label}: another process works on it, to be looked at again")

    def undelivered(self, run: PlannedRun, error: BaseException) -> None:
        """The store is out of reach for the record of the run; said twice of one run, it will not be tried again."""
        with self._printing:
            outlook = "the same command records it" if self._put_off(run) else "to be tried again"
            say(self._console, f"{run.label}: not recorded yet, {outlook}: {first_line(error)}", "yellow")
        self._summary()

    def _put_off(self, run: PlannedRun) -> bool:
        """Whether it was put off before, and will not be come to again."""
        with self._state:
            self._running.pop(run.identity, None)
            again = run.identity in self._postponed
            self._postponed.add(run.identity)
            if again:
                self._settled += self._weight(run)
        return again

    def elsewhere(self, run: PlannedRun) -> None:
        """Another process has finished the run."""
        with self._printing:
            with self._state:
                self._ended(run, worked=False)
                self._elsewhere += 1
                place = self._place()
            self._line(f"{place} {run.label}: finished by another process")
        self._summary()

    def unrecorded(self, run: PlannedRun, error: BaseException) -> None:
        """The failure of the run could not be recorded because of `error`."""
        with self._printing:
            say(self._console, f"{run.label}: the failure could not be recorded: {first_line(error)}", "red")

    def seconds_left(self) -> float | None:
        """Expected seconds until the last run ends; None until enough is known.

        The time that the work so far took, in proportion to what is left of it: runs that failed or that another
        process took are not left, but say nothing about speed either.
        """
        with self._state:
            flying = sum(state.share * self._weight(state.run) for state in self._running.values())
            worked = self._worked + flying
            total = sum(self._weights.values()) if self._weights else float(self._queued)
            left = total - self._worked - self._settled - flying
            if self._done == 0 or worked < KNOWN_SHARE * total:
                return None
            return max(0.0, left) * (self._clock() - self._begin) / worked

    def counts(self) -> Counts:
        """Of the whole grid, with what was finished before."""
        with self._state:
            return self._counts()

    def _counts(self) -> Counts:
        before = self._before
        return Counts(
            total=before.total + self._queued,
            done=before.done + self._done + self._elsewhere,
            failed=before.failed + self._failed,
            running=len(self._running),
        )

    def _place(self) -> str:
        counts = self._counts()
        return place_text(counts.done + counts.failed, counts.total)

    def _weight(self, run: PlannedRun) -> float:
        return self._weights.get(run.identity, self._mean_weight)

    def _ended(self, run: PlannedRun, worked: bool) -> Running:
        state = self._running.pop(run.identity, None) or Running(run)
        if worked:
            # Rounds of an earlier sweep took none of this one's time.
            earlier = state.first / state.rounds if state.rounds else 0.0
            self._worked += self._weight(run) * (1.0 - earlier)
            self._settled += self._weight(run) * earlier
        else:
            self._settled += self._weight(run)
        return state

    def _line(self, text: str) -> None:
        if not self._quiet:
            say(self._console, text)

    def _summary(self, always: bool = False) -> None:
        """One line of counts in a quiet log, at most one a minute."""
        if not self._quiet:
            return
        left = time_left(self.seconds_left())
        with self._printing:
            now = self._clock()
            if not always and now - self._last_summary < QUIET_SECONDS:
                return
            self._last_summary = now
            say(self._console, summary_text(datetime.now(), self.counts(), "" if always else left))

    def _started(self, state: Running, event: RunStarted) -> None:
        with self._printing:
            for note in event.dataset.notes:
                self._notes(note)
        with self._state:
            state.kind = event.dataset.kind
            state.rounds = event.config.training.rounds
            state.first = state.round = len(event.history)
            if event.history:
                state.accuracy = event.history[-1].metrics.get("test/accuracy")

    def _round(self, state: Running, event: RoundFinished) -> None:
        with self._state:
            state.round = event.record.round
            state.accuracy = event.record.metrics.get("test/accuracy")
        self._summary()

    def _region(self) -> Group:
        """The live region: one bar over the grid, one line for each running run."""
        left = time_left(self.seconds_left())
        with self._state:
            counts = self._counts()
            # Words rather than states: they go on changing while the region is drawn.
            rows = [(state.run.label, state.words) for state in self._running.values()]
        ended = counts.done + counts.failed
        head = Table.grid(padding=(0, 1))
        elapsed = elapsed_text(self._clock() - self._begin)
        head.add_row(
            ProgressBar(total=max(counts.total, 1), completed=ended, width=BAR),
            Text(", ".join(part for part in (counts.words, elapsed, left) if part), no_wrap=True, overflow="ellipsis"),
        )
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True, overflow="ellipsis")
        lines.add_column(no_wrap=True)
        for label, words in rows[:MAX_SHOWN]:
            lines.add_row(Text(f"  {label}"), Text(words))
        if len(rows) > MAX_SHOWN:
            lines.add_row(Text(f"  and {len(rows) - MAX_SHOWN} more"), Text(""))
        return Group(head, lines)


class _Watch:
    """Recorder of one run that keeps the display up to date."""

    def __init__(self, progress: SweepProgress, state: Running) -> None:
        self._progress = progress
        self._state = state

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._progress._started(self._state, event)
            case RoundFinished():
                self._progress._round(self._state, event)
