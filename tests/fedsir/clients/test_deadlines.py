"""When an actor has been at its work for too long, by a clock that only the test moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedsir.clients.deadlines import KNOWN_LANES, LONGEST_WAIT_S, Deadlines

LIMIT_S, GRACE_S = 10.0, 100.0


@dataclass
class Clock:
    now: float = 5.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Work:
    lane: int = 0
    size: int = 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadlines(clock: Clock) -> Deadlines:
    return Deadlines(LIMIT_S, GRACE_S, clock)


def warm(deadlines: Deadlines, actor: str, lane: int = 0) -> None:
    """Let an actor finish something of a lane."""
    first = Work(lane)
    deadlines.sent(actor, first)
    deadlines.ended(actor, first)


def test_nothing_is_overdue_where_nobody_works(deadlines: Deadlines, clock: Clock) -> None:
    assert deadlines.seconds_left() is None
    warm(deadlines, "a")
    clock.now += 1000
    assert deadlines.seconds_left() is None
    assert deadlines.overdue() == []


def test_time_runs_out_item_by_item(deadlines: Deadlines, clock: Clock) -> None:
    warm(deadlines, "a")
    deadlines.sent("a", Work(size=3))
    assert deadlines.seconds_left() == 3 * LIMIT_S
    clock.now += 3 * LIMIT_S - 1
    assert (deadlines.seconds_left(), deadlines.overdue()) == (1, [])
    clock.now += 1
    assert (deadlines.seconds_left(), deadlines.overdue()) == (0, ["a"])
    clock.now += 7
    assert deadlines.seconds_left() == 0


def test_work_that_waits_behind_other_work_has_not_begun(deadlines: Deadlines, clock: Clock) -> None:
    warm(deadlines, "a")
    first, second = Work(), Work()
    deadlines.sent("a", first)
    clock.now += 9
    deadlines.sent("a", second)
    assert deadlines.seconds_left() == 1
    deadlines.ended("a", first)
    assert deadlines.seconds_left() == LIMIT_S
    clock.now += 4
    assert deadlines.seconds_left() == 6


def test_equal_work_is_told_apart(deadlines: Deadlines, clock: Clock) -> None:
    warm(deadlines, "a")
    first, second = Work(), Work()
    for work in (first, second):
        deadlines.sent("a", work)
    deadlines.ended("a", second)
    clock.now += LIMIT_S
    assert deadlines.overdue() == ["a"]
    deadlines.ended("a", first)
    assert deadlines.seconds_left() is None


def test_the_first_work_of_a_run_has_more_time(deadlines: Deadlines, clock: Clock) -> None:
    deadlines.sent("a", Work())
    assert deadlines.seconds_left() == LIMIT_S + GRACE_S
    warm(deadlines, "b", lane=1)
    deadlines.sent("b", Work(lane=2))
    clock.now += LIMIT_S
    assert deadlines.overdue() == []
    clock.now += GRACE_S
    assert deadlines.overdue() == ["a", "b"]


def test_what_fails_counts_as_finished(deadlines: Deadlines) -> None:
    """The actor has its network by then; whether the work went well says nothing about that."""
    warm(deadlines, "a")
    deadlines.sent("a", Work())
    assert deadlines.seconds_left() == LIMIT_S


def test_actors_are_timed_apart_and_the_first_end_counts(deadlines: Deadlines, clock: Clock) -> None:
    for actor in ("a", "b"):
        warm(deadlines, actor)
    deadlines.sent("a", Work())
    clock.now += 3
    deadlines.sent("b", Work())
    assert deadlines.seconds_left() == 7
    clock.now += 7
    assert deadlines.overdue() == ["a"]
    deadlines.gone("a")
    assert (deadlines.overdue(), deadlines.seconds_left()) == ([], 3)
    deadlines.clear()
    assert deadlines.seconds_left() is None


def test_a_new_actor_starts_cold(deadlines: Deadlines) -> None:
    warm(deadlines, "a")
    deadlines.gone("a")
    deadlines.sent("a", Work())
    assert deadlines.seconds_left() == LIMIT_S + GRACE_S


def test_without_a_limit_nothing_is_ever_overdue(clock: Clock) -> None:
    deadlines = Deadlines(None, GRACE_S, clock)
    deadlines.sent("a", Work())
    clock.now += 1e9
    assert (deadlines.seconds_left(), deadlines.overdue()) == (None, [])


def test_threads_can_wait_for_what_is_left(clock: Clock) -> None:
    deadlines = Deadlines(1e300, GRACE_S, clock)
    deadlines.sent("a", Work())
    assert deadlines.seconds_left() == LONGEST_WAIT_S


def test_lanes_without_number_take_no_memory_without_end(deadlines: Deadlines) -> None:
    for lane in range(3 * KNOWN_LANES):
        warm(deadlines, "a", lane)
    deadlines.sent("a", Work(lane=3 * KNOWN_LANES - 1))
    assert deadlines.seconds_left() == LIMIT_S
    assert len(deadlines._warm["a"]) == KNOWN_LANES
