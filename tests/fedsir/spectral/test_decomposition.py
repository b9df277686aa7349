"""Spectra, cutoffs, balancing and similarities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir.spectral.decomposition import (
    ClassSpectrum,
    balanced_index,
    class_spectra,
    class_spectrum,
    right_singular_vectors,
    similarity_matrix,
    spectral_cutoff,
)


def features(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.abs(np.random.default_rng(seed).normal(size=(rows, columns))).astype(np.float32)


def spectrum(rows: np.ndarray, kappa: float = 10.0, directions: int = 12) -> ClassSpectrum:
    found = class_spectrum(rows, kappa, directions)
    assert found is not None
    return found


def test_published_directions_and_cutoffs(golden: Any) -> None:
    for k, spectra in enumerate(golden.spectra):
        for c, found in enumerate(spectra):
            assert found is not None
            expected = golden.arrays[f"leading_{k}"][c]
            np.testing.assert_allclose(found.leading * np.sign(found.leading @ expected), expected, atol=1e-4)
            assert found.cutoff == golden.arrays[f"cutoff_{k}"][c]


def test_published_similarities(golden: Any) -> None:
    for k, spectra in enumerate(golden.spectra):
        similarity = similarity_matrix([None if s is None else s.leading for s in spectra])
        np.testing.assert_allclose(similarity, golden.arrays[f"similarity_{k}"], atol=1e-5)


@pytest.mark.parametrize(
    ("singular", "expected"), [((10, 0.5, 0.3, 0.2), 1), ((9, 0.5, 0.5), 2), ((1,) * 12, 11), ((4,), 1)]
)
def test_cutoff(singular: tuple[float, ...], expected: int) -> None:
    assert spectral_cutoff(np.array(singular, dtype=np.float64), 10.0) == expected


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=30), st.floats(0.1, 100), st.floats(1e-3, 1e3))
def test_cutoff_is_the_first_to_reach_kappa_and_ignores_scale(values: list[float], kappa: float, scale: float) -> None:
    s = np.sort(np.array(values))[::-1]
    q = spectral_cutoff(s, kappa)
    assert s[:q].sum() >= kappa * s[q:].sum() * (1 - 1e-9)
    assert q == 1 or s[: q - 1].sum() < kappa * s[q - 1 :].sum() * (1 + 1e-9)
    assert spectral_cutoff(s * scale, kappa) == q or s[:q].sum() == pytest.approx(kappa * s[q:].sum())


@pytest.mark.parametrize("rows", [10, 40, 300])
def test_gram_and_economy_decomposition_agree_with_full_precision(rows: int) -> None:
    x = features(rows, 40).astype(np.float64)
    singular, vectors = right_singular_vectors(x)
    _, expected_s, expected_v = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(singular, expected_s, rtol=1e-10)
    np.testing.assert_allclose(np.abs(np.sum(vectors * expected_v, axis=1)), 1.0, atol=1e-9)


@pytest.mark.parametrize("rows", [9, 200])
def test_rank_ends_where_signal_ends(rows: int) -> None:
    rng = np.random.default_rng(0)
    low_rank = (rng.normal(size=(rows, 5)) @ rng.normal(size=(5, 30))).astype(np.float32)
    singular, vectors = right_singular_vectors(low_rank.astype(np.float64))
    assert len(singular) == len(vectors) == 5
    found = spectrum(low_rank, kappa=0.5)
    assert len(found.residual) == 5 - found.cutoff


def test_extreme_scales_neither_overflow_nor_vanish() -> None:
    x = features(50, 8).astype(np.float64)
    for scale in (1e-200, 1e200):
        np.testing.assert_allclose(spectrum(x * scale).leading, spectrum(x).leading, atol=1e-12)


def test_numbers_beside_the_directions() -> None:
    found = spectrum(np.diag([10.0, 2.0, 1.0]))
    assert (found.count, found.cutoff) == (3, 2)
    assert found.gap == pytest.approx(0.8)
    assert found.s1_ratio == pytest.approx(10 / 13)
    np.testing.assert_allclose(found.leading, [1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(np.abs(found.residual), [[0, 0, 1]], atol=1e-12)


def test_residual_is_limited_and_orthogonal_to_the_leading_direction() -> None:
    found = spectrum(features(100, 40), kappa=1.0, directions=6)
    assert found.residual.shape == (6, 40)
    np.testing.assert_allclose(found.residual @ found.residual.T, np.eye(6), atol=1e-10)
    np.testing.assert_allclose(found.residual @ found.leading, 0, atol=1e-10)


def test_signs_are_fixed() -> None:
    x = features(60, 12) - 0.5
    a, b = spectrum(x, kappa=1.0), spectrum(-x, kappa=1.0)
    np.testing.assert_allclose(a.leading, b.leading, atol=1e-10)
    np.testing.assert_allclose(a.residual, b.residual, atol=1e-8)
    assert a.leading.sum() > 0


def test_one_image_has_a_direction_and_no_residual() -> None:
    found = spectrum(np.array([[3.0, 4.0]]))
    np.testing.assert_allclose(found.leading, [0.6, 0.8])
    assert found.residual.shape == (0, 2)
    assert (found.gap, found.s1_ratio) == (1.0, 1.0)


def test_non_finite_rows_are_dropped() -> None:
    x = features(30, 6)
    spoilt = np.insert(x, [3, 10], [[np.nan] * 6, [np.inf] + [0] * 5], axis=0)
    assert spectrum(spoilt).count == 30
    np.testing.assert_array_equal(spectrum(spoilt).leading, spectrum(x).leading)


@pytest.mark.parametrize("rows", [np.empty((0, 4)), np.full((3, 4), np.nan), np.zeros((3, 4))])
def test_nothing_to_decompose_is_an_unobserved_class(rows: np.ndarray) -> None:
    assert class_spectrum(rows, 10.0, 12) is None


def test_absent_classes_have_no_spectrum() -> None:
    spectra = class_spectra(features(20, 5), np.repeat([0, 2], 10), 4)
    assert [s is None for s in spectra] == [False, True, False, True]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 100))
def test_balanced_index_repeats_images_up_to_the_largest_class(labels: list[int], seed: int) -> None:
    y = np.array(labels)
    index = balanced_index(y, np.random.default_rng(seed))
    np.testing.assert_array_equal(index[: len(y)], np.arange(len(y)))
    counts = np.bincount(y[index])
    assert set(counts[counts > 0].tolist()) == {int(np.bincount(y).max())}
    assert set(np.flatnonzero(counts).tolist()) == set(labels)


def test_exact_replication_changes_no_direction() -> None:
    x = features(40, 16)
    np.testing.assert_allclose(spectrum(x).leading, spectrum(np.tile(x, (10, 1))).leading, atol=1e-9)
    index = np.random.default_rng(0).integers(0, 40, 400)
    assert spectrum(x).leading @ spectrum(x[index]).leading > 0.995


def test_similarity_ignores_signs_and_marks_absent_classes() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(3, 7))
    for sign in ("abs", "oriented"):
        first = similarity_matrix([a, None, b, c], sign)  # type: ignore[arg-type]
        flipped = similarity_matrix([-a, None, b, -c], sign)  # type: ignore[arg-type]
        np.testing.assert_allclose(first, flipped, atol=1e-12)
        assert np.isnan(first[1]).all()
        assert np.isnan(first[:, 1]).all()
        np.testing.assert_allclose(np.diag(first)[[0, 2, 3]], 1.0)
    assert np.isnan(similarity_matrix([None, None])).all()


def test_oriented_similarity_keeps_opposition() -> None:
    a, b = np.array([1.0, -0.2]), np.array([-0.2, 1.0])
    assert similarity_matrix([a, b], "oriented")[0, 1] == pytest.approx(-0.4 / 1.04)
    assert similarity_matrix([a, b], "abs")[0, 1] == pytest.approx(0.4 / 1.04)


def test_signs_agree_for_features_that_are_not_negative() -> None:
    leading = [spectrum(features(30, 9, seed)).leading for seed in range(3)]
    np.testing.assert_allclose(similarity_matrix(leading, "abs"), similarity_matrix(leading, "oriented"))
