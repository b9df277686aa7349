"""A consortium as an audit sees it: images with observed labels, patients and sites; no true labels anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SiteLabels:
    """Labels of N images at K sites.

    labels: (N,) int64 observed classes 0..C-1. sites: (N,) int64 positions in `names`. patients: (N,) int64.
    """

    names: tuple[str, ...]
    num_classes: int
    labels: NDArray[np.int64]
    sites: NDArray[np.int64]
    patients: NDArray[np.int64]

    @property
    def num_sites(self) -> int:
        return len(self.names)

    def counts(self) -> NDArray[np.int64]:
        """(K, C) images per site and observed class."""
        cells = self.sites * self.num_classes + self.labels
        flat = np.bincount(cells, minlength=self.num_sites * self.num_classes)
        return flat.reshape(self.num_sites, self.num_classes).astype(np.int64)

    def patient_counts(self) -> NDArray[np.int64]:
        """(K,) patients per site."""
        return np.array([len(np.unique(self.patients[self.sites == k])) for k in range(self.num_sites)], np.int64)


def homogeneous_split(
    labels: NDArray[np.int64], sites: NDArray[np.int64], patients: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """(N,) sites of a consortium in which no site differs from another but by chance.

    Images are exchanged between sites within each observed class, so that every site keeps its size and its
    number of images of each class. A patient's images of one label stay together as far as the numbers allow (at
    most one patient per class and site is divided): images of one patient resemble each other, and sites with more
    patients than they really have would scatter too little.
    """
    dealt = np.empty_like(sites)
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        _, person = np.unique(patients[members], return_inverse=True)
        turn = rng.permutation(person.max() + 1)[person]
        order = members[np.lexsort((rng.random(len(members)), turn))]
        holders, counts = np.unique(sites[members], return_counts=True)
        seats = rng.permutation(len(holders))
        dealt[order] = np.repeat(holders[seats], counts[seats])
    return dealt


def patient_subsample(
    sites: NDArray[np.int64], patients: NDArray[np.int64], share: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Sorted positions of the images of `share` of each site's patients, at least one patient each."""
    kept = []
    for k in np.unique(sites):
        members = np.flatnonzero(sites == k)
        people = np.unique(patients[members])
        chosen = rng.permutation(people)[: max(1, round(share * len(people)))]
        kept.append(members[np.isin(patients[members], chosen)])
    return np.sort(np.concatenate(kept)).astype(np.int64)
