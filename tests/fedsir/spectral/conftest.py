"""Published results on small synthetic features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsir.spectral.decomposition import ClassSpectrum, class_spectra


@dataclass(frozen=True)
class Golden:
    """One golden file and our spectra of its clients."""

    number: int
    arrays: Mapping[str, NDArray]
    spectra: tuple[tuple[ClassSpectrum | None, ...], ...]

    @property
    def num_classes(self) -> int:
        return len(self.arrays["similarity_0"])


def load(number: int) -> Golden:
    path = Path(__file__).parents[1] / "data_golden" / f"spectral_{number}.npz"
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    classes = len(arrays["similarity_0"])
    clients = range(len(arrays["descriptors"]))
    spectra = tuple(class_spectra(arrays[f"features_{k}"], arrays[f"observed_{k}"], classes) for k in clients)
    return Golden(number, arrays, spectra)


@pytest.fixture(params=[1, 2, 3], scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(request.param)
