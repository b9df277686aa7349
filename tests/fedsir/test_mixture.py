"""The two-component split: what it finds, what it refuses to see, and that order and numbers do not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsir.mixture import fit_two_components, high_group

NAN = float("nan")


def groups(low: int, high: int, columns: int = 2, seed: int = 0, gap: float = 1.0) -> NDArray[np.float64]:
    """Points (low + high, columns); the low ones come first."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0.5, 0.05, (low, columns)), rng.normal(0.5 + gap, 0.05, (high, columns))])


# -- the fit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["full", "tied"])
@pytest.mark.parametrize("columns", [1, 3])
def test_separate_groups_are_the_components(covariance: Any, columns: int) -> None:
    points = groups(12, 4, columns)
    fit = fit_two_components(points, covariance, regularization=1e-6)
    order = np.argsort(fit.means.sum(axis=1))
    np.testing.assert_allclose(fit.means[order], [points[:12].mean(axis=0), points[12:].mean(axis=0)], atol=1e-6)
    np.testing.assert_allclose(fit.weights[order], [0.75, 0.25], atol=1e-6)
    np.testing.assert_allclose(fit.responsibilities[:, order], np.repeat(np.eye(2), [12, 4], axis=0), atol=1e-9)
    assert fit.converged


def test_full_covariances_are_those_of_the_groups_and_a_tied_one_is_their_mean() -> None:
    points = groups(30, 10)
    own = [np.cov(part.T, bias=True) for part in (points[:30], points[30:])]
    full, tied = (fit_two_components(points, kind, regularization=1e-9) for kind in ("full", "tied"))  # type: ignore[arg-type]
    order = np.argsort(full.means[:, 0])
    np.testing.assert_allclose(full.covariances[order], own, atol=1e-7)
    np.testing.assert_array_equal(tied.covariances[0], tied.covariances[1])
    np.testing.assert_allclose(tied.covariances[0], 0.75 * own[0] + 0.25 * own[1], atol=1e-7)


@pytest.mark.parametrize("covariance", ["full", "tied"])
def test_regularization_widens_the_components(covariance: Any) -> None:
    points = groups(8, 8)
    narrow, wide = (fit_two_components(points, covariance, regularization=r) for r in (1e-6, 1e-2))
    assert (np.diagonal(wide.covariances, axis1=1, axis2=2) > np.diagonal(narrow.covariances, axis1=1, axis2=2)).all()


@given(st.integers(2, 15), st.integers(1, 3), st.integers(0, 50), st.sampled_from(["full", "tied"]))
@settings(max_examples=25, deadline=None)
def test_shapes_and_sums(count: int, columns: int, seed: int, covariance: Any) -> None:
    """Also on one homogeneous group, which a mixture splits all the same."""
    fit = fit_two_components(np.random.default_rng(seed).normal(size=(count, columns)), covariance, seed=seed)
    assert fit.means.shape == (2, columns)
    assert fit.covariances.shape == (2, columns, columns)
    np.testing.assert_allclose(fit.weights.sum(), 1.0)
    np.testing.assert_allclose(fit.responsibilities.sum(axis=1), np.ones(count))
    assert fit.responsibilities.shape == (count, 2)
    assert ((fit.responsibilities >= 0) & (fit.responsibilities <= 1)).all()
    for array in (fit.means, fit.covariances, fit.weights, fit.responsibilities):
        assert array.dtype == np.float64


def test_one_iteration_does_not_converge_and_says_so(recwarn: pytest.WarningsRecorder) -> None:
    points = np.random.default_rng(0).normal(size=(40, 2))
    assert not fit_two_components(points, max_iter=1).converged
    assert fit_two_components(points, max_iter=2000).converged
    assert len(recwarn) == 0


def test_the_same_seed_gives_the_same_bits_and_large_seeds_are_taken() -> None:
    points = np.random.default_rng(0).normal(size=(20, 2))
    for seed in (0, 7, 2**63 - 1):
        one, two = (fit_two_components(points, seed=seed) for _ in range(2))
        np.testing.assert_array_equal(one.responsibilities, two.responsibilities)
        np.testing.assert_array_equal(one.means, two.means)


