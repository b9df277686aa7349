"""Choose the clients that keep correct labels (gamma_k = 0, eq. 1); simulator only, from true counts.

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# FedSIR's code asks for 450 images of a class from its clean provider; the share serves smaller data sets.
_COVER_IMAGES = 450
_COVER_SHARE = 0.05


@dataclass(frozen=True)
class CleanClients:
    """clean: (K,) bool. notes: what the user must know about the choice."""

    clean: NDArray[np.bool_]
    notes: tuple[str, ...]


def random_clean_clients(clients: int, wanted: int, rng: np.random.Generator) -> CleanClients:
    """Draw `wanted` of the clients."""
    clean = np.zeros(clients, dtype=np.bool_)
    clean[rng.choice(clients, size=wanted, replace=False)] = True
    return CleanClients(clean, ())


def covering_clean_clients(
    counts: NDArray[np.int64],
    wanted: int,
    min_per_class: int | None,
    class_names: Sequence[str],
    rng: np.random.Generator,
) -> CleanClients:
    """Choose clean clients so that every class has a clean provider (Q25, Q26).

    counts: (K, C) true images per client and class. A provider of a class has at least `min_per_class` of its
    images (default min(450, 5 % of the class)); where no client has that many, the client with the most is
    its provider. Greedily takes the client that provides most of the classes still without a provider, ties
    in random order, then fills up to `wanted` with random others. If the cover alone takes more than `wanted`
    clients, the clean set grows and a note says so. `wanted = 0` means nobody is clean: a set that was asked
    to be empty has nothing to cover.
    """
    num_clients = len(counts)
    clean = np.zeros(num_clients, dtype=np.bool_)
    order = rng.permutation(num_clients)
    if wanted == 0:
        return CleanClients(clean, ())
    provides, notes = _providers(counts, min_per_class, class_names)
    uncovered = provides.any(axis=0)
    while uncovered.any():
        gain = (provides & uncovered).sum(axis=1)
        chosen = order[np.argmax(gain[order])]  # the first of the best in random order
        clean[chosen] = True
        uncovered &= ~provides[chosen]
    covering = int(clean.sum())
    if covering > wanted:
        notes.append(
            f"{covering} clients are clean instead of the {wanted} asked for: it takes that many to give "
            f"every class a clean provider."
        )
    rest = order[~clean[order]]
    clean[rest[: max(wanted - covering, 0)]] = True
    return CleanClients(clean, tuple(notes))


def _providers(
    counts: NDArray[np.int64], min_per_class: int | None, class_names: Sequence[str]
) -> tuple[NDArray[np.bool_], list[str]]:
    """(K, C) bool who may provide which class, and notes on classes that had to settle for less."""
    totals = counts.sum(axis=0)
    if min_per_class is None:
        demand = np.maximum(np.minimum(_COVER_IMAGES, np.floor(_COVER_SHARE * totals)), 1).astype(np.int64)
    else:
        demand = np.full(len(totals), min_per_class, dtype=np.int64)
    notes = []
    largest = counts.max(axis=0)
    for c in np.flatnonzero(largest < demand).tolist():
        if largest[c] == 0:
            notes.append(f"class {class_names[c]} has no training image, so nobody can provide it.")
        else:
            notes.append(
                f"no client has {demand[c]} images of class {class_names[c]}; the largest holder "
                f"({largest[c]} images) counts as its clean provider."
            )
    return (counts >= np.minimum(demand, largest)) & (counts > 0), notes
