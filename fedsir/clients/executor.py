"""Who runs client tasks: the interface, and the simplest implementation (this process)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedsir.clients.runtime import Client, ClientRuntime, RuntimeSetup, Work, set_threads
from fedsir.clients.tasks import Broadcast, ClientResult, ClientTask
from fedsir.errors import RunFailed
from fedsir.seeding import Stream, integer


@dataclass(frozen=True)
class WorkItem:
    """One task for one client. `cost` orders the work (longest first) and has no other meaning."""

    client: int
    round: int
    task: ClientTask[Any]
    cost: int


@dataclass(frozen=True)
class Outcome:
    """Result of a work item and what it took inside the worker."""

    result: ClientResult[Any]
    work: Work


class Executor(Protocol):
    """Runs work items; results are the same bits whoever runs them, in the order of the items."""

    @property
    def slots(self) -> int:
        """How many items run at the same time."""
        ...

    def prepare(self, setup: RuntimeSetup) -> None:
        """Make every worker ready for the clients of one run."""
        ...

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        """Run all items; raises RunFailed naming the client and round whose task failed."""
        ...

    def close(self) -> None:
        """Release workers."""
        ...


def perform(runtime: ClientRuntime, item: WorkItem, broadcast: Broadcast) -> Outcome:
    """Run one item in this process."""
    begin = time.perf_counter()
    work = Work()
    # Other code of this process, a recorder or a notebook, may have changed the number since `prepare`.
    set_threads(runtime.setup.threads)
    # Dropout and other torch randomness: addressed by client and round like everything else.
    torch.manual_seed(integer(runtime.setup.seed, Stream.DROPOUT, item.client, item.round))
    result = item.task(Client(item.client, item.round, runtime, work), broadcast)
    work.compute = time.perf_counter() - begin - work.data
    return Outcome(result, work)


def failure(item: WorkItem, error: BaseException) -> RunFailed:
    """The error a user sees when client work fails."""
    return RunFailed(
        f"client {item.client}, round {item.round}: {type(item.task).__name__} failed: {type(error).__name__}: {error}"
    )


class Worker:
    """Serves any client of one run after the other; keeps caches only, so it can be replaced at any time."""

    def __init__(self) -> None:
        self._runtime: ClientRuntime | None = None

    def prepare(self, setup: RuntimeSetup) -> None:
        """Be ready for the clients of one run."""
        set_threads(setup.threads)
        if self._runtime is None or not self._runtime.reconfigure(setup):
            self._runtime = ClientRuntime(setup)

    @property
    def runtime(self) -> ClientRuntime:
        """What the last `prepare` made; raises RuntimeError before the first."""
        if self._runtime is None:
            raise RuntimeError("prepare() must come before any work")
        return self._runtime

    def work(self, item: WorkItem, broadcast: Broadcast) -> Outcome:
        """Run one task."""
        return perform(self.runtime, item, broadcast)


class InProcessExecutor(Worker):
    """Runs everything here, one item after the other; for debugging with breakpoints."""

    slots = 1

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        """All items in their order; see `Executor.run`."""
        outcomes, runtime = [], self.runtime
        with torch.random.fork_rng(devices=[]):
            for item in items:
                try:
                    outcomes.append(perform(runtime, item, broadcast))
                except Exception as error:
                    raise failure(item, error) from error
        return outcomes

    def close(self) -> None:
        """Let go of module and images."""
        self._runtime = None


def longest_first(items: Sequence[WorkItem]) -> list[int]:
    """Positions of the items by falling cost; ties keep their order."""
    return sorted(range(len(items)), key=lambda i: -items[i].cost)
