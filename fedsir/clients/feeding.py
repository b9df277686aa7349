"""Which actor gets which piece of work when, and what becomes of it where an actor dies."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from fedsir.clients.deadlines import Deadlines
from fedsir.clients.executor import LESS_MEMORY, ItemError, Outcome, failure, longest_first, out_of_memory
from fedsir.clients.jobs import Job, Piece, Rates, pieces
from fedsir.clients.runtime import Work
from fedsir.errors import RunFailed, first_line

MAX_ATTEMPTS = 3
"""How often one item is tried when actors die under it; a task that kills its actor must not do so for ever."""

IN_FLIGHT = 2
"""Pieces queued per actor, so that the next one is already there when one ends."""

LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""How Ray says that an actor is gone: it died, its memory monitor killed it, or its node left with a result."""

_LOG = logging.getLogger(__name__)


class TooLong(Exception):
    """An actor was killed since it had been at its work for longer than it may."""


@dataclass(frozen=True)
class _Sent:
    slot: int
    actor: Any
    piece: Piece


class Feeder:
    """Queues of all jobs. Not thread-safe: one thread owns it.

    send: starts a piece on the actor of a slot and returns the future of its outcomes, and the actor. replace: puts a
    new actor in the place of one that is dead or must not go on, or raises RunFailed. kill: ends an actor, whose work
    is then reported as lost. fixed: every client has an actor of its own. renew: actors do not survive an error in a
    task, as with GPUs, whose errors stick to the process. work: what all of them did.
    """

    def __init__(
        self,
        slots: int,
        fixed: bool,
        renew: bool,
        deadlines: Deadlines,
        send: Callable[[int, Piece], tuple[Future[list[Outcome]], Any]],
        replace: Callable[[int, Exception], None],
        kill: Callable[[Any], None],
    ) -> None:
        self._slots = slots
        self._fixed = fixed
        self._renew = renew
        self._deadlines = deadlines
        self._send = send
        self._replace = replace
        self._kill = kill
        self._own: list[deque[Piece]] = [deque() for _ in range(slots)]
        self._common: deque[Piece] = deque()
        self._running: dict[Future[list[Outcome]], _Sent] = {}
        self._killed: dict[Any, TooLong] = {}
        self._jobs: list[Job] = []
        self._rates = Rates()
        self.work = Work()

    def accept(self, job: Job) -> None:
        """Queue a job behind those that came before."""
        self._jobs = [*(j for j in self._jobs if not j.over.is_set()), job]
        if self._fixed:
            for position in longest_first(job.items):
                self._own[job.items[position].client % self._slots].append(Piece(job, (position,)))
        else:
            alone = all(j.lane == job.lane for j in self._jobs)
            self._common.extend(pieces(job, self._rates.seconds(job.items), self._slots, alone))
        # One piece each before anyone's second, so that the longest items do not queue behind each other.
        for limit in range(1, IN_FLIGHT + 1):
            for slot in range(self._slots):
                self._feed(slot, limit)

    def collect(self, future: Future[list[Outcome]]) -> None:
        """Take in what has ended, well or not, and give its actor more to do."""
        if future not in self._running:  # lost with its actor, or given up
            return
        sent = self._running[future]
        slot, piece = sent.slot, sent.piece
        try:
            outcomes = future.result()
        except RayTaskError as error:
            position, cause = _cause(error)
            if out_of_memory(cause):
                # As if the system had killed it: what is left of its memory may not do for anybody's work.
                self._lost(slot, cause, guilty=True)
            else:
                piece.job.fail(_failed(piece, position, cause, error))
                if self._renew:
                    self._lost(slot, error, guilty=False)
                else:
                    self._ended(future)
        except LOST as error:
            self._lost(slot, self._killed.get(sent.actor, error), guilty=True)
        else:
            self._ended(future)
            piece.job.finish(piece.positions, outcomes)
            self._rates.learn(piece.items, outcomes)
            for outcome in outcomes:
                self.work.add(outcome.work)
        self._feed(slot, IN_FLIGHT)

    def seconds_left(self) -> float | None:
        """Until an actor has been at its work for too long; None while none can be."""
        return self._deadlines.seconds_left()

    def kill_overdue(self) -> None:
        """Kill the actors that have been at their work for too long; `collect` does the rest."""
        limit = self._deadlines.limit_s
        for actor in self._deadlines.overdue():
            late = TooLong(f"had not done the work within execution.task_timeout_s = {limit:g} and was killed")
            item = next(sent.piece for sent in self._running.values() if sent.actor == actor).items[0]
            _LOG.warning("client %d, round %d: its actor %s", item.client, item.round, late)
            self._killed[actor] = late
            self._deadlines.gone(actor)
            self._kill(actor)

    def give_up(self, error: Callable[[], BaseException]) -> None:
        """End everything that waits or runs; `error` makes what each job ends with."""
        for job in self._jobs:
            job.fail(error())
        self._jobs.clear()
        self._running.clear()
        self._deadlines.clear()
        self._common.clear()
        for queue in self._own:
            queue.clear()

    def _ended(self, future: Future[list[Outcome]]) -> None:
        sent = self._running.pop(future)
        self._deadlines.ended(sent.actor, sent.piece)

    def _feed(self, slot: int, limit: int) -> None:
        load = sum(1 for sent in self._running.values() if sent.slot == slot)
        while load < limit and (queue := self._own[slot] or self._common):
            piece = queue.popleft()
            if not piece.job.over.is_set():
                future, actor = self._send(slot, piece)
                self._running[future] = _Sent(slot, actor, piece)
                self._deadlines.sent(actor, piece)
                load += 1

    def _lost(self, slot: int, error: Exception, guilty: bool) -> None:
        """Start anew where an actor is gone. guilty: it died under the first of what it had; others fail with it."""
        lost = [self._running.pop(r) for r, sent in list(self._running.items()) if sent.slot == slot]
        again = []
        for number, sent in enumerate(lost):
            self._deadlines.gone(sent.actor)
            self._killed.pop(sent.actor, None)
            if not sent.piece.job.over.is_set():
                again += _again(sent.piece, error) if guilty and number == 0 else [sent.piece]
        self._replace(slot, error)
        queue = self._own[slot] if self._fixed else self._common
        queue.extendleft(reversed(again))


