"""Weighted and distance-aware averages of flat weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsir import aggregation
from fedsir.aggregation import (
    EXACT_PAIRS,
    RunningMean,
    distance_aware_mean,
    distance_aware_weights,
    is_finite,
    nearest_clean_distances,
    tensor_distances,
    usable,
    weighted_mean,
)
from fedsir.models.flat import FlatEntry, FlatSchema, FlatWeights

GOLDEN = Path(__file__).parent / "data_golden"
SCALAR = FlatSchema((FlatEntry("w", (), 0, True),), ("n",))


def flat(*values: float, counter: int = 0) -> FlatWeights:
    return FlatWeights(np.array(values, dtype=np.float32), np.array([counter], dtype=np.int64))


def value(state: FlatWeights | None) -> float:
    assert state is not None
    return float(state.values[0])


def random_states(count: int, size: int, seed: int = 0) -> list[FlatWeights]:
    rng = np.random.default_rng(seed)
    return [FlatWeights(rng.normal(size=size).astype(np.float32), np.array([k], dtype=np.int64)) for k in range(count)]


def test_sample_counts_weigh() -> None:
    assert value(weighted_mean([flat(0.0), flat(4.0)], [1, 3])) == 3.0


def test_identical_states_come_back() -> None:
    state = random_states(1, 100_000)[0]
    mean = weighted_mean([state] * 7, [3, 1, 4, 1, 5, 9, 2])
    assert mean is not None
    np.testing.assert_array_equal(mean.values, state.values)


def test_one_client_is_returned_as_it_is() -> None:
    state = random_states(1, 50)[0]
    mean = weighted_mean([state], [17])
    assert mean is not None
    np.testing.assert_array_equal(mean.values, state.values)
    np.testing.assert_array_equal(mean.counters, state.counters)


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(5)))
def test_order_of_clients_changes_rounding_at_most(order: list[int]) -> None:
    states, sizes = random_states(5, 70_000), np.array([10, 200, 3, 44, 5])
    a, b = weighted_mean(states, sizes), weighted_mean([states[i] for i in order], sizes[order])
    assert a is not None
    assert b is not None
    np.testing.assert_allclose(a.values, b.values, rtol=1.2e-7, atol=1e-9)
    np.testing.assert_array_equal(b.counters, [4])


def test_slices_do_not_show() -> None:
    states, sizes = random_states(4, 100_001), np.array([1.0, 2.0, 3.0, 4.0])
    mean = weighted_mean(states, sizes)
    assert mean is not None
    direct = sum(w * s.values.astype(np.float64) for w, s in zip(sizes / 10, states, strict=True))
    np.testing.assert_allclose(mean.values, direct, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_states_are_dropped_with_weight_and_counters(bad: float) -> None:
    states = [flat(1.0, 2.0, counter=5), flat(bad, 0.0, counter=99), flat(3.0, 2.0, counter=7)]
    assert [is_finite(s) for s in states] == [True, False, True]
    mean = weighted_mean(states, [1, 1000, 1])
    assert mean is not None
    np.testing.assert_array_equal(mean.values, [2.0, 2.0])
    assert mean.counters.tolist() == [7]


def test_nothing_left_is_none() -> None:
    assert weighted_mean([flat(np.nan)], [1]) is None
    assert weighted_mean([flat(1.0)], [0]) is None
    assert distance_aware_mean(SCALAR, [flat(np.nan)], [1], np.array([True])) is None


def test_empty_clients_take_no_part() -> None:
    states = [flat(1.0, counter=9), flat(2.0, counter=1)]
    assert usable(states, [0, 4]).tolist() == [False, True]
    mean = weighted_mean(states, [0, 4])
    assert mean is not None
    assert mean.counters.tolist() == [1]


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [np.nan, 1.0], [1.0]])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weight"):
        weighted_mean([flat(0.0), flat(1.0)], weights)


def test_distance_sums_norms_per_tensor() -> None:
    schema = FlatSchema((FlatEntry("a", (2,), 0, True), FlatEntry("b", (2,), 2, True)), ())
    assert tensor_distances(schema, flat(3.0, 4.0, 0.0, 5.0), flat(0, 0, 0, 0)) == pytest.approx(10.0)


def test_buffers_count_only_on_request() -> None:
    schema = FlatSchema((FlatEntry("w", (1,), 0, True), FlatEntry("running_var", (1,), 1, False)), ())
    a, b = flat(0.0, 0.0), flat(3.0, 100.0)
    assert tensor_distances(schema, a, b) == pytest.approx(3.0)
    assert tensor_distances(schema, a, b, include_buffers=True) == pytest.approx(103.0)


def test_daagg_of_three_scalars() -> None:
    result = distance_aware_mean(
        SCALAR, [flat(0.0), flat(1.0), flat(2.0)], [100, 100, 200], np.array([True, False, False])
    )
    assert result is not None
    np.testing.assert_allclose(result.distances, [0, 1, 2])
    np.testing.assert_allclose(result.weights, [0.426933, 0.258948, 0.314120], atol=1e-6)
    assert value(result.state) == pytest.approx(0.887187, abs=1e-6)


@pytest.mark.parametrize("clean", [[True] * 3, [False] * 3])
def test_daagg_without_two_groups_is_the_weighted_mean(clean: list[bool]) -> None:
    states, sizes = random_states(3, 10), [5, 1, 2]
    schema = FlatSchema((FlatEntry("w", (10,), 0, True),), ("n",))
    result, plain = distance_aware_mean(schema, states, sizes, np.array(clean)), weighted_mean(states, sizes)
    assert result is not None
    assert plain is not None
    np.testing.assert_array_equal(result.state.values, plain.values)


def test_daagg_at_distance_zero_is_the_weighted_mean() -> None:
    result = distance_aware_mean(SCALAR, [flat(2.0)] * 3, [1, 2, 1], np.array([True, False, False]))
    assert result is not None
    np.testing.assert_array_equal(result.weights, [0.25, 0.5, 0.25])


def test_diverged_client_is_neither_anchor_nor_farthest() -> None:
    states = [flat(0.0), flat(np.nan), flat(1.0), flat(np.inf)]
    result = distance_aware_mean(SCALAR, states, [1, 1, 1, 1], np.array([True, True, False, False]))
    assert result is not None
    assert np.isnan(result.distances).tolist() == [False, True, False, True]
    expected = np.array([1.0, 0.0, np.exp(-1.0), 0.0])
    np.testing.assert_allclose(result.weights, expected / expected.sum(), rtol=1e-9)
    assert np.isfinite(value(result.state))


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 1e3), min_size=2, max_size=6),
    st.floats(1e-3, 1e6),
)
def test_farthest_keeps_the_same_share_at_every_scale(distances: list[float], scale: float) -> None:
    d = np.array([0.0, *distances])
    omega = distance_aware_weights(np.ones(len(d)), d * scale)
    assert omega.sum() == pytest.approx(1.0)
    assert omega[int(d.argmax())] / omega[0] == pytest.approx(np.exp(-1.0), rel=1e-6)


def test_nearest_clean_client_counts() -> None:
    states = [flat(0.0), flat(10.0), flat(7.0)]
    np.testing.assert_allclose(nearest_clean_distances(SCALAR, states, np.array([True, True, False])), [0.0, 0.0, 3.0])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_averages_of_the_published_code(number: int) -> None:
    golden = np.load(GOLDEN / f"spectral_{number}.npz")

    def joined(prefix: str) -> np.ndarray:
        return np.concatenate([golden[f"{prefix}_a"].ravel(), golden[f"{prefix}_b"]])

    schema = FlatSchema((FlatEntry("a", (5, 7), 0, True), FlatEntry("b", (3,), 35, True)), ())
    states = [FlatWeights(joined(f"w{k}"), np.empty(0, dtype=np.int64)) for k in range(5)]
    sizes, clean = golden["sizes"], np.array([True, True, False, False, False])
    mean, aware = weighted_mean(states, sizes), distance_aware_mean(schema, states, sizes, clean)
    assert mean is not None
    assert aware is not None
    np.testing.assert_allclose(mean.values, joined("fedavg"), atol=1e-6)
    np.testing.assert_allclose(aware.state.values, joined("daagg"), atol=1e-6)


# -- one after the other -----------------------------------------------------------------------------------------------


def as_before(states: list[FlatWeights], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """The mean as results on record were made: the sum of shares, in double precision and client order."""
    total = np.zeros(states[0].values.size)
    for state, share in zip(states, weights / weights.sum(), strict=True):
        total += state.values.astype(np.float64) * share
    return total.astype(np.float32)


def added(states: list[FlatWeights], weights: NDArray[np.float64], expected: NDArray[np.float64]) -> Any:
    mean = RunningMean(expected)
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1000),
    st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=20),
    st.sampled_from([1, 100, 32_768, 70_000]),
)
def test_means_of_results_on_record_are_the_same_bits(seed: int, weights: list[float], size: int) -> None:
    states, given_weights = random_states(len(weights), size, seed), np.array(weights)
    for mean in (weighted_mean(states, given_weights), added(states, given_weights, given_weights)):
        assert mean is not None
        np.testing.assert_array_equal(mean.values, as_before(states, given_weights))
        assert mean.counters.tolist() == [len(weights) - 1]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=20))
def test_one_after_the_other_and_together_are_the_same_bits(clients: list[tuple[int, bool]]) -> None:
    """Also where clients are dropped, of which nobody knew before."""
    states = random_states(len(clients), 1000)
    for state, (_, diverged) in zip(states, clients, strict=True):
        if diverged:
            state.values[7] = np.nan
    weights = np.array([w for w, _ in clients], dtype=np.float64)
    together, one_by_one = weighted_mean(states, weights), added(states, weights, weights)
    if together is None:
        assert one_by_one is None
        assert not usable(states, weights).any()
        return
    np.testing.assert_array_equal(one_by_one.values, together.values)
    np.testing.assert_array_equal(one_by_one.counters, together.counters)
    kept = usable(states, weights)
    only = as_before([s for s, k in zip(states, kept, strict=True) if k], weights[kept])
    np.testing.assert_allclose(together.values, only, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("expected", [[], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [5e3, 1e-3, 7.0], [1.0]])
def test_what_was_expected_decides_rounding_at_most(expected: list[float]) -> None:
    states, weights = random_states(3, 100), np.array([1.0, 5.0, 2.0])
    mean = added(states, weights, np.array(expected))
    np.testing.assert_allclose(mean.values, as_before(states, weights), rtol=1e-6, atol=1e-7)


def test_a_sum_takes_no_state_of_another_network_and_no_impossible_weight() -> None:
    mean = RunningMean([1.0, 1.0])
    mean.add(flat(1.0), 1.0)
    with pytest.raises(ValueError, match="different networks"):
        mean.add(flat(1.0, 2.0), 1.0)
    with pytest.raises(ValueError, match="not negative"):
        RunningMean([1.0, -1.0])


def test_the_mean_does_not_change_what_it_is_given() -> None:
    states = random_states(3, 50)
    before = [(s.values.copy(), s.counters.copy()) for s in states]
    mean = added(states, np.ones(3), np.ones(3))
    mean.values[:], mean.counters[:] = 0, 99
    for state, (values, counters) in zip(states, before, strict=True):
        np.testing.assert_array_equal(state.values, values)
        np.testing.assert_array_equal(state.counters, counters)


# -- distances of many pairs -------------------------------------------------------------------------------------------


WIDE = FlatSchema(
    (FlatEntry("a", (9000,), 0, True), FlatEntry("b", (), 9000, True), FlatEntry("mean", (40,), 9001, False)), ("n",)
)


def trained_apart(count: int, apart: float, seed: int = 0) -> list[FlatWeights]:
    """States that have nearly everything in common."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=9041)
    return [
        FlatWeights((common + apart * rng.normal(size=9041)).astype(np.float32), np.array([k], dtype=np.int64))
        for k in range(count)
    ]


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-6])
def test_products_give_the_distances_of_differences(
    monkeypatch: pytest.MonkeyPatch, apart: float, include_buffers: bool
) -> None:
    states, clean = trained_apart(30, apart), np.arange(30) % 3 == 0
    exact = nearest_clean_distances(WIDE, states, clean, include_buffers)
    monkeypatch.setattr(aggregation, "EXACT_PAIRS", 0)
    monkeypatch.setattr(aggregation, "tensor_distances", None)
    products = nearest_clean_distances(WIDE, states, clean, include_buffers)
    np.testing.assert_allclose(products, exact, rtol=1e-9)


def test_products_of_states_that_nearly_coincide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones are at distance 0, close ones keep their digits although the first clean client is far away."""
    first, *others = trained_apart(8, 1.0)
    near = trained_apart(4, 1e-5, seed=3)
    states = [first, *others, *near, near[0]]
    clean = np.array([True] * 3 + [False] * 5 + [True, False, False, False, False])
    exact = nearest_clean_distances(WIDE, states, clean)
    monkeypatch.setattr(aggregation, "EXACT_PAIRS", 0)
    products = nearest_clean_distances(WIDE, states, clean)
    np.testing.assert_allclose(products, exact, rtol=1e-9, atol=0)
    assert products[-1] == 0.0
    assert 0 < products[-2] < 1e-2 * products[4]


def test_few_pairs_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(aggregation, "tensor_distances", lambda *_: asked.append(1) or 1.0)
    side = int(EXACT_PAIRS**0.5)
    states = trained_apart(2 * side + 1, 1.0)
    nearest_clean_distances(WIDE, states[:-1], np.arange(2 * side) < side)
    assert len(asked) == side * side == EXACT_PAIRS
    nearest_clean_distances(WIDE, states, np.arange(2 * side + 1) < side)
    assert len(asked) == EXACT_PAIRS
