"""The three cohorts: their classes, the share of each class, and what lesions a patient of a class carries.

Within a class the lesion load runs from hard to see to obvious, and neighbouring classes share small findings
(druplets in normal eyes, a few cysts beside a neovascular membrane), so that no single pixel pattern decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsir.data.phantom.lesions import Lesions, Rows
from fedsir.seeding import Stream, generator

Rng = np.random.Generator


@dataclass(frozen=True)
class Cohort:
    """How a cohort is made.

    code: its place in the seed address. block: the classes of consecutive patients, shuffled block by block,
    so proportions hold in every prefix and a longer cohort extends a shorter one. draw: the lesions of a
    patient of a class.
    """

    code: int
    class_names: tuple[str, ...]
    block: tuple[int, ...]
    draw: Callable[[Rng, int], Lesions]


def _between(load: float, low: float, high: float) -> float:
    """Geometric interpolation: equal steps of load are equal ratios of size."""
    return float(low * (high / low) ** load)


def _cysts(rng: Rng, count: int, load: float, centre: float, spread: float) -> Rows:
    width = _between(load, 0.09, 0.24) * np.exp(rng.normal(0.0, 0.35, count))
    return np.column_stack(
        [
            rng.normal(centre, spread, count),
            np.where(rng.random(count) < 0.5, rng.uniform(0.42, 0.56, count), rng.uniform(0.68, 0.86, count)),
            width,
            np.minimum(width * rng.uniform(0.22, 0.42, count), 0.085),
        ]
    )


def _foci(rng: Rng, count: int) -> Rows:
    return np.column_stack(
        [
            rng.normal(0.0, 1.2, count),
            rng.uniform(0.3, 0.9, count),
            rng.uniform(0.008, 0.015, count),
            rng.uniform(0.7, 0.95, count),
        ]
    )


def _domes(rng: Rng, count: int, radius: float, height: float, spread: float) -> Rows:
    scale = np.exp(rng.normal(0.0, 0.3, count))
    return np.column_stack(
        [rng.normal(0.0, spread, count), rng.normal(0.0, 0.12, count), radius * scale, height * scale],
    )


def _druplets(rng: Rng) -> Rows:
    count = int(rng.integers(0, 3))
    return _domes(rng, count, 0.1, 0.009, 1.2)


def _neovascular(rng: Rng) -> Lesions:
    load = float(rng.random())
    centre = float(rng.normal(0.0, 0.5))
    radius = _between(load, 0.4, 0.95)
    height = _between(float(np.clip(load + rng.normal(0.0, 0.2), 0.0, 1.0)), 0.07, 0.2)
    lobes = int(rng.integers(2, 5))
    mass = np.column_stack(
        [
            centre + radius * rng.uniform(-0.7, 0.7, lobes),
            rng.normal(0.0, 0.1, lobes),
            radius * rng.uniform(0.4, 0.8, lobes),
            height * rng.uniform(0.5, 1.0, lobes),
        ]
    )
    mass[0] = centre, 0.0, radius, height
    pools = 1 if rng.random() < 0.7 else 2
    fluid = np.column_stack(
        [
            centre + radius * rng.uniform(-1.2, 1.2, pools),
            np.zeros(pools),
            radius * rng.uniform(0.6, 1.3, pools),
            _between(load, 0.035, 0.14) * rng.uniform(0.7, 1.2, pools),
        ]
    )
    return Lesions(
        domes=mass,
        filling=float(rng.uniform(0.45, 0.68)),
        fluid=fluid,
        atrophy=np.array([[centre, 0.0, radius, rng.uniform(0.0, 0.4)]]),
        cysts=_cysts(rng, int(rng.integers(0, 3)), 0.3, centre, radius),
        foci=_foci(rng, int(rng.integers(0, 4))),
    )


def _oedema(rng: Rng, load: float, count: int) -> Lesions:
    centre = float(rng.normal(0.0, 0.5))
    pool = np.array([[centre, 0.0, 0.6, _between(load, 0.02, 0.09)]])
    return Lesions(
        domes=_druplets(rng),
        fluid=pool if rng.random() < 0.3 * load else np.zeros((0, 4)),
        swelling=np.array([[centre, 0.0, rng.uniform(0.8, 1.6), _between(load, 0.25, 0.9)]]),
        cysts=_cysts(rng, count, load, centre, 0.55),
        foci=_foci(rng, int(rng.integers(1, 7))),
    )


def _kermany(rng: Rng, label: int) -> Lesions:
    if label == 0:
        return _neovascular(rng)
    load = float(rng.random())
    if label == 1:
        return _oedema(rng, load, 3 + int(rng.integers(0, 3) + 6 * load))
    if label == 2:
        count = 3 + int(rng.integers(0, 7))
        return Lesions(
            domes=_domes(rng, count, _between(load, 0.14, 0.3), _between(load, 0.038, 0.09), 0.9),
            filling=float(rng.uniform(0.32, 0.5)),
            foci=_foci(rng, int(rng.integers(0, 2))),
        )
    return Lesions(domes=_druplets(rng), foci=_foci(rng, int(rng.integers(0, 2))))


def _uic(rng: Rng, label: int) -> Lesions:
    # One latent severity runs through all four classes; each class is a stretch of it.
    severity = label + float(rng.uniform(-0.27, 0.27))
    if severity < 0.4:
        return Lesions(domes=_druplets(rng), foci=_foci(rng, int(rng.integers(0, 2))))
    load = (severity - 0.5) / 3.0
    centre = float(rng.normal(0.0, 0.4))
    cysts = 1 + round(6.0 * load) + int(rng.poisson(1.0))
    return Lesions(
        domes=_druplets(rng),
        fluid=np.array([[centre, 0.0, 0.6, 0.08 * load]]) if rng.random() < load - 0.5 else np.zeros((0, 4)),
        swelling=np.array([[centre, 0.0, rng.uniform(1.0, 1.6), 0.1 + 1.1 * load]]),
        cysts=_cysts(rng, cysts, load, centre, 0.6),
        foci=_foci(rng, 3 + int(rng.poisson(12.0 * load))),
    )


def _wake_forest(rng: Rng, label: int) -> Lesions:
    # Drusen occur on both sides: the absence of tissue decides, not its elevation.
    load = float(rng.random())
    drusen = _domes(rng, int(rng.integers(0, 6)), _between(load, 0.1, 0.25), _between(load, 0.02, 0.06), 1.1)
    filling = float(rng.uniform(0.32, 0.5))
    if label == 1:
        faint = np.array([[rng.normal(0.0, 0.6), 0.0, rng.uniform(0.1, 0.4), rng.uniform(0.0, 0.12)]])
        return Lesions(domes=drusen, filling=filling, atrophy=faint)
    patches = 1 + int(rng.random() < 0.4)
    size = _between(float(rng.random()), 0.3, 1.6)
    atrophy = np.column_stack(
        [
            rng.normal(0.0, 0.6, patches),
            rng.normal(0.0, 0.05, patches),
            size * rng.uniform(0.6, 1.0, patches),
            rng.uniform(0.6, 1.0, patches),
        ]
    )
    atrophy[0, 2] = size
    return Lesions(domes=drusen, filling=filling, atrophy=atrophy)


COHORTS: dict[str, Cohort] = {
    "kermany": Cohort(0, ("CNV", "DME", "DRUSEN", "NORMAL"), (0, 1, 2, 3), _kermany),
    "uic": Cohort(1, ("control", "mild", "moderate", "severe"), (0, 1, 2, 3), _uic),
    # 8 of 11 is the cohort's 73 % of geographic atrophy.
    "wake_forest": Cohort(2, ("GA", "NGA"), (0,) * 8 + (1,) * 3, _wake_forest),
}


def patient_label(cohort: Cohort, seed: int, split: int, patient: int) -> int:
    """Class of a patient; does not depend on how many patients there are."""
    block, place = divmod(patient, len(cohort.block))
    # The leading 0 keeps block addresses apart from the patients' own, which start with 1.
    rng = generator(seed, Stream.PHANTOM, 0, cohort.code, split, block)
    return int(rng.permutation(cohort.block)[place])
