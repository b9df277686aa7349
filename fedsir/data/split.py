"""Patient-level, label-stratified division of a cohort into train and test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ATTEMPTS = 100


def split_patients(
    labels: NDArray[np.int64], patients: NDArray[np.int64], test_fraction: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """(N,) bool, true where an image belongs to test; a patient is never divided.

    labels, patients: (N,) int64 of the images. `test_fraction` is of the patients. A patient counts for the
    rarest class (by patients) among their images; of each class's patients the fraction is drawn, rounded to
    whole patients but at least one on each side where there are two. Patients with several labels can still
    leave a class out of one side; the draw is then repeated. Where no draw helps, the last one is returned.

    Depends on the order of patient indices and not on the order of images.
    """
    ids, patient_of = np.unique(patients, return_inverse=True)
    classes, label_of = np.unique(labels, return_inverse=True)
    has = np.zeros((len(ids), len(classes)), dtype=bool)
    has[patient_of, label_of] = True
    by_rarity = np.argsort(has.sum(axis=0), kind="stable")
    stratum = by_rarity[np.argmax(has[:, by_rarity], axis=1)]
    in_test = np.zeros(len(ids), dtype=bool)
    for _ in range(_ATTEMPTS):
        in_test = _draw(stratum, test_fraction, rng)
        if has[in_test].any(axis=0).all() and has[~in_test].any(axis=0).all():
            break
    return np.asarray(in_test[patient_of], dtype=np.bool_)


def _draw(stratum: NDArray[np.int64], fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    in_test = np.zeros(len(stratum), dtype=np.bool_)
    for value in np.unique(stratum):
        members = rng.permutation(np.flatnonzero(stratum == value))
        n = len(members)
        wanted = int(np.floor(fraction * n + 0.5))
        if n >= 2:
            wanted = min(max(wanted, 1), n - 1)
        in_test[members[:wanted]] = True
    return in_test
