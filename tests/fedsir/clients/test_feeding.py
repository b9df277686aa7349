"""Which actor gets what, with actors that are only lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fedsir.clients.deadlines import Deadlines
from fedsir.clients.executor import ItemError, Outcome, WorkItem
from fedsir.clients.feeding import IN_FLIGHT, MAX_ATTEMPTS, Feeder
from fedsir.clients.jobs import Job, Piece
from fedsir.clients.runtime import Work
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.errors import RunFailed


class Task:
    def __call__(self, client: Any, broadcast: Broadcast) -> ClientResult[Any]:
        raise NotImplementedError


def job(clients: int, lane: int = 0) -> Job:
    return Job(lane, [WorkItem(k, 3, Task(), 1) for k in range(clients)], None)


class Actors:
    """Slots with what was sent to them; an actor is the number of its slot.

    now: the time, which only the test moves. killed: slots whose actors were killed.
    """

    def __init__(
        self,
        slots: int,
        fixed: bool = False,
        renew: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self.now = 0.0
        self.killed: list[int] = []
        self.queues: list[list[Future[list[Outcome]]]] = [[] for _ in range(slots)]
        self.sent: list[Piece] = []
        self.pieces: dict[Future[list[Outcome]], Piece] = {}
        self.replaced: list[int] = []
        deadlines = Deadlines(limit_s, 0.0, lambda: self.now)
        self.feeder = Feeder(slots, fixed, renew, deadlines, self._send, self._replace, self.killed.append)

    def _send(self, slot: int, piece: Piece) -> tuple[Future[list[Outcome]], int]:
        future: Future[list[Outcome]] = Future()
        self.sent.append(piece)
        self.pieces[future] = piece
        self.queues[slot].append(future)
        return future, slot

    def _replace(self, slot: int, error: Exception) -> None:  # noqa: ARG002
        self.replaced.append(slot)
        self.queues[slot].clear()

    def end(self, slot: int, error: Exception | None = None, work: Work | None = None) -> Piece:
        """The first piece of a slot ends."""
        future = self.queues[slot].pop(0)
        piece = self.pieces[future]
        if error is None:
            future.set_result([Outcome(ClientResult(p), work or Work(compute=1.0)) for p in piece.positions])
        else:
            future.set_exception(error)
        self.feeder.collect(future)
        return piece

    def running(self) -> list[list[int]]:
        """Clients per slot."""
        return [[self.pieces[f].items[0].client for f in queue] for queue in self.queues]


@pytest.fixture
def actors() -> Callable[..., Actors]:
    return Actors


def died() -> RayActorError:
    return RayActorError()


def failed(position: int) -> RayTaskError:
    return RayTaskError("work", "traceback", ItemError(position, ArithmeticError("cursed")))


def test_everybody_has_one_before_anybody_has_two(actors: Callable[..., Actors]) -> None:
    here = actors(slots=2)
    here.feeder.accept(job(3))
    assert here.running() == [[0, 2], [1]]
    assert IN_FLIGHT == 2


def test_outcomes_come_back_by_position(actors: Callable[..., Actors]) -> None:
    here, work = actors(slots=2), job(4)
    here.feeder.accept(work)
    for slot in (1, 0, 0, 1):
        assert not work.over.is_set()
        here.end(slot)
    assert work.over.is_set()
    assert [work.outcomes[i].result.update for i in range(4)] == [0, 1, 2, 3]


def test_jobs_share_the_actors(actors: Callable[..., Actors]) -> None:
    here, first, second = actors(slots=2), job(1), job(1, lane=1)
    here.feeder.accept(first)
    here.feeder.accept(second)
    here.end(1)
    assert second.over.is_set()
    assert not first.over.is_set()


def test_clients_stay_with_their_actor_where_asked_for(actors: Callable[..., Actors]) -> None:
    here = actors(slots=2, fixed=True)
    here.feeder.accept(job(4))
    assert here.running() == [[0, 2], [1, 3]]


def test_what_was_done_is_added_up(actors: Callable[..., Actors]) -> None:
    here = actors(slots=1)
    here.feeder.accept(job(2))
    here.end(0, work=Work(data=1, compute=10, training=7, trained=3, forwarded=2))
    here.end(0, work=Work(data=2, compute=20, training=8, trained=4, forwarded=5))
    assert here.feeder.work == Work(data=3, compute=30, training=15, trained=7, forwarded=7)


def test_an_error_ends_its_job_and_no_other(actors: Callable[..., Actors]) -> None:
    here, broken, fine = actors(slots=1), job(5), job(1, lane=1)
    here.feeder.accept(broken)
    here.feeder.accept(fine)
    here.end(0, failed(0))
    assert isinstance(broken.error, RunFailed)
    assert str(broken.error) == "client 0, round 3: Task failed: ArithmeticError: cursed"
    while here.queues[0]:
        here.end(0)
    # What was still waiting of the broken job was not begun.
    assert len(here.sent) == 3
    assert fine.over.is_set()
    assert fine.error is None
    assert here.replaced == []


def test_actors_of_gpus_are_replaced_after_an_error(actors: Callable[..., Actors]) -> None:
    here, broken, fine = actors(slots=1, renew=True), job(1), job(1, lane=1)
    here.feeder.accept(broken)
    here.feeder.accept(fine)
    here.end(0, failed(0))
    assert here.replaced == [0]
    # The other job's item went down with the actor and is sent again, without being blamed.
    assert here.running() == [[0]]
    assert fine.attempts == {}
    here.end(0)
    assert fine.over.is_set()


def test_what_an_actor_takes_down_with_it_is_done_again(actors: Callable[..., Actors]) -> None:
    here, work = actors(slots=2), job(4)
    here.feeder.accept(work)
    here.end(0, died())
    assert here.replaced == [0]
    assert here.running() == [[0, 2], [1, 3]]
    # Only the first of its queue is to blame.
    assert work.attempts == {0: 1}


def test_late_news_of_a_dead_actor_is_ignored(actors: Callable[..., Actors]) -> None:
    here, work = actors(slots=1), job(2)
    here.feeder.accept(work)
    second = here.queues[0][1]
    here.end(0, died())
    second.set_exception(died())
    here.feeder.collect(second)
    assert here.replaced == [0]
    assert work.attempts == {0: 1}


def test_an_item_that_kills_every_actor_is_named(actors: Callable[..., Actors]) -> None:
    here, work = actors(slots=1), job(1)
    here.feeder.accept(work)
    for _ in range(MAX_ATTEMPTS):
        assert not work.over.is_set()
        here.end(0, died())
    assert f"client 0, round 3: Task lost its actor {MAX_ATTEMPTS} times" in str(work.error)
    assert isinstance(work.error, RunFailed)
    assert isinstance(work.error.__cause__, RayActorError)


def test_items_that_died_together_are_tried_one_by_one(actors: Callable[..., Actors]) -> None:
    """Nobody knows which of them did it."""
    here, first = actors(slots=1), job(2)
    here.feeder.accept(first)
    for _ in range(2):
        here.end(0, work=Work(compute=1e-4))
    # Their length is known now, so the next ones travel together.
    second, other = job(3, lane=1), job(1, lane=2)
    here.feeder.accept(other)
    here.feeder.accept(second)
    here.end(0)
    (together,) = [p for p in here.sent if len(p.positions) == 3]
    assert here.pieces[here.queues[0][0]] is together
    here.end(0, died())
    assert second.attempts == {}
    sizes = []
    while here.queues[0]:
        sizes.append(len(here.end(0).positions))
    assert sizes == [1, 1, 1]
    assert second.over.is_set()
    assert second.error is None


def test_giving_up_ends_everybody(actors: Callable[..., Actors]) -> None:
    here, one, other = actors(slots=1), job(3), job(3, lane=1)
    here.feeder.accept(one)
    here.feeder.accept(other)
    here.feeder.give_up(KeyboardInterrupt)
    assert isinstance(one.error, KeyboardInterrupt)
    assert isinstance(other.error, KeyboardInterrupt)
    assert one.error is not other.error
    here.end(0)
    assert len(here.sent) == IN_FLIGHT


# -- out of memory -------------------------------------------------------------------------------------------------


def ran_out(position: int = 0) -> RayTaskError:
    return RayTaskError("work", "traceback", ItemError(position, MemoryError("no room for 4 GiB")))


def test_an_actor_without_memory_is_replaced_and_its_work_done_again(actors: Callable[..., Actors]) -> None:
    """Whoever asks that actor next would fail as well."""
    here, poor, other = actors(slots=1), job(1), job(1, lane=1)
    here.feeder.accept(poor)
    here.feeder.accept(other)
    here.end(0, ran_out())
    assert here.replaced == [0]
    assert (poor.attempts, other.attempts) == ({0: 1}, {})
    for _ in range(2):
        here.end(0)
    assert (poor.error, other.error) == (None, None)
    assert poor.over.is_set()
    assert other.over.is_set()


def test_work_that_never_finds_memory_is_named_with_the_remedy(actors: Callable[..., Actors]) -> None:
    here, poor = actors(slots=1), job(1)
    here.feeder.accept(poor)
    for _ in range(MAX_ATTEMPTS):
        assert not poor.over.is_set()
        here.end(0, ran_out())
    assert isinstance(poor.error, RunFailed)
    assert str(poor.error) == (
        f"client 0, round 3: Task lost its actor {MAX_ATTEMPTS} times; "
        "the last one had no memory left: MemoryError: no room for 4 GiB\n"
        "Lower execution.actors, training.batch_size or data.image_size."
    )
    assert isinstance(poor.error.__cause__, MemoryError)


# -- hung clients --------------------------------------------------------------------------------------------------


def test_an_actor_that_is_at_its_work_for_too_long_is_killed_and_replaced(
    actors: Callable[..., Actors], caplog: pytest.LogCaptureFixture
) -> None:
    here, slow = actors(slots=2, limit_s=60.0), job(3)
    here.feeder.accept(slow)
    assert here.feeder.seconds_left() == 60
    here.now = 59
    here.feeder.kill_overdue()
    here.end(1)
    assert (here.killed, here.feeder.seconds_left()) == ([], 1)
    here.now = 60
    here.feeder.kill_overdue()
    assert here.killed == [0]
    assert "client 0, round 3: its actor had not done the work within execution.task_timeout_s = 60" in caplog.text
    # Once is enough: the rest comes as news of its death.
    here.feeder.kill_overdue()
    assert here.killed == [0]
    here.end(0, died())
    assert here.replaced == [0]
    assert slow.attempts == {0: 1}
    for slot in (0, 0):
        here.end(slot)
    assert slow.over.is_set()
    assert slow.error is None


def test_work_that_never_ends_is_named_with_limit_and_remedy(actors: Callable[..., Actors]) -> None:
    here, stuck, fine = actors(slots=1, limit_s=2.5), job(1), job(1, lane=1)
    here.feeder.accept(stuck)
    for _ in range(MAX_ATTEMPTS):
        here.now += 2.5
        here.feeder.kill_overdue()
        here.end(0, died())
    assert isinstance(stuck.error, RunFailed)
    assert re.fullmatch(
        rf"client 0, round 3: Task lost its actor {MAX_ATTEMPTS} times; the last one had not done the work within "
        r"execution\.task_timeout_s = 2\.5 and was killed\nRaise it .* or set it to null for no limit\.",
        str(stuck.error),
    )
    here.feeder.accept(fine)
    here.end(0)
    assert fine.error is None
    assert here.feeder.seconds_left() is None


def test_an_actor_that_dies_later_is_not_said_to_have_hung(actors: Callable[..., Actors]) -> None:
    here, work = actors(slots=1, limit_s=2.0), job(1)
    here.feeder.accept(work)
    here.now = 2.0
    here.feeder.kill_overdue()
    for _ in range(MAX_ATTEMPTS):
        here.end(0, died())
    assert "the last one died: " in str(work.error)
    assert "Often this is memory." in str(work.error)
