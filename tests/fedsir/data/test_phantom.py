"""Phantom cohorts: determinism, patients, classes and what the drawings respond to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedsir.config.data import PhantomData
from fedsir.data.dataset import Dataset
from fedsir.data.phantom import PRETEXT_SEED_START, draw_patient, draw_scan, load_phantom
from fedsir.data.phantom.cohorts import COHORTS, patient_label
from fedsir.data.phantom.geometry import GEOMETRY_NAMES, geometry
from fedsir.data.phantom.lesions import Lesions
from fedsir.data.phantom.rendering import profiles, render
from fedsir.errors import BadInput

COHORT_NAMES = ("kermany", "uic", "wake_forest")


def phantom(cohort: str = "kermany", **changes: int) -> Dataset:
    settings = {"image_size": 32, "train_images": 44, "test_images": 20, **changes}
    return load_phantom(PhantomData(source="phantom", cohort=cohort, **settings))


@pytest.mark.parametrize("cohort", COHORT_NAMES)
def test_shapes_names_and_kind(cohort: str) -> None:
    data = phantom(cohort)
    assert (data.name, data.kind) == (f"phantom-{cohort}", "phantom")
    assert data.train.images.shape == (44, 32, 32)
    assert data.train.images.dtype == np.uint8
    assert data.train.labels.dtype == np.int64
    assert data.test.names[5] == "test/p0001/s1"
    assert len(set(data.train.names) | set(data.test.names)) == 64


@pytest.mark.parametrize("cohort", COHORT_NAMES)
def test_same_configuration_gives_the_same_pixels(cohort: str) -> None:
    first, again, other = phantom(cohort), phantom(cohort), phantom(cohort, seed=1)
    assert first.digest == again.digest
    assert np.array_equal(first.train.images, again.train.images)
    assert first.digest != other.digest


def test_a_larger_cohort_extends_a_smaller_one() -> None:
    small, large = phantom(), phantom(train_images=60, test_images=24)
    assert np.array_equal(large.train.images[:44], small.train.images)
    assert np.array_equal(large.test.images[:20], small.test.images)
    assert np.array_equal(large.test.labels[:20], small.test.labels)


def test_more_scans_per_patient_keep_the_earlier_scans() -> None:
    few, many = phantom(images_per_patient=2), phantom(images_per_patient=4)
    assert np.array_equal(few.train.images[2:4], many.train.images[4:6])


def test_train_and_test_are_different_patients() -> None:
    data = phantom(train_images=42)
    assert not set(data.train.patients) & set(data.test.patients)
    images = {image.tobytes() for split in (data.train, data.test) for image in split.images}
    assert len(images) == 62


def test_labels_belong_to_patients_and_the_last_one_may_have_fewer_scans() -> None:
    data = phantom(train_images=42)
    for patient in np.unique(data.train.patients):
        assert len(np.unique(data.train.labels[data.train.patients == patient])) == 1
    assert np.bincount(data.train.patients).tolist() == [4] * 10 + [2]


@pytest.mark.parametrize(
    ("cohort", "shares"),
    [("kermany", [0.25] * 4), ("uic", [0.25] * 4), ("wake_forest", [8 / 11, 3 / 11])],
)
@pytest.mark.parametrize("split", [0, 1])
def test_class_proportions(cohort: str, shares: list[float], split: int) -> None:
    labels = [patient_label(COHORTS[cohort], 7, split, patient) for patient in range(220)]
    assert np.allclose(np.bincount(labels) / 220, shares)
    # Shuffled, not alternating: the class cannot be read off the patient's number.
    period = len(COHORTS[cohort].block)
    assert labels[:period] != labels[period : 2 * period] or labels[:period] != labels[2 * period : 3 * period]


def test_scans_of_a_patient_share_anatomy_but_not_position() -> None:
    _, scans = draw_patient(COHORTS["kermany"], 0, 0, 3, 4)
    assert all(scan.anatomy is scans[0].anatomy for scan in scans)
    assert len({scan.placement.fovea_x for scan in scans}) == 4
    _, others = draw_patient(COHORTS["kermany"], 0, 0, 4, 1)
    assert not np.array_equal(others[0].anatomy.layers, scans[0].anatomy.layers)


@pytest.mark.parametrize("size", [16, 33, 64, 200])
def test_any_size_from_16(size: int) -> None:
    data = phantom(image_size=size, train_images=8, test_images=4)
    assert data.train.images.shape == (8, size, size)
    # Bright tissue under dark vitreous at every size.
    assert data.train.images[:, size // 3 :].mean() > 2 * data.train.images[:, : size // 8].mean()


def test_brightness_does_not_depend_on_the_size() -> None:
    means = [phantom(image_size=size).train.images.mean() for size in (32, 64, 128)]
    assert max(means) < 1.1 * min(means)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"image_size": 15}, "image_size"), ({"seed": PRETEXT_SEED_START}, "seed")],
)
def test_impossible_configurations_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        phantom(**changes)


def test_images_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        phantom().train.images[0] = 0


@pytest.mark.parametrize("cohort", COHORT_NAMES)
def test_layers_never_cross(cohort: str) -> None:
    for patient in range(60):
        _, scans = draw_patient(COHORTS[cohort], 5, 0, patient, 2)
        for scan in scans:
            curves = profiles(scan, 64)
            assert (np.diff(curves.tops, axis=0) >= -1e-9).all()
            assert (curves.rpe >= curves.tops[7]).all()
            assert (curves.bruch >= curves.rpe - 1e-9).all()


def test_lesions_change_the_image_where_they_are() -> None:
    _, [scan] = draw_patient(COHORTS["kermany"], 0, 0, 0, 1)
    healthy = replace(scan, lesions=Lesions())
    place = -scan.placement.fovea_x  # mid-field
    dome = replace(scan, lesions=Lesions(domes=np.array([[place, scan.placement.plane, 0.3, 0.1]])))
    plain, raised = (render(one, 64, np.random.default_rng(0)).astype(int).copy() for one in (healthy, dome))
    change = np.abs(plain - raised).sum(axis=0)
    assert change[28:36].mean() > 10 * change[:8].mean()


def test_geometry_measures_what_was_drawn() -> None:
    _, [scan] = draw_patient(COHORTS["kermany"], 0, 0, 0, 1)
    healthy = replace(scan, lesions=Lesions())
    swollen = replace(scan, lesions=Lesions(swelling=np.array([[0.0, 0.0, 1.0, 0.8]])))
    before, after = (dict(zip(GEOMETRY_NAMES, geometry(one), strict=True)) for one in (healthy, swollen))
    assert before["cyst_area"] == before["fluid_area"] == before["elevation_height"] == 0
    assert after["onl_mm"] > before["onl_mm"]
    assert after["speckle"] == before["speckle"]


def test_load_of_the_severity_cohort_grows_with_the_class() -> None:
    areas: list[list[float]] = [[], [], [], []]
    at = GEOMETRY_NAMES.index("cyst_area")
    for patient in range(120):
        label, [scan] = draw_patient(COHORTS["uic"], 2, 0, patient, 1)
        areas[label].append(float(geometry(scan)[at]))
    means = [np.mean(values) for values in areas]
    assert means == sorted(means)
    assert means[0] < 0.1 < means[1]


def test_draw_scan_is_addressed_by_its_number() -> None:
    cohort = COHORTS["uic"]
    _, scans = draw_patient(cohort, 0, 1, 9, 2)
    first = draw_scan(scans[1], cohort, 0, 1, 9, 1, 32)
    assert np.array_equal(first, draw_scan(scans[1], cohort, 0, 1, 9, 1, 32))
    assert not np.array_equal(first, draw_scan(scans[1], cohort, 0, 1, 9, 0, 32))
