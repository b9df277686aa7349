"""Who runs client tasks: the interface, and the simplest implementation (this process)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedsir.clients.runtime import Client, ClientRuntime, RuntimeSetup, Work, set_threads
from fedsir.clients.tasks import Broadcast, ClientResult, ClientTask
from fedsir.errors import RunFailed
from fedsir.loading import loading
from fedsir.seeding import Stream, integer

if TYPE_CHECKING:
    from fedsir.clients.engine import Engine

LESS_MEMORY = "Lower execution.actors, training.batch_size or data.image_size."
"""What may help where memory is short."""

_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "cannot allocate memory", "bad_alloc"),
    # Libraries that are loaded late, threads and the kernels of oneDNN need memory as well.
    *("failed to map segment", "can't start new thread", "could not create a primitive"),
)


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
    seed = integer(runtime.setup.seed, Stream.DROPOUT, item.client, item.round)
    if runtime.device.type == "cpu":
        # `torch.manual_seed` also prepares the seeds of GPUs that nobody uses, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    result = item.task(Client(item.client, item.round, runtime, work), broadcast)
    work.compute = time.perf_counter() - begin - work.data
    return Outcome(result, work)


def failure(item: WorkItem, error: BaseException) -> RunFailed:
    """The error a user sees when client work fails."""
    remedy = f"\n{LESS_MEMORY}" if out_of_memory(error) else ""
    return RunFailed(
        f"client {item.client}, round {item.round}: {type(item.task).__name__} failed: "
        f"{type(error).__name__}: {error}{remedy}"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, of this machine or of a GPU."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    # On CPUs torch has no class of its own for it.
    kinds = (RuntimeError, OSError, ImportError)
    return isinstance(error, kinds) and any(words in str(error).lower() for words in _NO_MEMORY)


class ItemError(Exception):
    """Item `position` of those that were sent together failed with `cause`."""

    def __init__(self, position: int, cause: Exception) -> None:
        super().__init__(position, cause)
        self.position = position
        self.cause = cause


class Worker:
    """Serves any client of several runs, told apart by `lane`; keeps caches only, so it can be replaced at any time."""

    def __init__(self) -> None:
        # Lightning takes seconds to load: those whose clients are served by others do without it, and those who serve
        # them have it before the first one.
        with loading():
            import fedsir.clients.engine  # noqa: F401
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._setups: dict[int, RuntimeSetup] = {}
        self._runtimes: dict[int, ClientRuntime] = {}

    def prepare(
        self,
        setup: RuntimeSetup,
        lane: int = 0,
        train_images: NDArray[np.uint8] | None = None,
        test_images: NDArray[np.uint8] | None = None,
    ) -> None:
        """Be ready for the clients of one more run, which takes the place of the lane's last one.

        train_images, test_images: instead of those in `setup`, for images that travel on their own.
        """
        if train_images is not None and test_images is not None:
            setup = replace(setup, train_images=train_images, test_images=test_images)
        self._setups[lane] = setup
        self._runtimes.pop(lane, None)

    def runtime(self, lane: int = 0) -> ClientRuntime:
        """What serves the lane's run; raises RuntimeError before `prepare`."""
        if lane not in self._setups:
            raise RuntimeError("prepare() must come before any work")
        if lane not in self._runtimes:
            from fedsir.clients.engine import Engine, engine_key

            setup = self._setups[lane]
            set_threads(setup.threads)
            key = engine_key(setup)
            if key not in self._engines:
                self._engines[key] = Engine(key)
            self._runtimes[lane] = ClientRuntime(setup, self._engines[key])
        return self._runtimes[lane]

    def work(self, items: Sequence[WorkItem], broadcast: Broadcast, lane: int = 0) -> list[Outcome]:
        """Run items of the lane's run, one after the other. Raises ItemError at the first that fails."""
        outcomes = []
        for position, item in enumerate(items):
            try:
                outcomes.append(perform(self.runtime(lane), item, broadcast))
            except Exception as error:
                raise ItemError(position, error) from error
        return outcomes

    def forget(self, lane: int) -> None:
        """Let go of a lane's run."""
        self._setups.pop(lane, None)
        self._runtimes.pop(lane, None)


class InProcessExecutor:
    """Runs everything here, one item after the other; for debugging with breakpoints."""

    slots = 1

    def __init__(self) -> None:
        self._worker = Worker()

    def prepare(self, setup: RuntimeSetup) -> None:
        self._worker.prepare(setup)

    def runtime(self) -> ClientRuntime:
        """What serves the present run; raises RuntimeError before `prepare`."""
        return self._worker.runtime()

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        """All items in their order; see `Executor.run`."""
        with torch.random.fork_rng(devices=[]):
            self.runtime()
            try:
                return self._worker.work(items, broadcast)
            except ItemError as error:
                raise failure(items[error.position], error.cause) from error.cause

    def close(self) -> None:
        """Let go of module and images."""
        self._worker = Worker()


def longest_first(items: Sequence[WorkItem]) -> list[int]:
    """Positions of the items by falling cost; ties keep their order."""
    return sorted(range(len(items)), key=lambda i: -items[i].cost)
