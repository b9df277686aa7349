"""Work that waits for the actors of a pool: one job per dispatch, cut into pieces that are worth a message."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsir.clients.executor import Outcome, WorkItem, longest_first

PIECE_SECONDS = 0.05
"""Least work per message where everybody has more; a message costs four to five milliseconds on all sides."""

MAX_PIECE_SECONDS = 1.0
"""Most work per message; more would save nothing, and it is what a dead actor takes with it."""

PIECES_PER_SLOT = 3
"""Pieces per actor that a job of little work is cut into at most."""

FIRST_SHARE = 0.8
"""Of the work that is left, what all actors get as their next pieces; the rest makes up for differences."""


@dataclass
class Job:
    """Items of one dispatch and their outcomes.

    broadcast: reference to what all of them share. attempts: per item, how often it lost its actor.
    """

    lane: int
    items: Sequence[WorkItem]
    broadcast: Any
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def finish(self, positions: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Keep outcomes; the job is over with the last of them."""
        self.outcomes.update(zip(positions, outcomes, strict=True))
        if len(self.outcomes) == len(self.items):
            self.over.set()

    def fail(self, error: BaseException) -> None:
        """End the job with its first error."""
        if not self.over.is_set():
            self.error = error
            self.over.set()


@dataclass(frozen=True)
class Piece:
    """Items of a job, by position, that travel to an actor together."""

    job: Job
    positions: tuple[int, ...]

    @property
    def items(self) -> list[WorkItem]:
        """The items themselves."""
        return [self.job.items[p] for p in self.positions]

    @property
    def lane(self) -> int:
        """Lane of the job."""
        return self.job.lane

    @property
    def size(self) -> int:
        """How many items there are."""
        return len(self.positions)

    def singles(self) -> list[Piece]:
        """The same items, each on its own: to find out which of them kills its actor."""
        return [Piece(self.job, (p,)) for p in self.positions]


class Rates:
    """Seconds per unit of cost, learned per kind of task; they decide on the size of pieces and on nothing else."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def learn(self, items: Sequence[WorkItem], outcomes: Sequence[Outcome]) -> None:
        """Take note of what items took; later figures weigh more."""
        for item, outcome in zip(items, outcomes, strict=True):
            kind, rate = type(item.task).__name__, (outcome.work.data + outcome.work.compute) / max(item.cost, 1)
            self._rates[kind] = 0.5 * (self._rates.get(kind, rate) + rate)

    def seconds(self, items: Sequence[WorkItem]) -> list[float | None]:
        """Expected seconds per item; None for kinds never seen."""
        rates: Mapping[str, float] = self._rates
        return [
            None if rate is None else rate * max(item.cost, 1)
            for item in items
            for rate in [rates.get(type(item.task).__name__)]
        ]


def pieces(job: Job, seconds: Sequence[float | None], slots: int, alone: bool) -> list[Piece]:
    """Cut a job, longest items first and pieces of falling size; items of unknown length travel alone.

    Every actor gets a piece of equal size, most of the work at first, which saves messages; then again of what is left,
    so that actors finish together. alone: no other run could use an actor that runs out of work, so all actors get
    pieces of this one, however short.
    """
    left = sum(s for s in seconds if s is not None)
    least = min(PIECE_SECONDS, left / (PIECES_PER_SLOT * slots)) if alone else PIECE_SECONDS
    target, given = _target(left, slots, least, alone), 0
    found: list[Piece] = []
    together: list[int] = []
    spent = 0.0
    for position in longest_first(job.items):
        expected = seconds[position]
        if expected is None:
            found.append(Piece(job, (position,)))
            continue
        # An item more or less: what comes nearer to the target.
        if together and (spent + expected / 2 > target or spent + expected > MAX_PIECE_SECONDS):
            found.append(Piece(job, tuple(together)))
            left -= spent
            together, spent, given = [], 0.0, given + 1
            if given % slots == 0:
                target = _target(left, slots, least, alone)
        together.append(position)
        spent += expected
    if together:
        found.append(Piece(job, tuple(together)))
    return found


def _target(left: float, slots: int, least: float, alone: bool) -> float:
    """Seconds of each of the next pieces, one per actor, where `left` seconds of work are still to be cut."""
    share = left / slots
    # In the end everything, rather than crumbs of it afterwards.
    part = FIRST_SHARE * share if (1 - FIRST_SHARE) * share >= least / 2 else share
    target = max(least, min(MAX_PIECE_SECONDS, part))
    # While one actor does more than its share of what is left, the others have nothing to do.
    return min(target, share) if alone else target
