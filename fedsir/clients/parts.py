"""A dispatch in parts: consecutive clients together, so that results can be let go of before the last one is there.

Whatever the parts, tasks and the order of their results are the same, so nothing depends on them but memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

from fedsir import beside
from fedsir.clients.executor import Executor, Outcome, WorkItem
from fedsir.clients.tasks import Broadcast

PART_BYTES = 32 * 2**20
"""Size of the results of a part, where clients are so many."""

PART_CLIENTS = 32
"""Clients of a part at least: smaller federations are dispatched as a whole, longest clients first."""

PART_PER_SLOT = 2
"""Clients of a part at least, per worker, so that all workers find enough to do in it."""


def in_parts(items: Sequence[WorkItem], nbytes: int, slots: int) -> list[Sequence[WorkItem]]:
    """Cut items whose results have `nbytes` bytes each into parts of nearly equal length, in their order."""
    most = max(PART_BYTES // max(nbytes, 1), PART_CLIENTS, PART_PER_SLOT * slots)
    parts = -(-len(items) // most)
    edges = [len(items) * p // max(parts, 1) for p in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(edges)]


def run_in_parts(
    executor: Executor, parts: Sequence[Sequence[WorkItem]], broadcast: Broadcast
) -> Iterator[list[Outcome]]:
    """Outcomes of one part after the other; the next one is worked on while the caller looks at the last.

    Keeps none of them. Raises what `Executor.run` raises; the part under way beside it goes on until the executor is
    closed.
    """
    if len(parts) == 1 or executor.slots == 1:
        # A single worker is this process, or has next to nothing to gain.
        for items in parts:
            yield executor.run(items, broadcast)
        return
    waiting = deque(parts)
    running: deque[Future[list[Outcome]]] = deque()
    while waiting or running:
        while waiting and len(running) < 2:
            running.append(beside.begin(partial(executor.run, waiting.popleft(), broadcast), "dispatch"))
        outcomes = running.popleft().result()
        yield outcomes
        del outcomes
