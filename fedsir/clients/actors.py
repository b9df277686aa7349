"""The actor processes of a pool: their start at their places, and what becomes of a slot whose actor has died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayError

from fedsir.clients.client_actor import ClientActor
from fedsir.clients.feeding import LOST
from fedsir.clients.memory_probe import Demand, measure
from fedsir.clients.numerics import gpu_options
from fedsir.clients.placement import Placement, live_nodes, plan_layout
from fedsir.clients.sizing import Node, pool_size
from fedsir.config.training import ExecutionConfig
from fedsir.errors import BadInput, WorkersLost, first_line

MEMORY_PAUSE_S = 2.0
"""Between attempts to start an actor where there is no memory for it."""


class Actors:
    """One actor for each slot, started as configured; Ray must be running.

    stopping: set by another thread where nobody needs a new actor any more, so that none is waited for.
    """

    def __init__(
        self,
        config: ExecutionConfig,
        clients: int,
        demand: Demand | None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Start them. Raises BadInput when the cluster lacks the resources.

        demand: what a client takes of a GPU, needed where `gpus_per_client` is `auto`. meanwhile: done while they
        start; what it raises ends them.
        """
        self._config = config
        self.stopping = Event()
        nodes = [node for node in live_nodes() if node.cpus > 0 or node.gpus >= 1]
        self.slots, self.gpu_fraction = pool_size(config, clients, nodes, _per_gpu(config, demand, nodes))
        layout = plan_layout(self.slots, self.gpu_fraction, config.threads, nodes)
        self._placement = Placement(layout, nodes, config.startup_timeout_s)
        # Slots whose place is gone with its node: actors of other slots serve them as well.
        self._homeless: set[int] = set()
        self._actors = [self._start(slot) for slot in range(self.slots)]
        answers = [actor.pid.remote() for actor in self._actors]
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException:
                self.release()
                raise
        self._await_start(answers)

    def of(self, slot: int) -> Any:
        """The actor that serves a slot."""
        return self._actors[slot]

    def all(self) -> list[Any]:
        """Each actor once."""
        return [actor for slot, actor in enumerate(self._actors) if slot not in self._homeless]

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        return list(ray.get([actor.pid.remote() for actor in self.all()]))

    def replacement(self, slot: int, error: Exception) -> Any | None:
        """A new actor, to be `put` in the place of one that died with `error` or must not go on, which is killed.

        None where its node is gone and there is no other place: then the slot has been given to an actor that others
        have as well. Raises WorkersLost when there is none.
        """
        owner = self._owner(slot)
        # It may be alive, at work for too long or in want of memory, and holds what the new one needs.
        ray.kill(self._actors[slot])
        actor = self._another(owner) if self._placement.move(owner) else None
        if actor is not None:
            return actor
        others = [s for s in range(self.slots) if s not in self._homeless | {owner} and self._placement.holds(s)]
        # Asked again, since its node may have died only just now.
        if not others or self._placement.holds(owner):
            raise WorkersLost(
                f"a client actor died and could not be replaced: {first_line(error)}\n"
                "What was going on is interrupted. The same command continues after the last finished round."
            ) from error
        self._homeless.add(owner)
        self.put(slot, self._actors[others[owner % len(others)]])
        return None

    def put(self, slot: int, actor: Any) -> None:
        """Let an actor serve a slot and all others that had the same one so far."""
        before = self._actors[slot]
        self._actors = [actor if a is before else a for a in self._actors]

    def release(self) -> None:
        """Kill the actors and give up what was reserved for them."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._placement.close()

    def _owner(self, slot: int) -> int:
        """The slot at whose place the actor of a slot was started."""
        return next(s for s, a in enumerate(self._actors) if a is self._actors[slot] and s not in self._homeless)

    def _start(self, slot: int) -> Any:
        options = self._placement.options(slot)
        memory_cap = None
        if self.gpu_fraction > 0:
            memory_cap = self._config.memory_cap
            options |= gpu_options(self._config.deterministic)
        return ray.remote(ClientActor).options(max_restarts=0, **options).remote(self._config.threads, memory_cap)

    def _await_start(self, answers: Sequence[Any]) -> None:
        deadline = monotonic() + self._config.startup_timeout_s
        try:
            for slot, answer in enumerate(answers):
                try:
                    ray.get(answer, timeout=max(0.0, deadline - monotonic()))
                except RayActorError:
                    # Processes that load large libraries at the same moment have been seen to fail in that, rarely.
                    self._actors[slot] = again = self._start(slot)
                    ray.get(again.pid.remote(), timeout=max(0.0, deadline - monotonic()))
        except GetTimeoutError as error:
            # Read first: what is killed counts as free.
            shortage = self._placement.shortage(self._config.startup_timeout_s)
            self.release()
            raise BadInput(shortage) from error
        except RayError as error:
            self.release()
            raise BadInput(
                f"execution: client actors cannot start: {first_line(error)}\n"
                "On a cluster, the same version of fedsir must be installed on every node; see `fedsir doctor`."
            ) from error

    def _another(self, slot: int) -> Any | None:
        """A new actor at the place of a slot, None where it cannot be started.

        Tried again, as long as a start may take, where Ray's memory monitor kills it: that takes the youngest first, so
        as long as others want the memory the new one is the next.
        """
        deadline = monotonic() + self._config.startup_timeout_s
        while True:
            actor = self._start(slot)
            try:
                ray.get(actor.pid.remote(), timeout=max(0.0, deadline - monotonic()))
                return actor
            except (GetTimeoutError, ActorUnschedulableError, *LOST) as error:
                ray.kill(actor)
                if not isinstance(error, OutOfMemoryError) or monotonic() + MEMORY_PAUSE_S > deadline:
                    return None
                if self.stopping.wait(MEMORY_PAUSE_S):
                    return None


def _per_gpu(config: ExecutionConfig, demand: Demand | None, nodes: list[Node]) -> int | None:
    """Actors that are measured to fit on one GPU, where that is asked for and there are GPUs."""
    if config.gpus_per_client != "auto" or config.device == "cpu" or all(node.gpus < 1 for node in nodes):
        return None
    if demand is None:
        raise ValueError("gpus_per_client is auto: the pool must know what clients demand of a GPU")
    return measure(demand, nodes, config.startup_timeout_s).actors_per_gpu()
