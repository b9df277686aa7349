"""Descriptors and the split of clients, with every guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsir.spectral import identification
from fedsir.spectral.decomposition import similarity_matrix
from fedsir.spectral.descriptors import client_scores, descriptors, standardized, usable_classes
from fedsir.spectral.identification import (
    IdentificationSettings,
    client_similarity,
    identify,
    split_clients,
)

OCT = IdentificationSettings()
FEDSIR = IdentificationSettings(
    balance=False,
    descriptors=("mean", "energy"),
    no_pairs="zeros",
    covariance="full",
    regularization=1e-6,
    clean_component="first_descriptor",
)


def with_settings(**changes: Any) -> IdentificationSettings:
    return IdentificationSettings.model_validate({**OCT.model_dump(), **changes})


def similarity(*pairs: float, classes: int = 3) -> np.ndarray:
    """Symmetric matrix with the given upper entries row by row."""
    matrix = np.eye(classes)
    matrix[np.triu_indices(classes, 1)] = pairs
    return matrix + np.triu(matrix, 1).T


def values(means: list[float], classes: int = 4, seed: int = 0) -> np.ndarray:
    """Descriptors of clients whose similarities scatter around the given means; NaN stays NaN."""
    rng = np.random.default_rng(seed)
    rows = [
        descriptors(similarity(*(m + rng.normal(0, 0.01, classes * (classes - 1) // 2)), classes=classes))
        for m in means
    ]
    return np.stack(rows)


def clean_ids(means: list[float], settings: IdentificationSettings = OCT, seed: int = 0) -> list[int]:
    return np.flatnonzero(split_clients(values(means), settings, seed).clean).tolist()


def class_features(labels: np.ndarray, classes: int, dims: int = 24, spread: float = 0.3, seed: int = 0) -> np.ndarray:
    """Non-negative features around class centres."""
    centres = np.abs(np.random.default_rng(99).normal(size=(classes, dims)))
    noise = np.random.default_rng(seed).normal(0, spread, size=(len(labels), dims))
    return np.maximum(centres[labels] + noise, 0).astype(np.float32)


# Descriptors


def test_published_descriptors(golden: Any) -> None:
    for k, spectra in enumerate(golden.spectra):
        found = descriptors(similarity_matrix([None if s is None else s.leading for s in spectra]))
        np.testing.assert_allclose(found, golden.arrays["descriptors"][k], atol=1e-5)


def test_descriptors_of_known_similarities() -> None:
    np.testing.assert_allclose(descriptors(similarity(0.2, 0.4, 0.6)), [0.4, 0.186667, 0.6], atol=1e-6)


def test_unobserved_classes_take_no_part() -> None:
    matrix = similarity(0.2, 0.4, 0.6)
    matrix[1] = matrix[:, 1] = np.nan
    np.testing.assert_allclose(descriptors(matrix), [0.4, 0.16, 0.4])
    matrix[0] = matrix[:, 0] = np.nan
    assert np.isnan(descriptors(matrix)).all()


def test_two_classes_carry_one_number() -> None:
    mean, energy, maximum = descriptors(similarity(0.7, classes=2))
    assert mean == maximum
    assert energy == pytest.approx(mean**2)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([30, 20, 19, 0], [True, True, False, False]),
        ([30, 19, 1, 0], [True, True, True, False]),  # fewer than two large classes: all observed ones
        ([5, 0, 0, 0], [True, False, False, False]),
    ],
)
def test_usable_classes(counts: list[int], expected: list[bool]) -> None:
    assert usable_classes(np.array(counts), 20).tolist() == expected


def test_standardized_leaves_gaps_and_flat_columns() -> None:
    z = standardized(np.array([[1.0, 5.0], [np.nan, 5.0], [3.0, 5.0 + 1e-15]]))
    np.testing.assert_array_equal(z[[0, 2]], [[-1, 0], [1, 0]])
    assert np.isnan(z[1]).all()
    np.testing.assert_allclose(client_scores(np.array([[1.0, 5.0], [3.0, 5.0]])), [-0.5, 0.5])


# Similarity of a client


def test_client_similarity_equals_the_plain_one_up_to_resampling() -> None:
    labels = np.repeat(np.arange(3), [200, 60, 40])
    features = class_features(labels, 4)
    balanced = client_similarity(features, labels, 4, OCT, np.random.default_rng(0))
    plain = client_similarity(features, labels, 4, FEDSIR, np.random.default_rng(0))
    assert np.isnan(plain[3]).all()
    np.testing.assert_allclose(balanced[:3, :3], plain[:3, :3], atol=0.02)


def test_permuted_labels_look_the_same() -> None:
    labels = np.repeat(np.arange(4), 80)
    features = class_features(labels, 4)
    swapped = np.array([1, 0, 3, 2])[labels]
    a, b = (descriptors(client_similarity(features, y, 4, FEDSIR, np.random.default_rng(0))) for y in (labels, swapped))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_small_classes_and_length_normalization() -> None:
    labels = np.repeat(np.arange(3), [50, 50, 5])
    features = class_features(labels, 3)
    found = client_similarity(features, labels, 3, OCT, np.random.default_rng(0))
    assert np.isnan(found[2]).all()
    scales = np.random.default_rng(0).uniform(0.1, 10, (len(labels), 1))
    unit = with_settings(feature_norm="l2")
    np.testing.assert_allclose(
        client_similarity(features, labels, 3, unit, np.random.default_rng(0)),
        client_similarity(features * scales, labels, 3, unit, np.random.default_rng(0)),
        atol=1e-6,
    )


# Split


def test_published_splits(golden: Any) -> None:
    published = golden.arrays["descriptors"]
    for name, settings in (
        ("fedsir", FEDSIR),
        ("oct", FEDSIR.model_copy(update={"descriptors": ("mean", "energy", "maximum")})),
    ):
        split = split_clients(published, settings, 0)
        assert np.flatnonzero(split.clean).tolist() == golden.arrays[f"clean_idx_{name}"].tolist()
        np.testing.assert_allclose(split.p_clean, golden.arrays[f"p_clean_{name}"], atol=1e-6)
    assert np.flatnonzero(split_clients(published, OCT, 0).clean).tolist() == [0, 1]


@pytest.mark.parametrize("settings", [OCT, FEDSIR, with_settings(split="largest_gap")])
@pytest.mark.parametrize("clients", [5, 20, 30])
def test_separated_groups_are_found_in_any_order(settings: IdentificationSettings, clients: int) -> None:
    rng = np.random.default_rng(clients)
    clean = max(clients // 5, 1)
    descriptor_rows = values([0.7] * clean + [0.95] * (clients - clean))
    order = rng.permutation(clients)
    split = split_clients(descriptor_rows[order], settings, 0)
    np.testing.assert_array_equal(split.clean, order < clean)
    assert split.notes == ()


def test_verdict_repeats_for_a_seed() -> None:
    rows = values([0.8, 0.82, 0.85, 0.9, 0.91, 0.93])
    first, second = split_clients(rows, OCT, 2**62 + 5), split_clients(rows, OCT, 2**62 + 5)
    np.testing.assert_array_equal(first.p_clean, second.p_clean)


def test_threshold_moves_the_border() -> None:
    rows = values([0.7, 0.72, 0.95, 0.96, 0.94])
    everybody = split_clients(rows, with_settings(threshold=0.0), 0)
    assert everybody.clean.all()
    assert everybody.notes == ("every client counts as clean.",)


@pytest.mark.parametrize(
    ("no_pairs", "clean", "in_fit"),
    [("noisy", [0, 1], False), ("clean", [0, 1, 4], False), ("zeros", [4], True)],
)
def test_clients_without_a_pair(no_pairs: str, clean: list[int], in_fit: bool) -> None:
    rows = values([0.70, 0.71, 0.95, 0.96, np.nan, 0.94])
    split = split_clients(rows, with_settings(no_pairs=no_pairs), 0)
    assert np.flatnonzero(split.clean).tolist() == clean
    assert np.isfinite(split.p_clean[4]) == in_fit
    assert "(4)" in split.notes[0]


def test_nobody_with_a_pair_counts_as_all_clean() -> None:
    split = split_clients(np.full((4, 3), np.nan), OCT, 0)
    assert split.clean.all()
    assert np.isnan(split.p_clean).all()
    assert "nothing can be compared" in split.notes[-1]


def test_single_comparable_client_is_clean_the_others_are_not() -> None:
    split = split_clients(values([np.nan, 0.9, np.nan]), OCT, 0)
    assert split.clean.tolist() == [False, True, False]
    assert any("no other to be compared" in note for note in split.notes)


def test_equal_descriptors_count_as_all_clean() -> None:
    split = split_clients(np.tile([0.8, 0.64, 0.8], (6, 1)), OCT, 0)
    assert split.clean.all()
    np.testing.assert_array_equal(split.p_clean, 1.0)
    assert any("equal descriptors" in note for note in split.notes)


def test_two_comparable_clients_are_split_at_the_gap() -> None:
    split = split_clients(values([0.9, 0.7]), OCT, 0)
    assert split.clean.tolist() == [False, True]
    assert any("largest gap" in note for note in split.notes)


def test_one_client_alone() -> None:
    assert split_clients(values([0.9]), OCT, 0).clean.tolist() == [True]


@pytest.mark.parametrize(("no_pairs", "expected"), [("noisy", 3), ("clean", 1)])
def test_nobody_clean_forces_the_lowest_tenth(monkeypatch: pytest.MonkeyPatch, no_pairs: str, expected: int) -> None:
    monkeypatch.setattr(identification, "_mixture", lambda values, *_: (np.zeros(len(values)), "mixture", None))
    rows = values([*np.random.default_rng(0).uniform(0.6, 0.9, 24), np.nan])
    split = split_clients(rows, with_settings(no_pairs=no_pairs), 0)
    assert split.clean.sum() == expected
    if no_pairs == "noisy":
        lowest = np.argsort(client_scores(rows))[:3]  # NaN sorts last
        np.testing.assert_array_equal(np.sort(lowest), np.flatnonzero(split.clean))
        assert "declared clean" in split.notes[-1]


def test_forced_clients_always_have_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identification, "_mixture", lambda values, *_: (np.zeros(len(values)), "mixture", None))
    rows = values([0.8, 0.9, 0.7, *[np.nan] * 47])
    assert np.flatnonzero(split_clients(rows, OCT, 0).clean).tolist() == [0, 1, 2]


def test_two_class_clients_do_not_break_the_full_covariance() -> None:
    rows = values([0.7, 0.72, 0.95, 0.96, 0.93], classes=2)
    for settings in (OCT, FEDSIR):
        assert np.flatnonzero(split_clients(rows, settings, 0).clean).tolist() == [0, 1]


def test_homogeneous_clients_give_a_usable_verdict() -> None:
    split = split_clients(values([0.8] * 20), OCT, 0)
    assert split.clean.any()
    assert np.isfinite(split.p_clean).all()


def test_clean_component_by_mean_score_or_first_descriptor() -> None:
    # A group with a lower mean but a far higher maximum: the two readings differ.
    low_mean = np.array([[0.50, 0.60, 0.99], [0.51, 0.61, 0.98], [0.505, 0.605, 0.985]])
    high_mean = np.array([[0.60, 0.40, 0.60], [0.61, 0.41, 0.61], [0.605, 0.405, 0.605]])
    rows = np.concatenate([low_mean, high_mean])
    by_score = split_clients(rows, OCT, 0).clean
    by_first = split_clients(rows, with_settings(clean_component="first_descriptor"), 0).clean
    assert by_score.tolist() == [False] * 3 + [True] * 3
    np.testing.assert_array_equal(by_first, ~by_score)


def test_identify_keeps_what_decided() -> None:
    matrices = np.stack([similarity(m, m + 0.01, m - 0.01) for m in (0.5, 0.52, 0.9, 0.91)])
    verdict = identify(matrices, OCT, 0)
    assert verdict.clean.tolist() == [True, True, False, False]
    np.testing.assert_array_equal(verdict.similarity, matrices)
    np.testing.assert_allclose(verdict.descriptors[:, 0], [0.5, 0.52, 0.9, 0.91])
