"""A pool of warm Ray actors that serves the clients of one run after the other."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from fedsir.clients.executor import Outcome, Worker, WorkItem, failure, longest_first
from fedsir.clients.local_ray import start_ray
from fedsir.clients.runtime import RuntimeSetup
from fedsir.clients.tasks import Broadcast
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput, RunFailed, first_line

MAX_ATTEMPTS = 3
"""How often one item is tried when actors die under it; a task that kills its actor must not do so for ever."""

IN_FLIGHT = 2
"""Items queued per actor, so that the next one is already there when one ends."""

LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""How Ray says that an actor is gone: it died, its memory monitor killed it, or its node left with a result."""


class ClientActor(Worker):
    """The worker as a Ray actor."""

    def pid(self) -> int:
        """Process id of the actor, for diagnosis."""
        return os.getpid()


def gpu_fraction(config: ExecutionConfig, clients: int, gpus: float) -> float:
    """GPU fraction of each actor; where the configuration leaves it open, GPUs are used if there are any.

    One actor per GPU, or the largest equal share that lets the configured number of actors fit.
    """
    if config.gpus_per_client is not None:
        return config.gpus_per_client
    if config.device == "cpu" or (config.device == "auto" and gpus < 1):
        return 0.0
    if gpus < 1:
        return 1.0
    if isinstance(config.actors, int):
        actors = min(config.actors, clients)
    else:
        actors = clients if config.actors == "per-client" else min(clients, int(gpus))
    return 1.0 / ceil(actors / int(gpus))


