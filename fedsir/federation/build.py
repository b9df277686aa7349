"""Build the federation of a run: who holds what, who is noisy, which labels are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.config.federation import FederationConfig
from fedsir.errors import BadInput
from fedsir.federation.clean_clients import CleanClients, covering_clean_clients, random_clean_clients
from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.federation.noise import corrupt_labels, transitions
from fedsir.federation.partition import Partition, dirichlet_partition, site_partition
from fedsir.seeding import Stream, generator

MAX_AUTO_POOL = 512
"""Images that RHFL and FedNed get for their public pool where the training set allows it."""


def build_federation(
    labels: NDArray[np.int64],
    patients: NDArray[np.int64] | None,
    class_names: Sequence[str],
    config: FederationConfig,
    seed: int,
    sites: Sequence[str] | None = None,
) -> tuple[Federation, Truth, FederationFacts]:
    """Deal the images, choose clean clients and corrupt the labels of the others.

    labels: (N,) int64 true classes; patients: (N,) int64 or None; sites: N names, for partition variant `site`.
    Public pool, partition, choice of clean clients and noise of each client have independent random streams: the
    partition does not depend on clean clients or noise, nor the clean clients on the noise, nor one client's noise on
    another's. With noise type `none` nothing is drawn and nobody is noisy; with ratio 0 the noisy clients are named
    but keep every label.

    Raises BadInput for labels outside the classes, partitions that cannot exist and label maps that do not
    fit.
    """
    names = tuple(class_names)
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= len(names):
        raise BadInput(f"training labels must be class indices 0..{len(names) - 1}, and there must be some.")
    table = transitions(config.noise, names)
    pool, dealt = public_pool(len(labels), config.public_pool, generator(seed, Stream.PUBLIC_POOL))
    if config.partition.variant == "site":
        partition = site_partition(None if sites is None else [sites[i] for i in dealt], config.clients)
    else:
        rng = generator(seed, Stream.PARTITION)
        owners = None if patients is None else patients[dealt]
        partition = dirichlet_partition(labels[dealt], len(names), config.clients, config.partition, rng, owners)
    indices = tuple(dealt[i] for i in partition.indices)
    true_labels = tuple(labels[i].astype(np.int64) for i in indices)
    chosen = _clean_clients(true_labels, names, config, seed)
    observed = tuple(
        y.copy()
        if chosen.clean[k]
        else corrupt_labels(y, table, config.noise.ratio, config.noise.rounding, generator(seed, Stream.NOISE, k))
        for k, y in enumerate(true_labels)
    )
    federation = Federation(class_names=names, indices=indices, observed=observed, public_pool=pool)
    truth = Truth(labels=true_labels, noisy=~chosen.clean)
    return federation, truth, FederationFacts(partition.redraws, _notes(partition, chosen, federation, truth))


def public_pool(
    images: int, demand: int | Literal["auto"], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted positions of the pool and of the images left to deal, from a training set of `images`.

    The pool is set aside before the partition and whatever the method, so that all methods of a condition have the
    same clients. `auto` is 1 % of the images and at most 512. Raises BadInput when nothing would be left.
    """
    size = min(MAX_AUTO_POOL, images // 100) if demand == "auto" else demand
    if size >= images:
        raise BadInput(
            f"federation.public_pool is {size}, but there are only {images} training images.\n"
            "Remedy: a smaller pool, 0 for none, or auto."
        )
    order = rng.permutation(images).astype(np.int64)
    return np.sort(order[:size]), np.sort(order[size:])


def _clean_clients(
    true_labels: Sequence[NDArray[np.int64]], names: tuple[str, ...], config: FederationConfig, seed: int
) -> CleanClients:
    if config.noise.type == "none":
        return CleanClients(np.ones(config.clients, dtype=np.bool_), ())
    rng = generator(seed, Stream.CLEAN_CLIENTS)
    if config.clean_selection == "random":
        return random_clean_clients(config.clients, config.clean_clients, rng)
    counts = np.stack([np.bincount(y, minlength=len(names)) for y in true_labels]).astype(np.int64)
    return covering_clean_clients(counts, config.clean_clients, config.cover_min_per_class, names, rng)


def _notes(partition: Partition, chosen: CleanClients, federation: Federation, truth: Truth) -> tuple[str, ...]:
    notes = list(chosen.notes)
    if partition.redraws:
        notes.append(f"the partition was redrawn {partition.redraws} times until no client was too small.")
    intact = [
        k for k in np.flatnonzero(truth.noisy).tolist() if np.array_equal(federation.observed[k], truth.labels[k])
    ]
    if intact:
        notes.append(
            f"{len(intact)} noisy clients hold no wrong label (clients {', '.join(map(str, intact))}): "
            f"nothing in their data can give them away."
        )
    return tuple(notes)
