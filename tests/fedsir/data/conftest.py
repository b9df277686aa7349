"""Small image files and cohorts, drawn on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

Grey = NDArray[np.uint8]
CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")


def grey_picture(seed: int, height: int = 20, width: int = 30) -> Grey:
    return np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)


@pytest.fixture
def grey() -> Callable[..., Grey]:
    """A (height, width) uint8 picture of a seed."""
    return grey_picture


@pytest.fixture
def save() -> Callable[[Path, int], Path]:
    """Write the picture of a seed as a file of whatever format its name says."""

    def write(path: Path, seed: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey_picture(seed)).save(path)
        return path

    return write


@pytest.fixture
def kermany(tmp_path: Path, save: Callable[[Path, int], Path]) -> Path:
    """A release folder: per class two train patients with two images each and one test patient with one."""
    root = tmp_path / "OCT2017"
    seed = 0
    for offset, name in enumerate(CLASSES):
        files: Iterable[tuple[str, int, int]] = [
            ("train", 100 + offset, 1),
            ("train", 100 + offset, 2),
            ("train", 200 + offset, 1),
            ("train", 200 + offset, 2),
            ("test", 300 + offset, 1),
        ]
        for split, patient, number in files:
            seed += 1
            save(root / split / name / f"{name}-{patient}-{number}.jpeg", seed)
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cohort(tmp_path: Path, save: Callable[[Path, int], Path]) -> Callable[..., Path]:
    """Write a manifest of some columns and rows, and the files that it lists; returns its path."""

    def write(columns: str, rows: Iterable[str], encoding: str = "utf-8") -> Path:
        lines = list(rows)
        for seed, line in enumerate(lines):
            save(tmp_path / line.split(",")[0], 1000 + seed)
        manifest = tmp_path / "cohort.csv"
        manifest.write_text("\n".join([columns, *lines]) + "\n", encoding=encoding)
        return manifest

    return write
