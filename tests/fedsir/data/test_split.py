from __future__ import annotations

import numpy as np
import pytest

from fedsir.data.split import split_patients
from fedsir.seeding import Stream, generator


def draw(labels: list[int], patients: list[int], fraction: float = 0.2, seed: int = 0) -> np.ndarray:
    rng = generator(seed, Stream.SPLIT)
    return split_patients(np.array(labels), np.array(patients), fraction, rng)


def test_fraction_of_each_class_and_whole_patients() -> None:
    patients = np.repeat(np.arange(150), 3)
    labels = np.where(patients < 100, 0, 1)
    mask = draw(labels.tolist(), patients.tolist())
    assert mask.dtype == np.bool_
    assert len(np.unique(patients[mask & (labels == 0)])) == 20
    assert len(np.unique(patients[mask & (labels == 1)])) == 10
    assert not np.intersect1d(patients[mask], patients[~mask]).size


def test_same_seed_same_split_and_other_seed_another() -> None:
    labels, patients = [0, 1] * 40, list(range(80))
    np.testing.assert_array_equal(draw(labels, patients), draw(labels, patients))
    assert (draw(labels, patients) != draw(labels, patients, seed=1)).any()


def test_order_of_images_does_not_matter() -> None:
    patients = np.repeat(np.arange(40), 2)
    labels = patients % 3
    shuffled = np.random.default_rng(0).permutation(len(patients))
    expected = draw(labels.tolist(), patients.tolist())[shuffled]
    np.testing.assert_array_equal(draw(labels[shuffled].tolist(), patients[shuffled].tolist()), expected)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_every_class_is_on_both_sides_at_any_fraction(fraction: float) -> None:
    labels, patients = [0] * 5 + [1] * 2, list(range(7))
    mask = draw(labels, patients, fraction)
    assert {label for label, test in zip(labels, mask, strict=True) if test} == {0, 1}
    assert {label for label, test in zip(labels, mask, strict=True) if not test} == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_patients_with_several_labels_stay_whole_and_classes_stay_covered(seed: int) -> None:
    # Class 1 occurs only beside class 0 or class 2, so strata alone would not cover it.
    labels = [0, 1, 0, 0, 2, 1, 2, 2, 0, 2]
    patients = [0, 0, 1, 2, 3, 3, 4, 5, 6, 7]
    mask = draw(labels, patients, 0.3, seed)
    for patient in range(8):
        assert len({bool(mask[i]) for i in range(10) if patients[i] == patient}) == 1
    for side in (True, False):
        assert {labels[i] for i in range(10) if mask[i] == side} == {0, 1, 2}


def test_a_class_with_one_patient_is_left_to_the_caller() -> None:
    mask = draw([0, 0, 0, 1], [0, 1, 2, 3])
    assert mask.sum() == 1