def pool_size(config: ExecutionConfig, clients: int, cpus: float, gpus: float) -> tuple[int, float]:
    """Number of actors and GPU fraction of each.

    Raises BadInput when the cluster cannot hold them.
    """
    fraction = gpu_fraction(config, clients, gpus)
    if fraction > 1 and fraction != int(fraction):
        raise BadInput(
            f"execution.gpus_per_client is {fraction:g}; more than one GPU must be a whole number.\n"
            "Use a fraction up to 1 or a whole number."
        )
    if fraction > 0 and config.device == "cpu":
        raise BadInput(
            f"execution.gpus_per_client is {fraction:g} but execution.device is cpu.\n"
            "Set execution.device to auto or cuda, or leave gpus_per_client out."
        )
    fits = clients
    if fraction > 0:
        # Whole copies of the fraction on each GPU: 0.4 fits twice on one GPU, not two and a half times.
        fits = int(gpus) * int(1 / fraction + 1e-9) if fraction <= 1 else int(gpus / fraction)
    if config.actors == "per-client":
        actors = clients
    elif isinstance(config.actors, int):
        actors = min(config.actors, clients)
    elif fraction > 0:
        actors = max(1, min(clients, fits))
    else:
        actors = max(1, min(clients, int(cpus) // config.threads))
    if fraction > 0 and actors > fits:
        raise BadInput(
            f"execution: {actors} actors with {fraction:g} GPU each do not fit: Ray sees {gpus:g} GPUs, which "
            f"hold {fits}.\nLower execution.gpus_per_client or execution.actors, or set execution.device to cpu."
        )
    return actors, fraction


class ActorPool:
    """Executor on Ray actors; `actors` and GPU fractions as configured, started once and reused over runs."""

    def __init__(self, config: ExecutionConfig, clients: int) -> None:
        """Start the actors. Raises BadInput when the cluster lacks the resources."""
        start_ray(config)
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        cpus = float(resources.get("CPU", 1.0))
        self._config = config
        self.slots, self._gpu_fraction = pool_size(config, clients, cpus, float(resources.get("GPU", 0.0)))
        # More actors than cores share them: Ray counts CPUs logically and would otherwise wait for ever.
        self._cpu_share = min(float(config.threads), int(cpus / self.slots * 1e4) / 1e4)
        self._per_client = config.actors == "per-client"
        self._setup_ref: Any = None
        self._actors = [self._start_actor() for _ in range(self.slots)]
        self._await_start()

    @property
    def device(self) -> str:
        """Accelerator of the actors: `cuda` when they hold GPU fractions."""
        return "cuda" if self._gpu_fraction > 0 else "cpu"

    def _start_actor(self) -> Any:
        remote = ray.remote(ClientActor)
        return remote.options(num_cpus=self._cpu_share, num_gpus=self._gpu_fraction, max_restarts=0).remote()

    def _await_start(self) -> None:
        try:
            ray.get([actor.pid.remote() for actor in self._actors], timeout=self._config.startup_timeout_s)
        except GetTimeoutError as error:
            have = ray.available_resources()  # type: ignore[no-untyped-call]
            self.close()
            raise BadInput(
                f"execution: {self.slots} actors ({self._cpu_share:g} CPU, {self._gpu_fraction:g} GPU each) did not "
                f"start within {self._config.startup_timeout_s:g} s; Ray has {have.get('CPU', 0):g} CPU and "
                f"{have.get('GPU', 0):g} GPU free.\nLower execution.actors or raise execution.startup_timeout_s."
            ) from error

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        return list(ray.get([actor.pid.remote() for actor in self._actors]))

    def prepare(self, setup: RuntimeSetup) -> None:
        self._setup_ref = ray.put(setup)
        ready = [actor.prepare.remote(self._setup_ref) for actor in self._actors]
        for slot, reference in enumerate(ready):
            try:
                ray.get(reference)
            except LOST as error:
                # Under the task that ended the last run, or since then.
                self._replace(slot, error)

    def run(self, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        shared = ray.put(dict(broadcast))
        waiting: dict[int, deque[int]] = {slot: deque() for slot in range(self.slots)}
        common: deque[int] = deque()
        for position in longest_first(items):
            if self._per_client:
                waiting[items[position].client % self.slots].append(position)
            else:
                common.append(position)
        outcomes: dict[int, Outcome] = {}
        attempts = [0] * len(items)
        running: dict[Any, tuple[int, int]] = {}

        def feed(slot: int, limit: int) -> None:
            queue = waiting[slot] or common
            load = sum(1 for s, _ in running.values() if s == slot)
            while load < limit and queue:
                position = queue.popleft()
                reference = self._actors[slot].work.remote(items[position], shared)
                running[reference] = (slot, position)
                load += 1
                queue = waiting[slot] or common

        # One item each before anyone's second, so that the longest items do not queue behind each other.
        for limit in range(1, IN_FLIGHT + 1):
            for slot in range(self.slots):
                feed(slot, limit)
        while running:
            done, _ = ray.wait(list(running), num_returns=1)
            slot, position = running[done[0]]
            try:
                outcomes[position] = ray.get(done[0])
                del running[done[0]]
            except RayTaskError as error:
                self._drain(running)
                raise failure(items[position], error.cause if error.cause is not None else error) from error
            except LOST as error:
                # Everything in the actor's queue fails with it, but it died under the first.
                lost = [running.pop(reference)[1] for reference, (s, _) in list(running.items()) if s == slot]
                item = items[lost[0]]
                attempts[lost[0]] += 1
                if attempts[lost[0]] >= MAX_ATTEMPTS:
                    self._drain(running)
                    raise RunFailed(
                        f"client {item.client}, round {item.round}: {type(item.task).__name__} lost its actor "
                        f"{MAX_ATTEMPTS} times; the last one died: {first_line(error)}\n"
                        "Often this is memory: lower execution.actors or training.batch_size."
                    ) from error
                self._replace(slot, error)
                (waiting[slot] if self._per_client else common).extendleft(reversed(lost))
            feed(slot, IN_FLIGHT)
        return [outcomes[i] for i in range(len(items))]

    def _replace(self, slot: int, error: Exception) -> None:
        self._actors[slot] = self._start_actor()
        try:
            ray.get(self._actors[slot].prepare.remote(self._setup_ref), timeout=self._config.startup_timeout_s)
        except (GetTimeoutError, *LOST) as again:
            raise RunFailed(f"a client actor died and could not be replaced: {error}") from again

    @staticmethod
    def _drain(running: dict[Any, tuple[int, int]]) -> None:
        # Later runs reuse the actors: nothing of a failed run may still be in their queues.
        ray.wait(list(running), num_returns=len(running)) if running else None
        running.clear()

    def close(self) -> None:
        """Kill the actors; Ray itself stays up for the next pool."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._setup_ref = None
