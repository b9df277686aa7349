"""How long actors have been at what they work on, and which of them have been at it for too long."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Protocol

KNOWN_LANES = 100
"""How many lanes an actor is remembered to have worked for; a lane that is forgotten gets its first grace again."""

LONGEST_WAIT_S = 86400.0
"""Threads cannot be told to wait for any number of seconds."""


class Timed(Protocol):
    """What is timed: items of a lane that an actor does one after the other."""

    @property
    def lane(self) -> int:
        """Lane of the items."""
        ...

    @property
    def size(self) -> int:
        """How many items."""
        ...


class Deadlines:
    """Time limits of pieces of work, by actor. Not thread-safe: one thread owns it.

    An actor does what it is sent in that order, so a piece begins when the one before it ends. A piece may take
    `limit_s` seconds for each of its items (None: as long as it likes), and `grace_s` more where the actor has not
    finished anything of the lane yet: it then fetches the run's images, builds the network and may compile it.
    """

    def __init__(self, limit_s: float | None, grace_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.limit_s = limit_s
        self._grace_s = grace_s
        self._clock = clock
        self._queues: dict[Hashable, list[Timed]] = {}
        self._begun: dict[Hashable, float] = {}
        self._warm: defaultdict[Hashable, deque[int]] = defaultdict(lambda: deque(maxlen=KNOWN_LANES))

    def sent(self, actor: Hashable, piece: Timed) -> None:
        """`actor` will do `piece` after what it has already."""
        queue = self._queues.setdefault(actor, [])
        if not queue:
            self._begun[actor] = self._clock()
        queue.append(piece)

    def ended(self, actor: Hashable, piece: Timed) -> None:
        """`actor` has done `piece`, well or not, and goes on with the next one."""
        # By identity: equality would compare the work itself.
        left = [other for other in self._queues.get(actor, ()) if other is not piece]
        if not left:
            self._drop(actor)
        else:
            self._queues[actor], self._begun[actor] = left, self._clock()
        if piece.lane not in self._warm[actor]:
            self._warm[actor].append(piece.lane)

    def gone(self, actor: Hashable) -> None:
        """`actor` does nothing any more."""
        self._drop(actor)
        self._warm.pop(actor, None)

    def clear(self) -> None:
        """No actor has anything to do."""
        self._queues.clear()
        self._begun.clear()

    def seconds_left(self) -> float | None:
        """Until the first piece is overdue, at most a day and 0 if one is; None while nothing can be."""
        ends = [end for actor in self._queues if (end := self._end(actor)) is not None]
        return min(LONGEST_WAIT_S, max(0.0, min(ends) - self._clock())) if ends else None

    def overdue(self) -> list[Hashable]:
        """Actors that have been at a piece for too long."""
        now = self._clock()
        return [actor for actor in self._queues if (end := self._end(actor)) is not None and end <= now]

    def _drop(self, actor: Hashable) -> None:
        self._queues.pop(actor, None)
        self._begun.pop(actor, None)

    def _end(self, actor: Hashable) -> float | None:
        if self.limit_s is None:
            return None
        piece = self._queues[actor][0]
        grace = 0.0 if piece.lane in self._warm.get(actor, ()) else self._grace_s
        return self._begun[actor] + self.limit_s * piece.size + grace
