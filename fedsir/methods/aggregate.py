"""Turning client updates into the next global state; shared by the methods."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedsir.aggregation import distance_aware_mean, is_finite, weighted_mean
from fedsir.clients.training import LocalUpdate
from fedsir.methods.base import Server
from fedsir.models.flat import FlatWeights

Updates = Mapping[int, LocalUpdate]
"""Local updates by client id, in client order."""


def average(
    server: Server, updates: Updates, previous: FlatWeights, trust: NDArray[np.float64] | None = None
) -> FlatWeights:
    """Sample-weighted mean of the updates (FedAvg), or `previous` when none is usable.

    trust: (K,) factors on the clients' sample counts, by client id.
    """
    states, sizes = _states_and_sizes(server, updates)
    factors = np.ones(len(states)) if trust is None else trust[list(updates)]
    mean = weighted_mean(states, factors * sizes)
    return _or_previous(server, mean, previous)


def distance_aware_average(
    server: Server, updates: Updates, clean: NDArray[np.bool_], previous: FlatWeights, include_buffers: bool
) -> FlatWeights:
    """Distance-aware mean (DaAgg, eq. 35-39) with `clean` (K,) bool, or `previous` when nothing is usable."""
    states, sizes = _states_and_sizes(server, updates)
    trusted = np.array([clean[k] for k in updates], dtype=np.bool_)
    aggregate = distance_aware_mean(server.schema, states, sizes, trusted, include_buffers)
    return _or_previous(server, aggregate.state if aggregate else None, previous)


def _states_and_sizes(server: Server, updates: Updates) -> tuple[list[FlatWeights], list[int]]:
    for client, update in updates.items():
        if not is_finite(update.weights):
            server.note(f"client {client} returned non-finite weights and was left out of the average")
    return [u.weights for u in updates.values()], [u.samples for u in updates.values()]


def _or_previous(server: Server, mean: FlatWeights | None, previous: FlatWeights) -> FlatWeights:
    if mean is None:
        server.note("no client returned a usable update; the global model stays as it was")
        return previous
    return mean