def _again(piece: Piece, error: Exception) -> list[Piece]:
    """What is tried again of a piece under which an actor died; its job fails where that was too often."""
    if len(piece.positions) > 1:
        return piece.singles()
    position, item, job = piece.positions[0], piece.items[0], piece.job
    job.attempts[position] = job.attempts.get(position, 0) + 1
    if job.attempts[position] < MAX_ATTEMPTS:
        return [piece]
    fate, remedy = _fate(error)
    failed = RunFailed(
        f"client {item.client}, round {item.round}: {type(item.task).__name__} lost its actor "
        f"{MAX_ATTEMPTS} times; the last one {fate}\n{remedy}"
    )
    failed.__cause__ = error
    job.fail(failed)
    return []


def _fate(error: Exception) -> tuple[str, str]:
    """What became of an actor that was lost with `error`, and what may help."""
    if isinstance(error, TooLong):
        return first_line(error), "Raise it if clients take that long here, or set it to null for no limit."
    if out_of_memory(error):
        return f"had no memory left: {type(error).__name__}: {first_line(error)}", LESS_MEMORY
    return f"died: {first_line(error)}", f"Often this is memory. {LESS_MEMORY}"


def _cause(error: RayTaskError) -> tuple[int, Exception]:
    """Position of the item of a piece that failed, and what it failed with."""
    cause = error.cause if error.cause is not None else error
    return (cause.position, cause.cause) if isinstance(cause, ItemError) else (0, cause)


def _failed(piece: Piece, position: int, cause: Exception, error: RayTaskError) -> RunFailed:
    failed = failure(piece.items[position], cause)
    failed.__cause__ = error
    return failed
