"""Local intrinsic dimensionality: the worked number, what it measures, and points it is not defined for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsir.lid import lid, lid_from_distances, mean_lid, neighbour_distances


def points(n: int, features: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random((n, features))


def test_worked_number() -> None:
    assert lid_from_distances([[1.0, 2.0, 4.0, 8.0]])[0] == pytest.approx(0.961797, abs=5e-7)


def test_worked_number_from_points() -> None:
    """The origin's neighbours lie at 1, 2, 4 and 8; a fifth, farther one is not among the four nearest."""
    line = np.array([0.0, 1.0, -2.0, 4.0, -8.0, 100.0])[:, None]
    assert lid(line, 4)[0] == pytest.approx(0.961797, abs=5e-7)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_it_measures_the_dimension_in_which_points_lie(dimension: int) -> None:
    cloud = np.zeros((2000, 6))
    cloud[:, :dimension] = points(2000, dimension)
    assert mean_lid(cloud, 20) == pytest.approx(dimension, rel=0.12)


@given(n=st.integers(1, 40), k=st.integers(1, 50), chunk=st.integers(1, 45))
def test_distances_are_those_of_the_nearest_others_whatever_the_chunk(n: int, k: int, chunk: int) -> None:
    cloud = points(n, 3, seed=n)
    found = neighbour_distances(cloud, k, chunk)
    assert found.shape == (n, min(k, n - 1))
    every = np.linalg.norm(cloud[:, None] - cloud[None], axis=2)
    for i in range(n):
        np.testing.assert_allclose(found[i], np.sort(np.delete(every[i], i))[:k], rtol=1e-12)
    np.testing.assert_array_equal(found, neighbour_distances(cloud, k))


def test_scale_shift_and_order_do_not_matter() -> None:
    cloud = points(60, 4)
    order = np.random.default_rng(1).permutation(60)
    np.testing.assert_allclose(lid(cloud * 1e-9, 7), lid(cloud, 7), rtol=1e-9)
    np.testing.assert_allclose(lid(cloud + 3.0, 7), lid(cloud, 7), rtol=1e-9)
    np.testing.assert_array_equal(lid(cloud[order], 7), lid(cloud, 7)[order])


def test_duplicates_keep_their_neighbours_finite() -> None:
    """One neighbour at distance 0 counts as if it were at 1e-12 of the farthest."""
    expected = -3 / (np.log(1e-12) + np.log(0.5))
    np.testing.assert_allclose(lid_from_distances([[0.0, 1.0, 2.0]]), [expected])
    doubled = np.repeat(points(30, 3), 2, axis=0)
    assert np.isfinite(lid(doubled, 5)).all()
    assert (lid(doubled, 5) > 0).all()


def test_points_that_all_coincide_have_dimension_zero() -> None:
    np.testing.assert_array_equal(lid(np.full((9, 4), 0.25), 3), np.zeros(9))
    assert mean_lid(np.full((9, 4), 0.25), 3) == 0.0


def test_without_distinct_distances_it_is_undefined() -> None:
    # A point alone against duplicates of one other: every neighbour at the same distance.
    saturated = np.array([[0.0, 1.0]] + [[1.0, 0.0]] * 8)
    each = lid(saturated, 4)
    assert np.isnan(each[0])
    np.testing.assert_array_equal(each[1:], np.zeros(8))
    assert mean_lid(saturated, 4) == 0.0
    assert np.isnan(lid(np.array([[0.0], [1.0]]), 20)).all()
    assert np.isnan(lid(np.zeros((1, 4)), 20)).all()
    assert lid(np.zeros((0, 4)), 20).shape == (0,)


def test_values_that_are_not_finite_spoil_only_themselves() -> None:
    cloud = points(20, 2)
    spoiled = np.concatenate([cloud, [[np.nan, 0.5]]])
    each = lid(spoiled, 5)
    assert np.isnan(each[-1])
    np.testing.assert_array_equal(each[:-1], lid(cloud, 5))


def test_small_clients_use_all_their_neighbours_or_have_no_mean() -> None:
    cloud = points(6, 3)
    np.testing.assert_array_equal(lid(cloud, 20), lid(cloud, 5))
    assert mean_lid(cloud, 20) == pytest.approx(lid(cloud, 5).mean())
    assert np.isnan(mean_lid(cloud[:4], 20))
    assert np.isfinite(mean_lid(cloud[:5], 20))
    assert np.isnan(mean_lid(np.full((6, 2), np.nan), 20))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="k = 0"):
        lid(np.zeros((3, 2)), 0)
    with pytest.raises(ValueError, match="shape"):
        lid(np.zeros(3), 2)
    with pytest.raises(ValueError, match="shape"):
        lid_from_distances(np.zeros(3))
