from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mlflow_tracking.report.statistics import bootstrap_over_seeds, friedman, holm, paired, ranks, summarised

VALUES = st.floats(0, 1, allow_nan=False)
TABLES = st.integers(1, 5).flatmap(
    lambda seeds: st.lists(st.lists(VALUES, min_size=seeds, max_size=seeds), min_size=1, max_size=6)
)
PS = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def scores(table: Any) -> dict[tuple[Any, int], float]:
    return {(f"c{i}", j): v for i, row in enumerate(table) for j, v in enumerate(row)}


@given(TABLES)
def test_a_whole_table_has_its_plain_mean_and_the_spread_of_its_columns(table: list[list[float]]) -> None:
    found = summarised(scores(table))
    array = np.array(table)
    assert found is not None
    assert found.mean == pytest.approx(array.mean())
    assert (found.conditions, found.runs) == (array.shape[0], array.size)
    assert found.seeds == found.complete == tuple(range(array.shape[1]))
    if array.shape[1] == 1:
        assert (found.sd, found.low, found.high) == (None, None, None)
    else:
        of_seeds = array.mean(axis=0)
        assert found.sd == pytest.approx(of_seeds.std(ddof=1))
        assert found.low is not None
        assert found.high is not None
        assert of_seeds.min() - 1e-9 <= found.low <= found.high <= of_seeds.max() + 1e-9


@given(TABLES, st.randoms(use_true_random=False))
def test_order_of_runs_does_not_matter(table: list[list[float]], random: Any) -> None:
    items = list(scores(table).items())
    random.shuffle(items)
    one, other = summarised(scores(table)), summarised(dict(items))
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(one.mean)
    assert other.sd == (None if one.sd is None else pytest.approx(one.sd, abs=1e-12))


def test_a_condition_with_more_seeds_weighs_no_more() -> None:
    found = summarised({("a", 0): 0.0, ("a", 1): 0.0, ("a", 2): 0.0, ("b", 0): 1.0})
    assert found is not None
    assert found.mean == 0.5
    assert found.complete == (0,)
    assert found.sd is None


def test_undefined_figures_are_left_out() -> None:
    found = summarised({("a", 0): 0.2, ("b", 0): math.nan})
    assert found is not None
    assert (found.mean, found.conditions) == (0.2, 1)
    assert summarised({("a", 0): math.nan}) is None
    assert summarised({}) is None


def test_the_bootstrap_is_that_of_the_mean_of_seeds() -> None:
    """All 27 equally likely draws of three seeds give its distribution."""
    values = [0.1, 0.5, 0.6]
    means = sorted(np.mean(draw) for draw in product(values, repeat=3))
    low, high = bootstrap_over_seeds(values)
    assert (low, high) == pytest.approx((means[0], means[-1]))
    assert bootstrap_over_seeds(values) == (low, high)


def test_ranks_share_what_is_equal() -> None:
    np.testing.assert_array_equal(ranks(np.array([[0.9, 0.5, 0.5, 0.1]])), [[1, 2.5, 2.5, 4]])


@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=8))
def test_ranks_of_a_condition_add_up(table: list[list[float]]) -> None:
    np.testing.assert_allclose(ranks(np.array(table)).sum(axis=1), 6)


def test_friedman_needs_methods_conditions_and_a_difference() -> None:
    rng = np.random.default_rng(0)
    block = rng.random((10, 4)) + np.array([0, 0, 0, 1])
    found = friedman(block)
    assert found is not None
    assert found.p < 0.01
    assert found.statistic == pytest.approx(stats.friedmanchisquare(*block.T).statistic)
    assert friedman(block[:, :2]) is None
    assert friedman(block[:1]) is None
    assert friedman(np.ones((5, 3))) is None


def test_pairs_are_conditions_and_seeds_in_common() -> None:
    ours = {("a", 0): 0.9, ("a", 1): 0.7, ("b", 0): 0.5, ("c", 0): 0.1}
    theirs = {("a", 0): 0.8, ("a", 1): 0.6, ("a", 2): 0.0, ("b", 0): 0.5, ("d", 0): 1.0}
    found = paired(ours, theirs)
    assert found is not None
    assert (found.conditions, found.better, found.equal, found.worse) == (2, 1, 1, 0)
    assert found.difference == pytest.approx(0.05)
    assert paired(ours, {("z", 0): 1.0}) is None


def test_equal_methods_have_no_p() -> None:
    same = {(f"c{i}", 0): 0.1 * i for i in range(8)}
    found = paired(same, same)
    assert found is not None
    assert found.p is None
    assert found.equal == 8


def test_the_test_is_wilcoxons() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.random(12), rng.random(12)
    found = paired({(i, 0): v for i, v in enumerate(left)}, {(i, 0): v for i, v in enumerate(right)})
    assert found is not None
    assert found.p == pytest.approx(stats.wilcoxon(left, right).pvalue)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@given(PS)
def test_holm_lies_between_the_raw_values_and_bonferroni_and_keeps_their_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    for raw, new in zip(p_values, corrected, strict=True):
        assert raw <= new + 1e-12
        assert new <= min(1.0, raw * len(p_values)) + 1e-12
    in_order = [corrected[i] for i in sorted(range(len(p_values)), key=lambda i: p_values[i])]
    assert in_order == sorted(in_order)
    smallest = min(range(len(p_values)), key=lambda i: p_values[i])
    assert corrected[smallest] == pytest.approx(min(1.0, len(p_values) * p_values[smallest]))
