"""A pool of warm Ray actors that serves the clients of several runs at once, one run after the other each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from fedsir.clients.actors import Actors
from fedsir.clients.deadlines import Deadlines
from fedsir.clients.executor import Outcome
from fedsir.clients.feeding import Feeder
from fedsir.clients.jobs import Job, Piece
from fedsir.clients.lane import LOOK_S, Lane, identical
from fedsir.clients.local_ray import start_ray, watch_ray
from fedsir.clients.memory_probe import Demand
from fedsir.clients.runtime import RuntimeSetup, Work
from fedsir.config.training import ExecutionConfig
from fedsir.errors import WorkersLost, first_line

_NO_IMAGES = np.zeros((0, 1, 1), dtype=np.uint8)


@dataclass(frozen=True)
class _Served:
    """What actors must know about a lane's run: references to its setup and images, and the images themselves.

    Holding the arrays keeps their ids from being used again.
    """

    setup: Any
    images: tuple[Any, Any]
    arrays: tuple[NDArray[np.uint8], NDArray[np.uint8]]


@dataclass(frozen=True)
class _Submitted:
    job: Job


@dataclass(frozen=True)
class _Done:
    """actor: the one that had the work; by now another may be in its place."""

    outcomes: Future[list[Outcome]]
    actor: Any


@dataclass(frozen=True)
class _Aborted:
    error: Callable[[], BaseException]


@dataclass(frozen=True)
class _Late:
    """An actor may have been at its work for too long."""


class ActorPool:
    """Ray actors as configured, started once, and the thread that feeds them; its lanes are executors of runs."""

    def __init__(
        self,
        config: ExecutionConfig,
        clients: int,
        demand: Demand | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Start the actors. Raises BadInput when the cluster lacks the resources.

        demand: what a client takes of a GPU, needed where `gpus_per_client` is `auto`. meanwhile: done while they
        import what they need, which takes seconds; what it raises ends them.
        """
        start_ray(config)
        self._actors = Actors(config, clients, demand, meanwhile)
        self._patience_s = config.startup_timeout_s
        self._per_client = config.actors == "per-client"
        self._numbers = count()
        self._served: dict[int, _Served] = {}
        # Kept when its lane is left, since the next run often has the same images.
        self._latest: _Served | None = None
        self._serving = threading.Lock()
        self._lost: str | None = None
        self._asked: Any = None
        self._inbox: SimpleQueue[_Submitted | _Done | _Aborted | _Late | None] = SimpleQueue()
        self._feeder = Feeder(
            self._actors.slots,
            fixed=self._per_client,
            renew=self._actors.gpu_fraction > 0,
            deadlines=Deadlines(config.task_timeout_s, config.startup_timeout_s),
            send=self._send,
            replace=self._replace,
            kill=ray.kill,
        )
        self._thread = threading.Thread(target=self._feed_actors, name="actor pool", daemon=True)
        self._thread.start()
        watch_ray(self._ray_ended)

    @property
    def slots(self) -> int:
        """How many items run at the same time; fewer once a node has died whose actors have no other place."""
        return len(self._actors.all())

    @property
    def device(self) -> str:
        """Accelerator of the actors: `cuda` when they hold GPU fractions."""
        return "cuda" if self._actors.gpu_fraction > 0 else "cpu"

    def take_work(self) -> Work:
        """What the actors did since this was last asked."""
        done, self._feeder.work = self._feeder.work, Work()
        return done

    def lane(self) -> Lane:
        """An executor for one run after the other, beside those of other lanes."""
        return Lane(self, next(self._numbers))

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        return self._actors.pids()

    # -- what lanes ask for ------------------------------------------------------------------------------------------

    def serve(self, lane: int, setup: RuntimeSetup) -> None:
        """Tell all actors about a lane's next run; images that another lane has, or the run before had, are not sent
        again."""
        self.require_ray()
        arrays = (setup.train_images, setup.test_images)
        with self._serving:
            there = (*self._served.values(), *([] if self._latest is None else [self._latest]))
            known = next((served for served in there if identical(served.arrays, arrays)), None)
            if known is None:
                self._latest = None  # let go of before there are others, which may need its room
            images = (ray.put(arrays[0]), ray.put(arrays[1])) if known is None else known.images
            bare = ray.put(replace(setup, train_images=_NO_IMAGES, test_images=_NO_IMAGES))
            self._served[lane] = self._latest = _Served(bare, images, arrays)
            for actor in self._actors.all():
                actor.prepare.remote(bare, lane, *images)

    def submit(self, job: Job) -> None:
        """Queue a job; `job.over` is set when it has ended."""
        self._inbox.put(_Submitted(job))

    def abort(self) -> None:
        """End all jobs, also later ones, with KeyboardInterrupt in the threads that wait for them."""
        self._actors.stopping.set()
        self._inbox.put(_Aborted(KeyboardInterrupt))

    def require_ray(self) -> None:
        """Raise WorkersLost if Ray has died."""
        if self._lost is not None:
            raise _died(self._lost)

    def _ray_ended(self, name: str) -> None:
        if self._lost is None:
            self._lost = name
            self._actors.stopping.set()
            self._inbox.put(_Aborted(partial(_died, name)))

    def leave(self, lane: int) -> None:
        """Let go of a lane's run."""
        with self._serving:
            self._served.pop(lane, None)
            # What has died forgets by itself, and must not be asked.
            for actor in self._actors.all() if self._lost is None else ():
                actor.forget.remote(lane)

    # -- the thread that feeds the actors ----------------------------------------------------------------------------

    def _feed_actors(self) -> None:
        feeder = self._feeder
        aborted: Callable[[], BaseException] | None = None
        while True:
            try:
                # Woken when an actor has been at its work for too long, and never without a reason.
                message = self._inbox.get(timeout=feeder.seconds_left())
            except Empty:
                message = _Late()
            if message is None:
                feeder.give_up(lambda: WorkersLost("the pool of client actors was closed"))
                return
            try:
                match message:
                    case _Late():
                        feeder.kill_overdue()
                    case _Submitted():
                        if aborted is not None:
                            message.job.fail(aborted())
                        else:
                            feeder.accept(message.job)
                    case _Done():
                        self._asked = message.actor
                        feeder.collect(message.outcomes)
                    case _Aborted():
                        aborted = message.error
                        feeder.give_up(aborted)
            except Exception as error:
                # No actor can be had any more: nobody else would tell the runs that wait for their work.
                aborted = partial(_broken, error)
                feeder.give_up(aborted)

    def _send(self, slot: int, piece: Piece) -> tuple[Future[list[Outcome]], Any]:
        actor = self._actors.of(slot)
        future = actor.work.remote(piece.items, piece.job.broadcast, piece.lane).future()
        future.add_done_callback(lambda done: self._inbox.put(_Done(done, actor)))
        return future, actor

    def _replace(self, slot: int, error: Exception) -> None:
        """Start a new actor in place of a dead one, or let others serve its slot. Raises WorkersLost."""
        if self._asked is not self._actors.of(slot):
            return  # it served several slots, and another of them has lost it first
        actor = self._actors.replacement(slot, error)
        if actor is None:
            return
        # Only now: the lanes of other runs must not wait for the start.
        with self._serving:
            self._actors.put(slot, actor)
            for lane, served in self._served.items():
                actor.prepare.remote(served.setup, lane, *served.images)

    def close(self) -> None:
        """Kill the actors; Ray itself stays up for the next pool."""
        self._actors.stopping.set()
        self._inbox.put(None)
        # Without Ray it may hang in the start of an actor.
        self._thread.join(timeout=self._patience_s if self._lost is None else LOOK_S)
        self._actors.release()
        self._served.clear()
        self._latest = None


def _died(name: str) -> WorkersLost:
    return WorkersLost(
        f"Ray has died: its process {name} has ended, perhaps for want of memory.\n"
        "What was going on is interrupted. The same command continues after the last finished round."
    )


def _broken(error: Exception) -> WorkersLost:
    failed = WorkersLost(f"the pool of client actors broke down: {type(error).__name__}: {first_line(error)}")
    failed.__cause__ = error
    return failed
