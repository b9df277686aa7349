"""How work is cut into pieces that are worth a message to an actor."""

from __future__ import annotations

from typing import Any

import pytest

from fedsir.clients.executor import Outcome, WorkItem
from fedsir.clients.jobs import (
    FIRST_SHARE,
    MAX_PIECE_SECONDS,
    PIECE_SECONDS,
    PIECES_PER_SLOT,
    Job,
    Piece,
    Rates,
    pieces,
)
from fedsir.clients.runtime import Work
from fedsir.clients.tasks import Broadcast, ClientResult


class Task:
    def __call__(self, client: Any, broadcast: Broadcast) -> ClientResult[Any]:
        raise NotImplementedError


class Other(Task):
    pass


def job(*costs: int, task: Any = None) -> Job:
    return Job(0, [WorkItem(k, 0, task or Task(), cost) for k, cost in enumerate(costs)], None)


def took(seconds: float) -> Outcome:
    return Outcome(ClientResult(None), Work(data=seconds / 4, compute=3 * seconds / 4))


def cut(costs: list[int], rate: float, slots: int, alone: bool) -> list[tuple[int, ...]]:
    return [p.positions for p in pieces(job(*costs), [rate * c for c in costs], slots, alone)]


def test_short_items_travel_together_and_long_ones_alone() -> None:
    assert cut([1, 1, 1, 1], PIECE_SECONDS / 2, slots=2, alone=False) == [(0, 1), (2, 3)]
    assert cut([1, 1, 1], 10 * PIECE_SECONDS, slots=2, alone=False) == [(0,), (1,), (2,)]


def test_the_longest_come_first_and_nothing_is_lost() -> None:
    costs = [3, 9, 1, 9, 5, 1, 1, 1]
    found = cut(costs, PIECE_SECONDS / 6, slots=2, alone=False)
    order = [p for piece in found for p in piece]
    assert sorted(order) == list(range(len(costs)))
    assert [costs[p] for p in order] == sorted(costs, reverse=True)
    assert len(found) < len(costs)


def test_pieces_are_large_at_first_and_small_in_the_end() -> None:
    slots, seconds = 2, PIECE_SECONDS / 2
    sizes = [len(piece) for piece in cut([1] * 60, seconds, slots, alone=False)]
    assert sum(sizes) == 60
    assert sizes == sorted(sizes, reverse=True)
    # Most of the work at once, equally for all actors, and not all of it.
    assert sizes[:slots] == [pytest.approx(FIRST_SHARE * 60 / slots, abs=1)] * slots
    assert slots < len(sizes) <= PIECES_PER_SLOT * slots


def test_no_piece_is_longer_than_a_dead_actor_may_cost() -> None:
    found = cut([1] * 400, MAX_PIECE_SECONDS / 4, slots=1, alone=False)
    assert max(len(piece) for piece in found) == 4


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_job_that_is_alone_gives_work_to_all_actors(slots: int) -> None:
    tiny = PIECE_SECONDS / 1000
    assert len(cut([1] * 30, tiny, slots, alone=True)) > slots
    assert len(cut([1] * 30, tiny, slots, alone=False)) == 1


def test_a_job_that_is_alone_leaves_actors_equal_shares_in_the_end() -> None:
    # Most of it first; what is left is too short for the least piece each.
    seconds = PIECE_SECONDS / 10
    sizes = [len(piece) for piece in cut([1] * 60, seconds, slots=2, alone=True)]
    assert sizes == [24, 24, 6, 6]
    sizes = [len(piece) for piece in cut([1] * 60, seconds, slots=2, alone=False)]
    assert sizes == [24, 24, 10, 2]


def test_items_of_unknown_length_travel_alone() -> None:
    mixed = job(1, 1, 1)
    found = pieces(mixed, [None, 0.001, 0.001], slots=1, alone=False)
    assert sorted(p.positions for p in found) == [(0,), (1, 2)]


def test_rates_are_learned_per_kind_of_task() -> None:
    rates, known, unknown = Rates(), job(2, 4), job(2, task=Other())
    assert rates.seconds(known.items) == [None, None]
    rates.learn(known.items, [took(0.2), took(0.4)])
    assert rates.seconds(known.items) == pytest.approx([0.2, 0.4])
    assert rates.seconds(unknown.items) == [None]
    rates.learn(known.items[:1], [took(0.6)])
    assert rates.seconds(known.items[:1]) == [pytest.approx(0.4)]


def test_a_job_is_over_with_its_last_outcome_or_its_first_error() -> None:
    work = job(1, 1, 1)
    work.finish((2, 0), [took(1), took(2)])
    assert not work.over.is_set()
    work.finish((1,), [took(3)])
    assert work.over.is_set()
    work.fail(ValueError("too late"))
    assert work.error is None
    broken = job(1)
    broken.fail(ValueError("first"))
    broken.fail(ValueError("second"))
    assert broken.over.is_set()
    assert str(broken.error) == "first"


def test_a_piece_can_be_taken_apart() -> None:
    work = job(1, 2, 3)
    piece = Piece(work, (2, 0))
    assert [i.client for i in piece.items] == [2, 0]
    assert [p.positions for p in piece.singles()] == [(2,), (0,)]
