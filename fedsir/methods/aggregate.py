"""Turning client updates into the next global state; shared by the methods.

`SampleMean` and `DistanceAwareMean` take updates one after the other, in client order (`Server.fold_clients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsir.aggregation import RunningMean, distance_aware_mean, distance_aware_weights, is_finite
from fedsir.clients.training import LocalUpdate
from fedsir.methods.base import Server
from fedsir.models.flat import FlatWeights

Updates = Mapping[int, LocalUpdate]
"""Local updates by client id, in client order."""


class Mean(Protocol):
    """An average of updates that come one after the other, in client order."""

    def add(self, client: int, update: LocalUpdate) -> None:
        """Take an update in."""
        ...

    def result(self, previous: FlatWeights) -> FlatWeights:
        """The average, or `previous` when no update is usable; notes tell who was left out."""
        ...


class _WeightedMean:
    """Mean with (client id: weight) for updates of clients who trained on all of their images."""

    def __init__(self, server: Server, weights: Mapping[int, float]) -> None:
        self._server = server
        self._sizes = server.federation.sizes
        self._weights = weights
        self._mean = RunningMean(list(weights.values()))
        self._diverged: list[int] = []

    def add(self, client: int, update: LocalUpdate) -> None:
        """See `Mean`."""
        # 1, or 0 where training failed.
        done = update.samples / max(1, int(self._sizes[client]))
        weight = self._weights[client] * done
        if not is_finite(update.weights):
            self._diverged.append(client)
        elif weight > 0:
            self._mean.include(update.weights, weight)

    def result(self, previous: FlatWeights) -> FlatWeights:
        """See `Mean`; without any client, `previous`."""
        if not self._weights:
            return previous
        _note_diverged(self._server, self._diverged)
        return _or_previous(self._server, self._mean.result(), previous)


class SampleMean(_WeightedMean):
    """Sample-weighted mean (FedAvg); keeps a sum and no update."""

    def __init__(self, server: Server, clients: Iterable[int], trust: NDArray[np.float64] | None = None) -> None:
        """clients: whose updates will come. trust: (K,) factors on the clients' sample counts, by client id."""
        ids = list(clients)
        factors = np.ones(len(ids)) if trust is None else trust[ids]
        weights = factors * server.federation.sizes[ids]
        super().__init__(server, dict(zip(ids, weights.tolist(), strict=True)))


class DistanceAwareMean:
    """Distance-aware mean (DaAgg, eq. 35-39); keeps every update, whose weight depends on all of them.

    Where the clients are all clean or all noisy it is the sample-weighted mean, and keeps none.
    """

    def __init__(
        self, server: Server, clients: Iterable[int], clean: NDArray[np.bool_], include_buffers: bool = False
    ) -> None:
        """clients: whose updates will come. clean: (K,) bool, by client id."""
        ids = list(clients)
        self._server = server
        self._clean = clean
        self._include_buffers = include_buffers
        self._kept: dict[int, LocalUpdate] = {}
        self._plain: _WeightedMean | None = None
        if len(np.unique(clean[ids])) < 2:
            shares = distance_aware_weights(server.federation.sizes[ids], np.zeros(len(ids)))
            self._plain = _WeightedMean(server, dict(zip(ids, shares.tolist(), strict=True)))

    def add(self, client: int, update: LocalUpdate) -> None:
        """See `Mean`."""
        if self._plain is not None:
            self._plain.add(client, update)
        else:
            self._kept[client] = update

    def result(self, previous: FlatWeights) -> FlatWeights:
        """See `Mean`."""
        if self._plain is not None:
            return self._plain.result(previous)
        _note_diverged(self._server, [k for k, u in self._kept.items() if not is_finite(u.weights)])
        aggregate = distance_aware_mean(
            self._server.schema,
            [u.weights for u in self._kept.values()],
            [u.samples for u in self._kept.values()],
            self._clean[list(self._kept)],
            self._include_buffers,
        )
        return _or_previous(self._server, aggregate.state if aggregate else None, previous)


def average(
    server: Server, updates: Updates, previous: FlatWeights, trust: NDArray[np.float64] | None = None
) -> FlatWeights:
    """`SampleMean` of updates that are all there."""
    mean = SampleMean(server, updates, trust)
    for client, update in updates.items():
        mean.add(client, update)
    return mean.result(previous)


def _note_diverged(server: Server, clients: Iterable[int]) -> None:
    for client in clients:
        server.note(f"client {client} returned non-finite weights and was left out of the average")


def _or_previous(server: Server, mean: FlatWeights | None, previous: FlatWeights) -> FlatWeights:
    if mean is not None:
        return mean
    server.note("no client returned a usable update; the global model stays as it was")
    return previous
