"""The executor of one run among those that share a pool of actors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from fedsir.clients.executor import Outcome, WorkItem
from fedsir.clients.jobs import Job
from fedsir.clients.runtime import RuntimeSetup
from fedsir.clients.tasks import Broadcast
from fedsir.errors import RunFailed

if TYPE_CHECKING:
    from fedsir.clients.pool import ActorPool

LOOK_S = 0.5
"""How often who waits for actors looks whether Ray is still there; usually the pool's thread tells at once."""


class Lane:
    """Executor for one run at a time on the actors of a pool; the lanes of a pool share its actors."""

    def __init__(self, pool: ActorPool, number: int) -> None:
        self._pool = pool
        self._number = number
        # A run may dispatch from several threads.
        self._jobs: dict[int, Job] = {}
        self._closed = False
        self._putting = threading.Lock()
        self._latest: tuple[dict[str, Any], Any] = ({}, None)

    @property
    def slots(self) -> int:
        """How many items run at the same time."""
        return self._pool.slots

    def prepare(self, setup: RuntimeSetup) -> None:
        """Serve another run from now on; see `Executor.prepare`."""
        self._closed = False
        self._pool.serve(self._number, setup)

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        """Run all items; see `Executor.run`."""
        if not items:
            return []
        if self._closed:
            raise _called_off()
        self._pool.require_ray()
        job = Job(self._number, items, self._put(broadcast))
        self._jobs[id(job)] = job
        self._pool.submit(job)
        try:
            while not job.over.wait(LOOK_S):
                self._pool.require_ray()
        except BaseException as stopped:
            # Interrupted by the user: what has not begun is not begun any more.
            job.fail(RunFailed(f"interrupted: {stopped!r}"))
            raise
        finally:
            del self._jobs[id(job)]
        if job.error is not None:
            raise job.error
        return [job.outcomes[i] for i in range(len(items))]

    def close(self) -> None:
        """Call off what the run still has under way, and let the actors go of it; they stay up for other lanes."""
        self._closed = True
        for job in list(self._jobs.values()):
            job.fail(_called_off())
        self._latest = ({}, None)
        self._pool.leave(self._number)

    def _put(self, broadcast: Broadcast) -> Any:
        """Reference to a broadcast. One put serves the parts of a dispatch, and a model's evaluation and next round."""
        with self._putting:
            known, reference = self._latest
            if reference is None or list(known) != list(broadcast) or not identical(known.values(), broadcast.values()):
                reference = ray.put(dict(broadcast))
                # Holding the values keeps them what they are: others could come to lie in their place.
                self._latest = dict(broadcast), reference
            return reference


def identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two collections of one size hold the same objects in the same order."""
    return all(a is b for a, b in zip(one, other, strict=True))


def _called_off() -> RunFailed:
    return RunFailed("called off: its run has ended")
