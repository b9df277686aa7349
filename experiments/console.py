"""What the console shows while a run works: notes, one live line; tables are in `tables`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedsir.events import Event, RoundFinished, RoundRecord, RunFinished, RunStarted, RunStopped


def percent(value: float | None) -> str:
    """0.8736 as `87.4`; a dash where undefined."""
    return "–" if value is None or isnan(value) else f"{100 * value:.1f}"


class Notes:
    """Prints each note once, however many runs repeat it: runs of one session share images and federations."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: set[str] = set()

    def __call__(self, text: str, style: str = "dim") -> None:
        if text not in self._shown:
            self._shown.add(text)
            say(self._console, f"note: {text}", style)


def new_console(stderr: bool = False) -> Console:
    """A console that shows names as they are: `[/]` in the name of a class is no markup, `:x:` no emoji."""
    return Console(stderr=stderr, markup=False, emoji=False)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: unbroken, so that paths and commands can be copied, and without reading markup."""
    console.print(Text(text, style), soft_wrap=True)


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show what is being waited for; only on a terminal, and gone afterwards."""
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


class LiveLine:
    """Recorder that shows one run: a heading, then one live line; where there is no terminal, about ten lines."""

    def __init__(self, console: Console, label: str, notes: Notes) -> None:
        self._console = console
        self._label = label
        self._notes = notes
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0

    def record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case RoundFinished():
                self._round(event.record)
            case RunFinished() | RunStopped():
                self.stop()

    def _start(self, event: RunStarted) -> None:
        for note in event.dataset.notes:
            self._notes(note)
        for note in event.facts.notes:
            self._notes(f"seed {event.config.seed}: {note}")
        done, self._total = len(event.history), event.config.training.rounds
        resumed = f", continuing after round {done}" if done else ""
        say(self._console, f"{self._label} ({event.dataset.kind} images){resumed}", "bold")
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            BarColumn(bar_width=BAR),
            TextColumn(f"{{task.completed:>{len(str(self._total))}.0f}}/{{task.total:.0f}}"),
            TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        self._progress.start()
        last = round_text(event.history[-1], self._room) if done else "starting"
        self._task = self._progress.add_task("", total=self._total, completed=done, shown=last)

    @property
    def _room(self) -> int:
        # Beside the bar, `done/total` and the time, with a space between them.
        return self._console.width - BAR - (2 * len(str(self._total)) + 1) - len("0:00:00") - 3

    def _round(self, record: RoundRecord) -> None:
        for note in record.notes:
            say(self._console, f"round {record.round}: {note}", "yellow")
        if self._progress is not None:
            self._progress.update(self._task, completed=record.round, shown=round_text(record, self._room))
        elif is_milestone(record.round, self._total):
            width = len(str(self._total))
            say(self._console, f"round {record.round:>{width}}/{self._total}: {round_text(record)}")

    def stop(self) -> None:
        """Leave the line as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


BAR = 20
"""Width of the bar in characters."""


def is_milestone(round_: int, total: int) -> bool:
    """Whether a log that has no live line should mention this round: the first, the last and every tenth part."""
    return round_ in (1, total) or round_ * 10 // total > (round_ - 1) * 10 // total


def round_text(record: RoundRecord, room: int | None = None) -> str:
    """Figures of a round in words, the most important first, as many as fit into `room` characters."""
    metrics = record.metrics
    text = f"accuracy {percent(metrics['test/accuracy'])} %"
    for key, words in (("relabel/residual", "wrong labels left"), ("ident/accuracy", "clients judged right")):
        if key in metrics:
            longer = f"{text} · {words} {percent(metrics[key])} %"
            text = longer if room is None or len(longer) <= room else text
    return text


@contextmanager
def data_progress(console: Console) -> Iterator[_DataLine]:
    """A progress bar for decoding images, shown only when there is something to decode."""
    line = _DataLine(console)
    try:
        yield line
    finally:
        line.stop()


class _DataLine:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, done: int, total: int, what: str) -> None:
        if not self._console.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
        if done >= total:
            self.stop()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()
