"""What a sweep shows while it works."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from experiments.expansion import PlannedRun
from experiments.sweeps.progress import MAX_SHOWN, SweepProgress
from experiments.sweeps.progress_text import (
    MAX_REMEDY,
    Counts,
    Running,
    elapsed_text,
    place_text,
    summary_text,
    time_left,
)
from fedsir.errors import BadInput, RunFailed, StoreUnreachable
from fedsir.events import DatasetFacts, RoundFinished, RoundRecord, RunResult, RunStarted

ROUNDS = 4


def planned(name: str) -> PlannedRun:
    config = SimpleNamespace(training=SimpleNamespace(rounds=ROUNDS))
    return PlannedRun(name, cast("Any", config), "demo", f"{name} fedavg s0", 0, (), ())


def started(run: PlannedRun, finished_rounds: int = 0, notes: tuple[str, ...] = ()) -> RunStarted:
    nothing = cast("Any", None)
    facts = DatasetFacts("demo", "phantom", "0", ("a", "b"), 8, 4, 8, 4, notes)
    history = tuple(record(i + 1) for i in range(finished_rounds))
    return RunStarted(run.identity, run.config, facts, nothing, nothing, nothing, history)


def record(round_: int) -> RoundRecord:
    return RoundRecord(round_, {"test/accuracy": round_ / 10})


def finished_round(round_: int) -> RoundFinished:
    return RoundFinished(record(round_), ROUNDS)


def result(accuracy: float = 0.713, seconds: float = 2.06) -> RunResult:
    return cast("Any", SimpleNamespace(final={"final/accuracy": accuracy}, seconds=seconds))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A progress on a console that is read back."""

    def __init__(self, total: int, terminal: bool = False, **options: Any) -> None:
        self.clock = Clock()
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=100, color_system=None)
        self.progress = SweepProgress(self.console, total, clock=self.clock, **options)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def run(self, name: str, **options: Any) -> PlannedRun:
        """Do a run from its first to its last round."""
        run = planned(name)
        watch = self.progress.watch(run)
        watch.record(started(run, **options))
        for round_ in range(options.get("finished_rounds", 0) + 1, ROUNDS + 1):
            watch.record(finished_round(round_))
        self.progress.done(run, result())
        return run


@pytest.fixture
def shown() -> Callable[..., Shown]:
    return Shown


def test_a_line_for_each_finished_run(shown: Callable[..., Shown]) -> None:
    here = shown(12)
    with here.progress:
        here.run("mild")
        here.run("severe", finished_rounds=3)
    assert here.lines == [
        " 1/12 mild fedavg s0: phantom images, accuracy 71.3 %, 2.1 s",
        " 2/12 severe fedavg s0: phantom images, accuracy 71.3 %, 2.1 s, continued after round 3",
    ]


def test_what_was_there_before_counts(shown: Callable[..., Shown]) -> None:
    here = shown(2)
    here.progress.already(finished=7, failed=1)
    here.run("mild")
    assert here.lines[0].startswith(" 9/10 mild")
    assert here.progress.counts() == Counts(total=10, done=8, failed=1)


def test_notes_are_said_once(shown: Callable[..., Shown]) -> None:
    here = shown(2)
    here.run("mild", notes=("3 images are duplicates.",))
    here.run("severe", notes=("3 images are duplicates.",))
    assert here.file.getvalue().count("note: 3 images are duplicates.") == 1


def test_a_failure_and_its_remedy_which_is_not_repeated(shown: Callable[..., Shown]) -> None:
    here = shown(3)
    error = "\n".join(["clients are too small.", *(f"Remedy {i}." for i in range(MAX_REMEDY + 2))])
    here.progress.failed(planned("mild"), BadInput(error))
    here.progress.failed(planned("severe"), RunFailed(error))
    here.progress.failed(planned("worst"), ValueError())
    assert here.lines == [
        "1/3 mild fedavg s0: failed: clients are too small.",
        *(f"    Remedy {i}." for i in range(MAX_REMEDY)),
        "2/3 severe fedavg s0: failed: clients are too small.",
        "3/3 worst fedavg s0: failed: ValueError",
    ]


def test_runs_of_other_processes(shown: Callable[..., Shown]) -> None:
    here = shown(2)
    mild, severe = planned("mild"), planned("severe")
    here.progress.held(mild)
    here.progress.held(severe)
    here.progress.held(mild)
    here.progress.elsewhere(severe)
    assert here.lines == [
        "mild fedavg s0: another process works on it, to be looked at again",
        "severe fedavg s0: another process works on it, to be looked at again",
        "mild fedavg s0: another process still works on it",
        "1/2 severe fedavg s0: finished by another process",
    ]
    assert here.progress.counts() == Counts(total=2, done=1)


def test_runs_whose_store_is_out_of_reach(shown: Callable[..., Shown]) -> None:
    here = shown(2)
    mild = planned("mild")
    for _ in range(2):
        here.progress.watch(mild)
        here.progress.undelivered(mild, StoreUnreachable("http://host could not be used: gone\nThe rounds are kept."))
    assert here.lines == [
        "mild fedavg s0: not recorded yet, to be tried again: http://host could not be used: gone",
        "mild fedavg s0: not recorded yet, the same command records it: http://host could not be used: gone",
    ]
    assert here.progress.counts() == Counts(total=2)


def test_running_runs_are_counted_until_they_end(shown: Callable[..., Shown]) -> None:
    here = shown(3)
    first, second = planned("a"), planned("b")
    here.progress.watch(first)
    here.progress.watch(second)
    assert here.progress.counts().running == 2
    here.progress.failed(first, RunFailed("x"))
    here.progress.held(second)
    assert here.progress.counts().running == 0


