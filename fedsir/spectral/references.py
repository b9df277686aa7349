"""Class references from the clean clients' spectra: weighted means of projectors (eq. 20-22).

Q numbers: fedsir/CHOICES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsir.config.base import PositiveFloat, PositiveInt, Section
from fedsir.spectral.decomposition import ClassSpectrum, right_singular_vectors


class ReferenceSettings(Section):
    """How references are formed; the defaults are OCT-FedSIR's (Q13, Q15).

    FedSIR: weight n_gap_s1, min_count 100, strength_threshold 0.03; its published code also has basis `filled`.
    """

    kappa: PositiveFloat = Field(default=10.0, description="ratio of dominant to residual spectral mass, eq. 16")
    residual_directions: PositiveInt = Field(default=12, description="L of eq. 19")
    weight: Literal["n", "n_gap_s1"] = "n"
    min_count: PositiveInt = Field(default=20, description="images a provider needs, else the largest provides")
    strength_threshold: PositiveFloat | None = Field(
        default=None, description="below this eigen-gap of the representative mean the largest provides alone"
    )
    basis: Literal["rank", "filled"] = Field(
        default="rank",
        description="residual directions: up to the true rank, or always L, filled up with arbitrary ones",
    )


@dataclass(frozen=True)
class ClassReference:
    """Reference of one class.

    leading: (d,) unit float64. residual: (r, d) orthonormal rows float64, r <= L. providers: positions
    of the clean clients it was formed from. strength: gap between the two largest eigenvalues of the mean
    representative projector, 1 when all providers agree.
    """

    leading: NDArray[np.float64]
    residual: NDArray[np.float64]
    providers: tuple[int, ...]
    strength: float


def class_references(
    spectra: Sequence[Sequence[ClassSpectrum | None]], settings: ReferenceSettings
) -> tuple[ClassReference | None, ...]:
    """One reference per class from the spectra of the clean clients (outer: client, inner: class).

    None for a class that no clean client observed, or without any residual direction: its S_N would be 0 for
    every image and win every comparison. With basis `filled` such a class stays a candidate, as in FedSIR's code.
    """
    if not spectra:
        return ()
    return tuple(class_reference(of_class, settings) for of_class in zip(*spectra, strict=True))


def provider_weight(spectrum: ClassSpectrum, weight: Literal["n", "n_gap_s1"]) -> float:
    """w_{k,c}: image count, in FedSIR's code times (s1 - s2)/s1 times s1/sum(s)."""
    return spectrum.count * (spectrum.gap * spectrum.s1_ratio if weight == "n_gap_s1" else 1.0)


def class_reference(spectra: Sequence[ClassSpectrum | None], settings: ReferenceSettings) -> ClassReference | None:
    """Reference of one class from the spectra of the clean clients, None for those that have not observed it."""
    holders = {k: s for k, s in enumerate(spectra) if s is not None}
    if not holders:
        return None
    # Ties go to the first client; a holder without residual directions cannot provide alone.
    largest = max(holders, key=lambda k: (len(holders[k].residual) > 0, holders[k].count, -k))
    providers = {k: s for k, s in holders.items() if s.count >= settings.min_count}
    if not providers:
        providers = {largest: holders[largest]}
    reference = _mean_reference(providers, settings)
    threshold = settings.strength_threshold
    if threshold is not None and reference is not None and reference.strength < threshold:
        reference = _mean_reference({largest: holders[largest]}, settings)
    return reference


def _mean_reference(providers: dict[int, ClassSpectrum], settings: ReferenceSettings) -> ClassReference | None:
    spectra = list(providers.values())
    weights = np.array([provider_weight(s, settings.weight) for s in spectra])
    if not weights.sum() > 0:  # every gap is 0
        weights = np.array([float(s.count) for s in spectra])
    share = np.sqrt(weights / weights.sum())  # eq. 22
    # sum_k w_k V_k^T V_k / W is the Gram matrix of the stacked rows sqrt(w_k / W) V_k. Their singular vectors
    # are its eigenvectors, without a d x d matrix and without directions beyond its rank (Q15).
    representative = np.stack([w * s.leading for w, s in zip(share, spectra, strict=True)])
    residual = np.concatenate([w * s.residual for w, s in zip(share, spectra, strict=True)])
    values, leading = right_singular_vectors(representative)  # eq. 20
    _, directions = right_singular_vectors(residual)  # eq. 21
    if settings.basis == "filled" and len(residual) > 0:
        # Beyond the rank any basis of the null space is as good as another: it depends on the linear algebra library.
        _, columns = np.linalg.eigh(residual.T @ residual)
        directions = columns[:, ::-1].T
    elif settings.basis == "rank" and len(directions) == 0:
        return None
    second = values[1] if len(values) > 1 else 0.0
    return ClassReference(
        leading=leading[0],
        residual=directions[: settings.residual_directions],
        providers=tuple(providers),
        strength=float(values[0] ** 2 - second**2),
    )
