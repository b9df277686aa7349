"""Progress of a sweep in words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from experiments.console import percent
from experiments.expansion import PlannedRun

if TYPE_CHECKING:
    from fedsir.events import RunResult

MAX_REMEDY = 4
"""Further lines of an error that are shown."""


@dataclass(frozen=True)
class Counts:
    """Runs of the grid by what has become of them; `total` is all of them."""

    total: int
    done: int = 0
    failed: int = 0
    running: int = 0

    @property
    def words(self) -> str:
        """Such as `412/1413 done, 2 failed, 3 running`; what is nought is left out."""
        parts = [f"{self.done}/{self.total} done"]
        parts += [f"{number} {what}" for number, what in ((self.failed, "failed"), (self.running, "running")) if number]
        return ", ".join(parts)


@dataclass
class Running:
    """One run in flight. round, rounds: finished and all, 0 before it has started. first: finished earlier."""

    run: PlannedRun
    kind: str = ""
    round: int = 0
    rounds: int = 0
    first: int = 0
    accuracy: float | None = None

    @property
    def share(self) -> float:
        """Share of its rounds that this sweep has done."""
        return (self.round - self.first) / self.rounds if self.rounds else 0.0

    @property
    def words(self) -> str:
        """Round and last accuracy."""
        if not self.rounds:
            return "starting"
        round_ = f"round {self.round:>{len(str(self.rounds))}}/{self.rounds}"
        return round_ if self.accuracy is None else f"{round_}, accuracy {percent(self.accuracy)} %"


def time_left(seconds: float | None) -> str:
    """`about 21 min left` in as much detail as an estimate deserves; empty where nothing is known."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute left"
    if minutes < 120:
        return f"about {minutes} min left"
    hours = round(seconds / 3600)
    return f"about {hours} h left" if hours < 48 else f"about {hours / 24:.1f} days left"


def elapsed_text(seconds: float) -> str:
    """`1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def place_text(number: int, total: int) -> str:
    """` 12/1413`, of equal width for all runs."""
    return f"{number:>{len(str(total))}}/{total}"


def done_text(state: Running, result: RunResult) -> str:
    """What a finished run came to."""
    images = f"{state.kind} images, " if state.kind else ""
    resumed = f", continued after round {state.first}" if state.first else ""
    accuracy = percent(result.final["final/accuracy"])
    return f"{images}accuracy {accuracy} %, {result.seconds:.1f} s{resumed}"


def remedy_lines(error: BaseException) -> list[str]:
    """What an error says after its first line."""
    lines = [line.strip() for line in str(error).strip().splitlines()[1:] if line.strip()]
    return lines[:MAX_REMEDY]


def summary_text(now: datetime, counts: Counts, left: str) -> str:
    """`17:03 412/1413 done, 2 failed, 3 running, about 21 min left`."""
    return ", ".join(part for part in (f"{now:%H:%M} {counts.words}", left) if part)
