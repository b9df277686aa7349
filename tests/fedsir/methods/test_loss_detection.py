"""Noisy clients by class losses: the matrix, its scaling, the vote on sets, and what happens at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fedsir.methods.loss_detection import (
    LossDetection,
    class_loss_matrix,
    detect,
    min_max_scaled,
    vote_noisy,
    winning_set,
    with_somebody_clean,
)

NAN = float("nan")
VOTE = LossDetection()


def flags(*members: int, of: int) -> NDArray[np.bool_]:
    out = np.zeros(of, dtype=np.bool_)
    out[list(members)] = True
    return out


def losses(clean: int, noisy: int, classes: int = 4, seed: int = 0, gap: float = 1.0) -> NDArray[np.float64]:
    """Clean clients first."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0.4, 0.05, (clean, classes)), rng.normal(0.4 + gap, 0.05, (noisy, classes))])


# -- the matrix ------------------------------------------------------------------------------------------------------


def test_an_absent_class_gets_the_lowest_loss_of_its_owners() -> None:
    matrix = class_loss_matrix(np.array([[0.5, NAN], [0.7, 2.0], [NAN, 3.0]]))
    np.testing.assert_array_equal(matrix, [[0.5, 2.0], [0.7, 2.0], [0.5, 3.0]])


def test_a_class_that_nobody_owns_is_dropped() -> None:
    matrix = class_loss_matrix(np.array([[0.5, NAN, 1.0], [0.7, NAN, NAN]]))
    np.testing.assert_array_equal(matrix, [[0.5, 1.0], [0.7, 1.0]])


def test_infinite_losses_become_the_median_of_the_finite_ones() -> None:
    matrix = class_loss_matrix(np.array([[1.0], [2.0], [4.0], [np.inf], [NAN]]))
    np.testing.assert_array_equal(matrix[:, 0], [1.0, 2.0, 4.0, 2.0, 1.0])


def test_a_client_without_any_class_looks_like_the_best_owner_everywhere() -> None:
    matrix = class_loss_matrix(np.array([[0.5, 2.0], [0.7, 1.0], [NAN, NAN]]))
    np.testing.assert_array_equal(matrix[2], [0.5, 1.0])


def test_two_clients_become_the_rows_zero_and_one() -> None:
    np.testing.assert_array_equal(min_max_scaled(np.array([[0.1, 0.1], [2.0, 3.0]])), [[0, 0], [1, 1]])


def test_a_column_without_spread_becomes_zero() -> None:
    np.testing.assert_array_equal(min_max_scaled(np.array([[3.0, 1.0], [3.0, 2.0]])), [[0, 0], [0, 1]])


@given(arrays(np.float64, (5, 3), elements=st.floats(0, 50)), st.floats(0.1, 10), st.floats(0, 5))
def test_scaled_losses_fill_zero_to_one_and_forget_units(
    matrix: NDArray[np.float64], factor: float, offset: float
) -> None:
    # Losses of a model are not known to more digits; rounding must not turn equal columns into different ones.
    matrix = matrix.round(3)
    scaled = min_max_scaled(matrix)
    assert ((scaled >= 0) & (scaled <= 1)).all()
    spread = np.ptp(matrix, axis=0) > 0
    assert (scaled[:, spread].max(axis=0) == 1).all()
    assert (scaled[:, ~spread] == 0).all()
    np.testing.assert_allclose(min_max_scaled(matrix * factor + offset)[:, spread], scaled[:, spread], atol=1e-9)


# -- the vote --------------------------------------------------------------------------------------------------------


def test_the_most_frequent_set_wins_although_no_client_of_another_is_named_more_often() -> None:
    """Client 0 is named by most mixtures, but never in the same company."""
    sets = [flags(0, 1, of=4), flags(0, 2, of=4), flags(0, 3, of=4), flags(1, 2, of=4), flags(1, 2, of=4)]
    vote = winning_set(sets)
    np.testing.assert_array_equal(vote.noisy, flags(1, 2, of=4))
    np.testing.assert_allclose(vote.share, [0.6, 0.6, 0.6, 0.2])


def test_the_earliest_set_wins_a_tie() -> None:
    vote = winning_set([flags(2, of=3), flags(0, of=3), flags(0, of=3), flags(2, of=3)])
    np.testing.assert_array_equal(vote.noisy, flags(2, of=3))


@pytest.mark.parametrize(("clean", "noisy"), [(1, 4), (4, 1), (2, 3), (10, 20), (15, 5), (1, 1)])
@pytest.mark.parametrize("classes", [2, 4])
def test_separate_groups_are_found_exactly(clean: int, noisy: int, classes: int) -> None:
    vote = vote_noisy(min_max_scaled(losses(clean, noisy, classes)), VOTE)
    np.testing.assert_array_equal(vote.noisy, np.arange(clean + noisy) >= clean)
    assert set(vote.share.tolist()) == {0.0, 1.0}