def test_seeds_are_felt_where_starts_differ() -> None:
    points = np.random.default_rng(0).normal(size=(20, 2))
    found = {fit_two_components(points, seed=seed).responsibilities.tobytes() for seed in range(8)}
    assert len(found) > 1


# -- the group with the larger mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(1, 4), (4, 1), (20, 10), (1, 1)])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_the_group_with_the_larger_sum_is_high(low: int, high: int, columns: int) -> None:
    found = high_group(groups(low, high, columns), seed=0, covariance="tied", regularization=1e-4)
    assert found.dtype == np.bool_
    assert found.tolist() == [False] * low + [True] * high


def test_the_sum_over_coordinates_decides_not_the_first_one() -> None:
    points = groups(6, 6)
    points[:, 0] = 1.0 - 0.2 * points[:, 0]
    assert high_group(points, seed=0).tolist() == [False] * 6 + [True] * 6
    points[:, 0] = 2.0 - 5.0 * points[:, 1]
    assert high_group(points, seed=0).tolist() == [True] * 6 + [False] * 6


def test_one_dimension_needs_no_second_axis() -> None:
    points = groups(5, 7, columns=1)
    np.testing.assert_array_equal(high_group(points[:, 0], seed=3), high_group(points, seed=3))


@pytest.mark.parametrize(
    "values",
    [np.empty(0), np.empty((0, 3)), np.array([4.0]), np.array([[1.0, 2.0]]), np.full(9, 0.3), np.full((5, 2), -7.0)],
)
def test_without_two_different_points_nobody_is_high(values: NDArray[np.float64]) -> None:
    found = high_group(values, seed=0)
    assert found.shape == (len(values),)
    assert not found.any()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e9])
def test_rounding_errors_are_no_difference(value: float) -> None:
    values = np.full(10, value)
    values[3:] = np.nextafter(values[3:], np.inf)
    assert not high_group(values, seed=0).any()


@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
def test_what_is_not_finite_takes_the_median_of_its_column(bad: float) -> None:
    """The median of either column is among the larger group."""
    for low, high, expected in ((7, 3, False), (3, 7, True)):
        points = groups(low, high)
        holed = points.copy()
        for row, column in ((0, 0), (0, 1), (low + high - 1, 0), (low + high - 1, 1)):
            holed[row, column] = bad
        found = high_group(holed, seed=0)
        assert found[[0, -1]].tolist() == [expected, expected]
        np.testing.assert_array_equal(found[1:-1], high_group(points, seed=0)[1:-1])


def test_nobody_is_high_where_nothing_is_finite() -> None:
    assert not high_group(np.full((6, 2), NAN), seed=0).any()


def test_columns_that_say_nothing_are_left_out() -> None:
    """A constant or unknown one would make a full covariance singular."""
    points = groups(6, 4, columns=1)
    expected = high_group(points, seed=0)
    for filler in (0.0, 123.0, NAN):
        wide = np.concatenate([np.full((10, 1), filler), points, np.full((10, 2), filler)], axis=1)
        np.testing.assert_array_equal(high_group(wide, seed=0, regularization=1e-12), expected)


@given(st.integers(2, 10), st.integers(2, 10), st.integers(0, 30), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_order_of_the_points_does_not_matter(low: int, high: int, seed: int, random: Any) -> None:
    points = groups(low, high, seed=seed)
    order = random.sample(range(low + high), low + high)
    found = high_group(points[order], seed, covariance="tied", regularization=1e-4)
    np.testing.assert_array_equal(found, high_group(points, seed, covariance="tied", regularization=1e-4)[order])


def test_the_given_values_are_left_as_they_are() -> None:
    points = groups(4, 4)
    points[2, 1] = NAN
    before = points.copy()
    high_group(points, seed=0)
    np.testing.assert_array_equal(points, before)


def test_the_verdict_is_the_same_each_time_for_a_seed() -> None:
    points = np.random.default_rng(5).normal(size=(30, 2))
    for seed in range(3):
        np.testing.assert_array_equal(high_group(points, seed), high_group(points, seed))
