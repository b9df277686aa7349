from __future__ import annotations

import numpy as np

from fedsir.data.dataset import ImageSet
from fedsir.data.digest import dataset_digest, pixels_sha256


def part(n: int, first_patient: int, site: str | None = None, name: str = "a") -> ImageSet:
    images = np.random.default_rng(n).integers(0, 256, (n, 16, 16), dtype=np.uint8)
    return ImageSet(
        images=images,
        labels=np.arange(n, dtype=np.int64) % 2,
        patients=np.arange(first_patient, first_patient + n, dtype=np.int64),
        names=(name,) * n,
        sites=None if site is None else (site,) * n,
    )


def test_digest_changes_with_content_and_not_with_names() -> None:
    train, test = part(6, 0), part(4, 6)
    digest = dataset_digest(("A", "B"), train, test)
    assert len(digest) == 64
    assert dataset_digest(("A", "B"), part(6, 0, name="b"), test) == digest
    flipped = ImageSet(train.images, 1 - train.labels, train.patients, train.names)
    others = [
        dataset_digest(("A", "C"), train, test),
        dataset_digest(("A", "B"), test, train),
        dataset_digest(("A", "B"), flipped, test),
        dataset_digest(("A", "B"), part(6, 20), test),
        dataset_digest(("A", "B"), part(6, 0, site="x"), test),
    ]
    assert len({digest, *others}) == 6


def test_known_pixel_hashes_give_the_same_digest() -> None:
    train, test = part(1500, 0), part(4, 1500)
    known = {"train": pixels_sha256(train.images), "test": pixels_sha256(test.images)}
    assert dataset_digest(("A", "B"), train, test, known) == dataset_digest(("A", "B"), train, test)