def test_one_mixture_per_seed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(values: Any, seed: int, covariance: str, regularization: float) -> NDArray[np.bool_]:
        asked.append((seed, covariance, regularization))
        return flags(0, of=len(values))

    monkeypatch.setattr("fedsir.methods.loss_detection.high_group", record)
    vote_noisy(np.zeros((9, 2)), LossDetection())
    assert asked == [(seed, "tied", 1e-2) for seed in range(9)]
    asked.clear()
    vote_noisy(np.zeros((10, 2)), LossDetection(votes=3))
    assert asked == [(seed, "full", 1e-6) for seed in range(3)]


@pytest.mark.parametrize(
    ("settings", "clients", "expected"),
    [
        ({}, 5, ("tied", 1e-2)),
        ({}, 20, ("full", 1e-6)),
        ({"covariance": "full"}, 5, ("full", 1e-6)),
        ({"covariance": "tied"}, 30, ("tied", 1e-2)),
        ({"regularization": 0.5}, 30, ("full", 0.5)),
    ],
)
def test_covariance_follows_the_number_of_clients(settings: Any, clients: int, expected: Any) -> None:
    assert LossDetection(**settings).mixture(clients) == expected


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_a_verdict_has_the_vote_and_no_spectra() -> None:
    verdict = detect(losses(3, 5, classes=3), VOTE)
    np.testing.assert_array_equal(verdict.clean, [True] * 3 + [False] * 5)
    np.testing.assert_array_equal(verdict.p_clean, [1.0] * 3 + [0.0] * 5)
    assert verdict.descriptors.shape == (8, 3)
    assert verdict.similarity.shape == (8, 3, 3)
    assert np.isnan(verdict.descriptors).all()
    assert np.isnan(verdict.similarity).all()
    assert verdict.notes == ()


def test_the_verdict_does_not_depend_on_the_order_of_clients() -> None:
    values = losses(4, 8, seed=3)
    order = np.random.default_rng(1).permutation(12)
    np.testing.assert_array_equal(detect(values[order], VOTE).clean, detect(values, VOTE).clean[order])


def test_single_class_clients_are_judged_by_the_class_they_have() -> None:
    values = losses(6, 6, classes=3)
    values[0, 1:] = NAN
    values[11, :2] = NAN
    clean = detect(values, VOTE).clean
    np.testing.assert_array_equal(clean[:11], [True] * 6 + [False] * 5)
    # High in its only class and filled with the lowest losses elsewhere, it stands between the groups.
    assert clean[0]


def test_equal_losses_leave_everybody_clean() -> None:
    verdict = detect(np.full((5, 4), 1.3), VOTE)
    assert verdict.clean.all()
    assert verdict.notes == ("every client counts as clean.",)


@pytest.mark.parametrize("values", [np.full((5, 4), NAN), np.full((5, 4), np.inf), np.array([[0.3, 0.9]])])
def test_without_anything_to_compare_everybody_is_clean(values: NDArray[np.float64]) -> None:
    assert detect(values, VOTE).clean.all()


def test_a_client_without_losses_is_named() -> None:
    values = losses(4, 4)
    values[1] = NAN
    verdict = detect(values, VOTE)
    assert verdict.clean[1]
    assert verdict.notes == ("clients without any loss (1) look clean for want of evidence.",)


def test_if_everybody_is_noisy_the_best_tenth_is_declared_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedsir.methods.loss_detection.high_group", lambda values, *_: np.ones(len(values), dtype=np.bool_)
    )
    values = losses(3, 18)
    values[[2, 7, 20]] = [[0.01], [0.02], [0.03]]
    verdict = detect(values, VOTE)
    assert np.flatnonzero(verdict.clean).tolist() == [2, 7, 20]
    assert verdict.notes == ("the vote found nobody clean: the clients with the lowest losses were declared clean.",)


@pytest.mark.parametrize(("clients", "forced"), [(1, 1), (5, 1), (10, 1), (11, 2), (30, 3)])
def test_a_tenth_is_rounded_up(clients: int, forced: int) -> None:
    noisy = with_somebody_clean(np.ones(clients, dtype=np.bool_), np.arange(clients)[::-1])
    assert np.flatnonzero(~noisy).tolist() == list(range(clients - forced, clients))


def test_who_is_clean_already_is_left_as_it_is() -> None:
    noisy = flags(0, 1, of=3)
    np.testing.assert_array_equal(with_somebody_clean(noisy, np.array([0.0, 1.0, 2.0])), noisy)


@given(st.integers(2, 12), st.integers(2, 5), st.integers(0, 100))
def test_there_is_always_a_clean_client(clients: int, classes: int, seed: int) -> None:
    """Also on homogeneous federations and with absent classes."""
    rng = np.random.default_rng(seed)
    values = rng.normal(1.0, 0.1, (clients, classes))
    values[rng.random(values.shape) < 0.3] = NAN
    verdict = detect(values, LossDetection(votes=2))
    assert verdict.clean.any()
    assert np.isfinite(verdict.p_clean).all()
