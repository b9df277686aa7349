"""Class centroids: worked numbers, classes that are absent, and clients that must not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsir.prototypes import class_means, merged_centroids, moved_centroids, nearest_centroid


def merge(
    current: list[list[float]], returned: list[list[list[float]]], counts: list[list[int]]
) -> NDArray[np.float32]:
    return merged_centroids(np.array(current, np.float32), np.array(returned, np.float32), np.array(counts))


def test_class_means_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]], requires_grad=True)
    means, counts = class_means(features, torch.tensor([2, 2, 0]), 3)
    assert means.tolist() == [[5.0, 5.0], [0.0, 0.0], [2.0, 1.0]]
    assert counts.tolist() == [1, 0, 2]
    assert not means.requires_grad


def test_a_centroid_moves_by_the_squared_cosine() -> None:
    moved = moved_centroids(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([4]))
    torch.testing.assert_close(moved, torch.tensor([[1.0, 0.5]]))


def test_orthogonal_means_do_not_move_a_centroid_and_parallel_ones_replace_it() -> None:
    start = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    moved = moved_centroids(start, torch.tensor([[0.0, 3.0], [7.0, 0.0]]), torch.tensor([1, 1]))
    torch.testing.assert_close(moved, torch.tensor([[2.0, 0.0], [7.0, 0.0]]))


def test_absent_classes_keep_their_centroid_and_unknown_ones_take_the_mean() -> None:
    start = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    means = torch.tensor([[9.0, 9.0], [3.0, 4.0], [0.0, 0.0]])
    moved = moved_centroids(start, means, torch.tensor([0, 5, 0]))
    assert moved.tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]


def test_the_nearest_centroid_is_nearest_by_angle() -> None:
    centroids = torch.tensor([[1.0, 0.0], [100.0, 100.0], [0.0, 0.0]])
    features = torch.tensor([[0.1, 0.0], [5.0, 4.0], [0.0, 0.0]])
    assert nearest_centroid(features, centroids)[:2].tolist() == [0, 1]


def test_the_server_weighs_clients_by_their_cosine() -> None:
    merged = merge([[1.0, 0.0]], [[[2.0, 0.0]], [[1.0, 1.0]]], [[1], [1]])
    np.testing.assert_allclose(merged, [[1.585786, 0.414214]], atol=5e-7)


def test_the_number_of_samples_counts_only_while_a_class_is_unknown() -> None:
    returned = [[[2.0, 0.0], [2.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]
    merged = merge([[0.0, 0.0], [1.0, 0.0]], returned, [[3, 30], [1, 1]])
    np.testing.assert_allclose(merged, [[1.75, 0.25], [1.585786, 0.414214]], atol=5e-7)


def test_clients_without_the_class_do_not_anchor_it() -> None:
    """A client that owns no image returns the received centroid, with cosine 1."""
    merged = merge([[1.0, 0.0]], [[[1.0, 0.0]], [[3.0, 3.0]]], [[0], [2]])
    np.testing.assert_allclose(merged, [[3.0, 3.0]])


def test_opposite_centroids_count_for_nothing() -> None:
    merged = merge([[1.0, 0.0]], [[[-5.0, 0.0]], [[2.0, 0.0]]], [[1], [1]])
    np.testing.assert_array_equal(merged, [[2.0, 0.0]])


@pytest.mark.parametrize(
    ("returned", "counts"),
    [
        ([[[-1.0, 0.0]], [[0.0, 4.0]]], [[1], [1]]),  # opposite and orthogonal: all weights are 0
        ([[[9.0, 1.0]], [[9.0, 1.0]]], [[0], [0]]),  # nobody owns the class
        (np.empty((0, 1, 2)).tolist(), np.empty((0, 1)).tolist()),  # nobody is usable
    ],
)
def test_without_any_weight_the_centroid_stays(returned: list[list[list[float]]], counts: list[list[int]]) -> None:
    merged = merged_centroids(
        np.array([[1.0, 0.0]], np.float32),
        np.array(returned, np.float32).reshape(-1, 1, 2),
        np.array(counts, np.int64).reshape(-1, 1),
    )
    np.testing.assert_array_equal(merged, [[1.0, 0.0]])


def test_scale_and_order_of_clients_hardly_matter() -> None:
    rng = np.random.default_rng(0)
    current, returned = rng.random((3, 8), np.float32), rng.random((5, 3, 8), np.float32)
    counts = rng.integers(0, 4, (5, 3))
    merged, order = merged_centroids(current, returned, counts), rng.permutation(5)
    np.testing.assert_allclose(merged_centroids(current, returned[order], counts[order]), merged, rtol=1e-6)
    np.testing.assert_allclose(merged_centroids(7 * current, returned, counts), merged, rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        merged_centroids(np.zeros((2, 3), np.float32), np.zeros((4, 2, 3), np.float32), np.zeros((4, 3), np.int64))
