"""Lesions as lists of geometric bodies, and what they do to the profiles of a scan.

A body is a row of numbers in mm (x from the fovea, y out of the scan's plane). Bodies belong to the patient;
a scan sees those near its plane, the small ones as a changing subset.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedsir.data.phantom.anatomy import FIELD_MM

Rows = NDArray[np.float64]


def _none(columns: int) -> Rows:
    return np.zeros((0, columns))


@dataclass(frozen=True)
class Lesions:
    """All bodies of a patient, or the part that one scan sees.

    domes: (n, 4) x, y, radius, height of RPE elevations, filled with brightness
    `filling`.
    fluid: (n, 4) the same for subretinal fluid. swelling: (n, 4) x, y, radius, relative gain of INL and ONL.
    atrophy: (n, 4) x, y, radius, strength 0..1 of the loss of ellipsoid zone and RPE.
    cysts: (n, 4) x, place between ILM (0) and ellipsoid zone (1), half width, half height.
    foci: (n, 4) x, place, radius, brightness of hyperreflective dots.
    """

    domes: Rows = field(default_factory=lambda: _none(4))
    filling: float = 0.4
    fluid: Rows = field(default_factory=lambda: _none(4))
    swelling: Rows = field(default_factory=lambda: _none(4))
    atrophy: Rows = field(default_factory=lambda: _none(4))
    cysts: Rows = field(default_factory=lambda: _none(4))
    foci: Rows = field(default_factory=lambda: _none(4))

    def seen(self, rng: np.random.Generator) -> Lesions:
        """The bodies as one scan meets them: small ones come and go, the sizes of all vary a little."""
        return replace(
            self,
            domes=_vary(rng, self.domes, keep=1.0),
            fluid=_vary(rng, self.fluid, keep=1.0),
            cysts=_vary(rng, self.cysts, keep=0.75),
            foci=_vary(rng, self.foci, keep=0.6),
        )


def _vary(rng: np.random.Generator, rows: Rows, keep: float) -> Rows:
    n = len(rows)
    if n == 0:
        return rows
    visible = rng.random(n) < keep
    visible[0] = True
    changed = rows.copy()
    changed[:, 0] += rng.normal(0.0, 0.06, n)
    changed[:, 2:] *= np.exp(rng.normal(0.0, 0.1, (n, 2)))
    return changed[visible]


def mounds(x: NDArray[np.float64], plane: float, rows: Rows) -> NDArray[np.float64]:
    """(W,) height over the scan of bodies (x, y, radius, height) with rounded tops; the tallest counts."""
    if len(rows) == 0:
        return np.zeros_like(x)
    r2 = ((x[None, :] - rows[:, 0:1]) ** 2 + (plane - rows[:, 1:2]) ** 2) / rows[:, 2:3] ** 2
    shape: NDArray[np.float64] = rows[:, 3:4] * np.exp(-(r2**1.5))
    height: NDArray[np.float64] = shape.max(axis=0)
    return height


def plateau(x: NDArray[np.float64], plane: float, rows: Rows) -> NDArray[np.float64]:
    """(W,) 0..1 strength of bodies (x, y, radius, strength), flat inside a soft border of 0.1 mm."""
    if len(rows) == 0:
        return np.zeros_like(x)
    r = np.sqrt((x[None, :] - rows[:, 0:1]) ** 2 + (plane - rows[:, 1:2]) ** 2)
    flat: NDArray[np.float64] = rows[:, 3:4] * np.clip((rows[:, 2:3] - r) / 0.1 + 0.5, 0.0, 1.0)
    strength: NDArray[np.float64] = flat.max(axis=0)
    return strength


def smooth(profile: NDArray[np.float64], sigma_mm: float) -> NDArray[np.float64]:
    """(W,) lateral Gaussian average: how an elevation is passed on to layers further in."""
    sigma = sigma_mm * len(profile) / FIELD_MM
    half = max(1, int(np.ceil(2.0 * sigma)))
    kernel = np.exp(-0.5 * (np.arange(-half, half + 1) / max(sigma, 0.3)) ** 2)
    padded = np.pad(profile, half, mode="edge")
    return np.convolve(padded, kernel / kernel.sum(), mode="valid")
