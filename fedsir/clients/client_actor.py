"""The process that serves clients, as Ray sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsir.clients.allocator import keep_memory
from fedsir.loading import loading

if TYPE_CHECKING:
    from fedsir.clients.executor import Outcome, WorkItem
    from fedsir.clients.tasks import Broadcast


class ClientActor:
    """A worker (see `executor`) in a process of its own.

    Ray loads the class by itself; whatever is large is loaded by its start.
    """

    def __init__(self, threads: int, memory_cap: float | None = None) -> None:
        """threads: of each library. memory_cap: share of its GPU's memory that it may allocate, None for all of it."""
        # What torch and the libraries for linear algebra read when they load. Here rather than in an environment of the
        # job: Ray has that made by another process, which actors wait for.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        keep_memory()
        with loading():
            import torch

            from fedsir.clients.executor import Worker

            self._worker = Worker()
        # What is loaded stays, so later searches for garbage need not go through it.
        gc.freeze()
        if memory_cap is not None:
            torch.cuda.set_per_process_memory_fraction(memory_cap)

    def prepare(self, *setup: Any) -> None:
        """See `Worker.prepare`."""
        self._worker.prepare(*setup)

    def work(self, items: Sequence[WorkItem], broadcast: Broadcast, lane: int) -> list[Outcome]:
        """See `Worker.work`."""
        return self._worker.work(items, broadcast, lane)

    def forget(self, lane: int) -> None:
        """See `Worker.forget`."""
        self._worker.forget(lane)

    def pid(self) -> int:
        """Process id of the actor, for diagnosis."""
        return os.getpid()
