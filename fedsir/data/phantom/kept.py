"""Phantoms are kept once drawn: thousands take longer to draw than everything else takes to start."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsir import seeding
from fedsir.config.data import PhantomData
from fedsir.data.cache import SPLITS, EntryWriter, Split, cache_root, load_entry
from fedsir.errors import BadInput

WORTH_KEEPING = 500
"""Images from which on a cohort is kept; fewer are drawn in about a second."""

Images = dict[Split, NDArray[np.uint8]]


def kept_or_drawn(config: PhantomData, draw: Callable[[], Images]) -> Images:
    """(N, size, size) uint8 of each split: from the image cache, or drawn and put there.

    Where the cache cannot be written they are drawn every time, since phantoms need no file to exist.
    """
    if config.train_images + config.test_images < WORTH_KEEPING:
        return draw()
    try:
        root = cache_root(None)
        entry = load_entry(root, key := _key(config))
    except BadInput:  # no home folder
        return draw()
    asked: dict[Split, int] = {"train": config.train_images, "test": config.test_images}
    if entry is not None and entry.fits(config.image_size, files=0) and entry.counts == asked:
        return entry.images
    drawn = draw()
    # On failure: a full or read-only disk. The drawn images serve as well.
    with contextlib.suppress(BadInput), EntryWriter(root, config.image_size) as writer:
        for split in SPLITS:
            writer.append(split, drawn[split])
        writer.commit(key, np.zeros((0, 32), dtype=np.uint8), {})
    return drawn


def _key(config: PhantomData) -> str:
    """Everything that the pixels depend on, the code that draws them included."""
    asked = config.model_dump_json(include={"cohort", "train_images", "test_images", "images_per_patient", "seed"})
    return hashlib.sha256(f"phantom/{_code()}/{np.__version__}/{config.image_size}/{asked}".encode()).hexdigest()


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(seeding.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()
