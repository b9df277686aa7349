"""What identifies a data set: pixels, labels, patients, sites, order and class names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsir.data.cache import Split
from fedsir.data.dataset import ImageSet


def pixels_sha256(images: NDArray[np.uint8]) -> str:
    """sha256 of the bytes of (N, H, W) images in order, a piece at a time (they may be mapped)."""
    digest = hashlib.sha256()
    for start in range(0, len(images), 1024):
        digest.update(np.ascontiguousarray(images[start : start + 1024]).data)
    return digest.hexdigest()


def dataset_digest(
    class_names: Sequence[str], train: ImageSet, test: ImageSet, pixels: Mapping[Split, str] | None = None
) -> str:
    """sha256 (hex) over both splits; file names do not count.

    `pixels`: sha256 of the two image arrays under "train" and "test" where they are known already.
    """
    content: list[object] = [list(class_names)]
    parts: dict[Split, ImageSet] = {"train": train, "test": test}
    for name, part in parts.items():
        content += [
            list(part.images.shape),
            pixels[name] if pixels is not None else pixels_sha256(part.images),
            _sha256(part.labels),
            _sha256(part.patients),
            list(part.sites) if part.sites is not None else None,
        ]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _sha256(values: NDArray[np.int64]) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()
