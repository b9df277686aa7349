"""The `fedsir` command, which counts the client tasks it sends and lets one of them go wrong where that is asked for.

FEDSIR_TASKS: a file that grows by one byte with every task sent to an actor, again if it is sent again. FEDSIR_FAULT:
`raise` or `diverge`, what one client does, or `coordinator`, an error in the thread of a run. FEDSIR_FAULT_AFTER: the
number of tasks after which that happens.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.cli import main
from fedsir.clients.executor import Outcome, WorkItem
from fedsir.clients.jobs import Piece
from fedsir.clients.lane import Lane
from fedsir.clients.pool import ActorPool
from fedsir.clients.runtime import Client
from fedsir.clients.tasks import Broadcast, ClientResult
from fedsir.models.flat import FlatWeights

TRAINING = {"LocalTraining", "LearnLabels"}


@dataclass(frozen=True)
class Raising:
    """A client whose work fails."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:  # noqa: ARG002
        raise ArithmeticError("injected")


class Ruined:
    """Reads a trained model out as one whose weights are no numbers."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def read(self) -> FlatWeights:
        weights: FlatWeights = self._binding.read()
        return replace(weights, values=np.full_like(weights.values, np.nan))


@dataclass(frozen=True)
class Diverging:
    """A client whose training ends with weights that are no numbers."""

    inner: Any

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[Any]:
        binding = client.runtime.binding
        client.runtime.binding = Ruined(binding)  # type: ignore[assignment]
        try:
            return self.inner(client, broadcast)  # type: ignore[no-any-return]
        finally:
            client.runtime.binding = binding


class Fault:
    """What goes wrong once, after so many tasks."""

    def __init__(self, kind: str, after: int) -> None:
        self._kind = kind
        self._after = after
        self._seen = 0
        self._lock = threading.Lock()

    def change(self, items: Sequence[WorkItem]) -> Sequence[WorkItem]:
        """The items to run instead of `items`."""
        with self._lock:
            self._seen += len(items)
            if not self._kind or self._seen < self._after or type(items[0].task).__name__ not in TRAINING:
                return items
            kind, self._kind = self._kind, ""
        if kind == "coordinator":
            raise ArithmeticError("injected")
        task = Raising() if kind == "raise" else Diverging(items[-1].task)
        return [*items[:-1], replace(items[-1], task=task)]


def install(tasks: str, fault: Fault) -> None:
    """Count what is sent, and inject the fault."""
    counter = os.open(tasks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    send, run = ActorPool._send, Lane.run

    def counted(pool: ActorPool, slot: int, piece: Piece) -> tuple[Any, Any]:
        os.write(counter, b"." * piece.size)
        return send(pool, slot, piece)

    def changed(lane: Lane, items: Sequence[WorkItem], broadcast: Broadcast) -> list[Outcome]:
        return run(lane, fault.change(items), broadcast)

    ActorPool._send = counted  # type: ignore[method-assign]
    Lane.run = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    install(
        os.environ["FEDSIR_TASKS"],
        Fault(os.environ.get("FEDSIR_FAULT", ""), int(os.environ.get("FEDSIR_FAULT_AFTER", "0"))),
    )
    sys.argv[0] = "fedsir"
    main()
