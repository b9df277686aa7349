"""Deal the training images to clients: class-wise Dirichlet partition, or by site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsir.config.federation import PartitionConfig
from fedsir.errors import BadInput


@dataclass(frozen=True)
class Partition:
    """indices: K arrays (n_k,) int64, sorted, disjoint, together all images. redraws: draws thrown away."""

    indices: tuple[NDArray[np.int64], ...]
    redraws: int


def site_partition(sites: Sequence[str] | None, clients: int) -> Partition:
    """Real sites as clients, in the order of their names; `sites`: N names, or None where the data set has none.

    Raises BadInput where the images name no sites, or others than `clients` of them.
    """
    if sites is None:
        raise BadInput(
            "federation.partition.variant is site, but the images name no sites.\n"
            "Remedy: data.source: cohort with a manifest that has a column site, or variant: multinomial."
        )
    names = site_names(sites)
    if len(names) != clients:
        raise BadInput(
            f"federation.clients is {clients}, but the training images come from {len(names)} "
            f"site{'s' * (len(names) != 1)}: {', '.join(names[:20])}{', ...' * (len(names) > 20)}.\n"
            f"Remedy: federation.clients: {len(names)}."
        )
    _, owner = np.unique(np.array(sites), return_inverse=True)
    return Partition(tuple(np.flatnonzero(owner == k).astype(np.int64) for k in range(clients)), redraws=0)


def site_names(sites: Sequence[str]) -> tuple[str, ...]:
    """Distinct sites in the order in which they become clients."""
    return tuple(str(name) for name in np.unique(np.array(sites)))


def dirichlet_partition(
    labels: NDArray[np.int64],
    num_classes: int,
    clients: int,
    config: PartitionConfig,
    rng: np.random.Generator,
    patients: NDArray[np.int64] | None = None,
) -> Partition:
    """Per class c draw shares rho_c ~ Dirichlet(alpha 1_K) and deal the class by them; redraw small clients.

    labels, patients: (N,) int64. `multinomial` deals every unit on its own with probabilities rho_c; `split`
    cuts the shuffled class at the cumulated shares. A unit is an image or a patient; a patient belongs to the
    class of most of its images (the lower class on a tie) and takes all its images along.

    Raises BadInput when the demand for `min_client_size` images per client cannot be met at all, or was not
    met within `max_redraws` draws.
    """
    unit_of_image, unit_class = _units(labels, num_classes, config, patients)
    _refuse_impossible(len(labels), len(unit_class), clients, config)
    images_of_unit = np.bincount(unit_of_image, minlength=len(unit_class))
    best = 0
    for redraws in range(config.max_redraws + 1):
        owner = _draw_owners(unit_class, num_classes, clients, config, rng)
        sizes = np.bincount(owner, weights=images_of_unit, minlength=clients)
        if sizes.min() >= config.min_client_size:
            client_of_image = owner[unit_of_image]
            indices = tuple(np.flatnonzero(client_of_image == k).astype(np.int64) for k in range(clients))
            return Partition(indices, redraws)
        best = max(best, int(sizes.min()))
    raise BadInput(
        f"federation.partition: in {config.max_redraws + 1} draws with alpha = {config.alpha:g} the "
        f"{len(labels)} training images never gave each of the {clients} clients at least "
        f"{config.min_client_size} (the best draw left its smallest client with {best}).\n"
        f"Remedy: a larger alpha, fewer federation.clients, a smaller federation.partition.min_client_size "
        f"(for example {max(best, 1)}), more images, or more federation.partition.max_redraws."
    )


def _refuse_impossible(images: int, units: int, clients: int, config: PartitionConfig) -> None:
    needed = clients * config.min_client_size
    if needed > images:
        smaller = f"federation.partition.min_client_size at most {images // clients}, or " if images >= clients else ""
        raise BadInput(
            f"federation.partition: {clients} clients with at least {config.min_client_size} images each "
            f"need {needed} training images, there are {images} (alpha = {config.alpha:g}).\n"
            f"Remedy: at most {images // config.min_client_size} federation.clients, or {smaller}more images."
        )
    if clients > units:
        raise BadInput(
            f"federation.partition: unit is {config.unit} and {units} of them cannot fill {clients} clients "
            f"with at least {config.min_client_size} of the {images} images each "
            f"(alpha = {config.alpha:g}).\n"
            f"Remedy: at most {units} federation.clients, or federation.partition.unit: image."
        )


def _units(
    labels: NDArray[np.int64], num_classes: int, config: PartitionConfig, patients: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Unit of every image (N,) and class of every unit (U,)."""
    if config.unit == "image":
        return np.arange(len(labels), dtype=np.int64), labels
    if patients is None:
        raise BadInput("federation.partition.unit: patient needs patient ids, and this data set has none.")
    names, unit_of_image = np.unique(patients, return_inverse=True)
    votes = np.zeros((len(names), num_classes), dtype=np.int64)
    np.add.at(votes, (unit_of_image, labels), 1)
    return unit_of_image.astype(np.int64), votes.argmax(axis=1).astype(np.int64)


def _draw_owners(
    unit_class: NDArray[np.int64],
    num_classes: int,
    clients: int,
    config: PartitionConfig,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """(U,) int64 client of every unit."""
    owner = np.empty(len(unit_class), dtype=np.int64)
    for c in range(num_classes):
        members = np.flatnonzero(unit_class == c)
        shares = rng.dirichlet(np.full(clients, config.alpha))
        if config.variant == "multinomial":
            # Multinomial counts dealt to a shuffled class have the law of independent draws per unit.
            counts = rng.multinomial(len(members), shares)
        else:
            cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            counts = np.diff(np.concatenate([[0], np.minimum(cuts, len(members)), [len(members)]]))
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
    return owner
