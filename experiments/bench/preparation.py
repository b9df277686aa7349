"""Data preparation: image files to the cache, beside Pillow alone on as many threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from experiments.bench.programs import Say
from fedsir.config.data import KermanyData
from fedsir.data.load import load_dataset
from fedsir.data.prepare import preparing_threads

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
SHAPE = (496, 512)
"""Rows and columns of most pictures of the Kermany release."""

SIZE = 128


@dataclass(frozen=True)
class Preparation:
    """Images per second, medians: `fedsir` into an empty cache, and Pillow's decoding and resizing alone.

    share: median over pairs of the first over the second.
    """

    images: int
    threads: int
    prepared: float
    pillow: float
    share: float

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return dict(vars(self))


def preparation(quick: bool, say: Say) -> Preparation:
    """Prepare JPEG files of the usual size several times, in turn with Pillow alone."""
    images, times = (16, 1) if quick else (1500, 5)
    with TemporaryDirectory(prefix="fedsir-bench-") as folder:
        root = Path(folder) / "OCT2017"
        paths = write_pictures(root, images)
        pairs = []
        for number in range(times + 1):
            bare = _seconds_of_pillow(paths)
            ours = _seconds_of_preparing(root, Path(folder) / f"cache-{number}")
            # The first pair has read the files from disk.
            if number:
                pairs.append((ours, bare))
                say(f"preparation {number} of {times}: {100 * bare / ours:.0f} % of Pillow's speed")
    return Preparation(
        images=images,
        threads=preparing_threads(),
        prepared=median(images / ours for ours, _ in pairs),
        pillow=median(images / bare for _, bare in pairs),
        share=median(bare / ours for ours, bare in pairs),
    )


def write_pictures(root: Path, images: int) -> list[Path]:
    """A release folder of JPEG files with layers and speckle; one in eight is for testing."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(images):
        split = "test" if number // len(CLASSES) % 8 == 0 else "train"
        name = CLASSES[number % len(CLASSES)]
        path = root / split / name / f"{name}-{number}-1.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_picture(rng)).save(path, quality=90)
        paths.append(path)
    return paths


def _picture(rng: np.random.Generator) -> NDArray[np.uint8]:
    rows, columns = np.arange(SHAPE[0])[:, None], np.arange(SHAPE[1])[None]
    middle = SHAPE[0] * (0.5 + 0.1 * np.sin(columns / 80 + rng.uniform(0, 6)))
    layers = 140 * np.exp(-(((rows - middle) / 60) ** 2)) * (1 + 0.3 * np.sin((rows - middle) / 7))
    speckle = 20 * rng.gamma(1.0, 1.0, SHAPE)
    return np.clip(layers + speckle, 0, 255).astype(np.uint8)


def _seconds_of_preparing(root: Path, cache: Path) -> float:
    begin = time.perf_counter()
    load_dataset(KermanyData(source="kermany", root=root, image_size=SIZE, cache_dir=cache))
    return time.perf_counter() - begin


def _seconds_of_pillow(paths: list[Path]) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(preparing_threads()) as pool:
        pixels = list(pool.map(partial(_resized, size=SIZE), paths))
    assert len(pixels) == len(paths)
    return time.perf_counter() - begin


def _resized(path: Path, size: int) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))
