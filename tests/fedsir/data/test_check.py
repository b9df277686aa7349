from __future__ import annotations

import numpy as np
import pytest

from fedsir.data.check import check_dataset, describe
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.errors import BadInput


def image_set(labels: list[int], patients: list[int], sites: list[str] | None = None) -> ImageSet:
    return ImageSet(
        images=np.zeros((len(labels), 16, 16), dtype=np.uint8),
        labels=np.array(labels, dtype=np.int64),
        patients=np.array(patients, dtype=np.int64),
        names=tuple(f"p{patient}.png" for patient in patients),
        sites=None if sites is None else tuple(sites),
    )


def dataset(train: ImageSet, test: ImageSet) -> Dataset:
    return Dataset("toy", "real", ("A", "B"), train, test, digest="d", notes=("a note",))


def test_a_sound_dataset_passes() -> None:
    check_dataset(dataset(image_set([0, 1], [1, 2]), image_set([0, 1], [3, 4])))


def test_missing_classes_are_named_with_their_split() -> None:
    with pytest.raises(BadInput, match=r"(?s)toy lacks.*A: no train image.*B: no test image"):
        check_dataset(dataset(image_set([1, 1], [1, 2]), image_set([0, 0], [3, 4])))


def test_shared_patients_are_listed_and_counted() -> None:
    ids = list(range(12))
    both = image_set([0, 1] * 6, ids)
    with pytest.raises(BadInput, match=r"(?s)toy: 12 patients.*the patient of p9.png\n.*2 more \(12 in all\)"):
        check_dataset(dataset(both, both))


def test_description_counts_images_patients_and_sites() -> None:
    found = describe(dataset(image_set([0, 0, 1, 1], [1, 1, 1, 2], ["x", "x", "y", "x"]), image_set([0, 1], [3, 4])))
    assert found.train.images == {"A": 2, "B": 2}
    assert found.train.patients == {"A": 1, "B": 2}
    assert (found.train.total_images, found.train.total_patients) == (4, 2)
    assert found.train.sites == {"x": 3, "y": 1}
    assert found.test.sites is None
    assert found.image_size == (16, 16)
    assert (found.name, found.kind, found.notes, found.digest) == ("toy", "real", ("a note",), "d")
