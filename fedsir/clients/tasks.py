"""Client tasks: pure functions of (broadcast arrays, client state, observed data, seed).

A task is a small frozen dataclass; calling it does the work. Its result separates what the client uploads
(`update`) from what stays with the client until its next task (`state`); the coordinator carries both, so that
any actor can serve any client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.clients.runtime import Client
from fedsir.clients.training import LocalUpdate, Recipe, forward, train_locally
from fedsir.models.flat import FlatWeights

U_co = TypeVar("U_co", covariant=True)
Broadcast = Mapping[str, Any]
"""Values sent to every client of one dispatch, put into the object store once."""


@dataclass(frozen=True)
class ClientResult(Generic[U_co]):
    """`update` goes to the server; `state` belongs to the client and only travels with its next task."""

    update: U_co
    state: Any = None


class ClientTask(Protocol[U_co]):
    """Work for one client; must be picklable."""

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[U_co]:
        """Do the work with the client's runtime."""
        ...


@dataclass(frozen=True)
class LocalTraining:
    """Train from broadcast `weights` under `labels` (n,) int64; `teacher` names the broadcast teacher weights."""

    labels: NDArray[np.int64]
    recipe: Recipe
    teacher: str = "weights"

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[LocalUpdate]:
        weights: FlatWeights = broadcast["weights"]
        return ClientResult(train_locally(client, weights, self.labels, self.recipe, broadcast[self.teacher]))


@dataclass(frozen=True)
class PredictTest:
    """Logits (stop - start, C) float32 of the broadcast `weights` on held-out images; no client's data is used."""

    start: int
    stop: int

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[NDArray[np.float32]]:
        client.runtime.binding.load(broadcast["weights"])
        with client.timing_data():
            images = client.runtime.test_images(self.start, self.stop)
        return ClientResult(forward(client, images, "logits").cpu().numpy())


@dataclass(frozen=True)
class PredictTestPrivately:
    """Logits (N, C) float32 of one client's `model` on all held-out images, in (start, stop) `shards`."""

    model: FlatWeights
    shards: Sequence[tuple[int, int]]

    def __call__(self, client: Client, broadcast: Broadcast) -> ClientResult[NDArray[np.float32]]:
        model = {**broadcast, "weights": self.model}
        return ClientResult(np.concatenate([PredictTest(a, b)(client, model).update for a, b in self.shards]))


def nbytes(value: Any) -> int:
    """Bytes of all arrays inside nested dataclasses, mappings and sequences."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(nbytes(v) for v in value.values())
    if isinstance(value, (tuple, list)):
        return sum(nbytes(v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return sum(nbytes(getattr(value, f)) for f in value.__dataclass_fields__)
    return 0
