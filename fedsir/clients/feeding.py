"""Which actor gets which piece of work when, and what becomes of it where an actor dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from fedsir.clients.executor import ItemError, failure, longest_first
from fedsir.clients.jobs import Job, Piece, Rates, pieces
from fedsir.clients.runtime import Work
from fedsir.errors import RunFailed, first_line

MAX_ATTEMPTS = 3
"""How often one item is tried when actors die under it; a task that kills its actor must not do so for ever."""

IN_FLIGHT = 2
"""Pieces queued per actor, so that the next one is already there when one ends."""

LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""How Ray says that an actor is gone: it died, its memory monitor killed it, or its node left with a result."""


class Feeder:
    """Queues of all jobs. Not thread-safe: one thread owns it.

    send: starts a piece on the actor of a slot and returns a reference to its outcomes. replace: puts a new actor in
    the place of a dead one or raises RunFailed. fixed: every client has an actor of its own. renew: actors do not
    survive an error in a task, as with GPUs, whose errors stick to the process. work: what all of them did.
    """

    def __init__(
        self,
        slots: int,
        fixed: bool,
        renew: bool,
        send: Callable[[int, Piece], Any],
        replace: Callable[[int, Exception], None],
    ) -> None:
        self._slots = slots
        self._fixed = fixed
        self._renew = renew
        self._send = send
        self._replace = replace
        self._own: list[deque[Piece]] = [deque() for _ in range(slots)]
        self._common: deque[Piece] = deque()
        self._running: dict[Any, tuple[int, Piece]] = {}
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
            alone = len(self._jobs) == 1
            self._common.extend(pieces(job, self._rates.seconds(job.items), self._slots, alone))
        # One piece each before anyone's second, so that the longest items do not queue behind each other.
        for limit in range(1, IN_FLIGHT + 1):
            for slot in range(self._slots):
                self._feed(slot, limit)

    def collect(self, reference: Any) -> None:
        """Take in what has ended, well or not, and give its actor more to do."""
        if reference not in self._running:  # lost with its actor, or given up
            return
        slot, piece = self._running[reference]
        try:
            outcomes = ray.get(reference)
        except RayTaskError as error:
            del self._running[reference]
            piece.job.fail(_failed(piece, error))
            if self._renew:
                self._lost(slot, error, guilty=False)
        except LOST as error:
            self._lost(slot, error, guilty=True)
        else:
            del self._running[reference]
            piece.job.finish(piece.positions, outcomes)
            self._rates.learn(piece.items, outcomes)
            for outcome in outcomes:
                self.work.add(outcome.work)
        self._feed(slot, IN_FLIGHT)

    def give_up(self, error: Callable[[], BaseException]) -> None:
        """End everything that waits or runs; `error` makes what each job ends with."""
        for job in self._jobs:
            job.fail(error())
        self._jobs.clear()
        self._running.clear()
        self._common.clear()
        for queue in self._own:
            queue.clear()

    def _feed(self, slot: int, limit: int) -> None:
        load = sum(1 for s, _ in self._running.values() if s == slot)
        while load < limit and (queue := self._own[slot] or self._common):
            piece = queue.popleft()
            if not piece.job.over.is_set():
                self._running[self._send(slot, piece)] = (slot, piece)
                load += 1

    def _lost(self, slot: int, error: Exception, guilty: bool) -> None:
        """Start anew where an actor is gone. guilty: it died under the first of what it had; others fail with it."""
        lost = [self._running.pop(r)[1] for r, (s, _) in list(self._running.items()) if s == slot]
        again = []
        for number, piece in enumerate(lost):
            if not piece.job.over.is_set():
                again += _again(piece, error) if guilty and number == 0 else [piece]
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
    failed = RunFailed(
        f"client {item.client}, round {item.round}: {type(item.task).__name__} lost its actor "
        f"{MAX_ATTEMPTS} times; the last one died: {first_line(error)}\n"
        "Often this is memory: lower execution.actors or training.batch_size."
    )
    failed.__cause__ = error
    job.fail(failed)
    return []


def _failed(piece: Piece, error: RayTaskError) -> RunFailed:
    cause = error.cause if error.cause is not None else error
    item = piece.items[cause.position] if isinstance(cause, ItemError) else piece.items[0]
    failed = failure(item, cause.cause if isinstance(cause, ItemError) else cause)
    failed.__cause__ = error
    return failed