def test_quiet_says_failures_at_once_and_counts_once_a_minute(shown: Callable[..., Shown]) -> None:
    here = shown(10, quiet=True)
    with here.progress:
        for name in "abc":
            here.clock.now += 10
            here.run(name)
        assert here.lines == []
        here.progress.failed(planned("d"), RunFailed("broken"))
        assert here.lines == [" 4/10 d fedavg s0: failed: broken"]
        here.progress.watch(planned("e"))
        here.run("f")
        here.clock.now += 40
        here.progress.done(planned("g"), result())
        here.run("i")
        # Five runs took 70 s, four are left.
        assert re.fullmatch(r"\d\d:\d\d 5/10 done, 1 failed, 1 running, about 1 min left", here.lines[1])
        assert len(here.lines) == 2
        # A run of many rounds says so too.
        here.clock.now += 61
        watch = here.progress.watch(planned("h"))
        watch.record(started(planned("h")))
        watch.record(finished_round(1))
        assert len(here.lines) == 3
    assert re.fullmatch(r"\d\d:\d\d 6/10 done, 1 failed, 2 running", here.lines[3])


def test_time_left_follows_expected_costs(shown: Callable[..., Shown]) -> None:
    here = shown(4, weights={"a": 6.0, "b": 2.0, "c": 1.0, "d": 1.0})
    assert here.progress.seconds_left() is None
    watch = here.progress.watch(planned("a"))
    watch.record(started(planned("a")))
    here.clock.now += 60
    watch.record(finished_round(ROUNDS))
    # Nothing is known before a run has come to its end, with all that this takes.
    assert here.progress.seconds_left() is None
    here.progress.done(planned("a"), result())
    assert here.progress.seconds_left() == pytest.approx(40.0)
    here.progress.failed(planned("b"), RunFailed("x"))
    assert here.progress.seconds_left() == pytest.approx(20.0)
    here.progress.elsewhere(planned("c"))
    assert here.progress.seconds_left() == pytest.approx(10.0)
    half = here.progress.watch(planned("d"))
    half.record(started(planned("d")))
    half.record(finished_round(ROUNDS // 2))
    # 6.5 of 7 parts in 60 s.
    assert here.progress.seconds_left() == pytest.approx(60 * 0.5 / 6.5)


def test_rounds_of_an_earlier_sweep_took_no_time(shown: Callable[..., Shown]) -> None:
    here = shown(2)
    here.clock.now += 30
    here.run("a", finished_rounds=2)
    # Half a run in 30 s, one run is left.
    assert here.progress.seconds_left() == pytest.approx(60.0)


def test_nothing_is_said_about_time_after_a_trifle(shown: Callable[..., Shown]) -> None:
    here = shown(2, weights={"a": 0.001, "b": 1.0})
    here.clock.now += 1
    here.run("a")
    assert here.progress.seconds_left() is None


def test_the_live_region(shown: Callable[..., Shown]) -> None:
    here = shown(1013, terminal=True)
    here.progress.already(finished=400, failed=0)
    for number in range(MAX_SHOWN + 2):
        watch = here.progress.watch(planned(f"run{number}"))
        if number == 1:
            watch.record(started(planned("run1")))
            watch.record(finished_round(3))
    with here.progress:
        here.run("mild")
    text = here.file.getvalue()
    assert "400/1413 done, 14 running" in text
    assert re.search(r"run0 fedavg s0 +starting", text)
    assert re.search(r"run1 fedavg s0 +round 3/4, accuracy 30.0 %", text)
    assert "and 2 more" in text
    assert "401/1413 mild fedavg s0: phantom images" in text


def test_no_live_region_for_logs(shown: Callable[..., Shown]) -> None:
    for here in (shown(1), shown(1, quiet=True, terminal=True)):
        with here.progress:
            here.progress.watch(planned("a"))
        assert "a fedavg s0" not in here.file.getvalue()


def test_many_threads_at_once(shown: Callable[..., Shown]) -> None:
    """Every run gets its own number, in the order of the lines, also while the live region is drawn."""
    threads, each = 8, 20
    here = shown(threads * each, terminal=True)

    def work(thread: int) -> None:
        for number in range(each):
            here.run(f"t{thread}-{number}")

    with here.progress:
        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)
            assert not worker.is_alive()
    numbers = re.findall(r"(\d+)/160 t\d+-\d+ fedavg s0: phantom", here.file.getvalue())
    assert [int(n) for n in numbers] == list(range(1, threads * each + 1))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (0, "less than a minute left"),
        (29, "less than a minute left"),
        (31, "about 1 min left"),
        (21 * 60 + 10, "about 21 min left"),
        (119 * 60, "about 119 min left"),
        (121 * 60, "about 2 h left"),
        (47 * 3600, "about 47 h left"),
        (60 * 3600, "about 2.5 days left"),
    ],
)
def test_time_left_in_words(seconds: float | None, words: str) -> None:
    assert time_left(seconds) == words


def test_words() -> None:
    assert place_text(12, 1413) == "  12/1413"
    assert elapsed_text(3723.9) == "1:02:03"
    now = datetime(2026, 3, 1, 17, 3)
    counts = Counts(total=1413, done=412, failed=2, running=3)
    assert (
        summary_text(now, counts, "about 21 min left") == "17:03 412/1413 done, 2 failed, 3 running, about 21 min left"
    )
    assert summary_text(now, Counts(total=3), "") == "17:03 0/3 done"
    assert Running(planned("a")).words == "starting"
    assert Running(planned("a"), round=3, rounds=10, accuracy=0.5).words == "round  3/10, accuracy 50.0 %"
