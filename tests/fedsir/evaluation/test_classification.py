"""Classification figures against scikit-learn and hand-computed cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from fedsir.evaluation.classification import (
    bootstrap_interval,
    classification_figures,
    confusion_matrix,
    mean_log_loss,
)

LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60)


@settings(deadline=None)
@given(LABELS)
def test_figures_agree_with_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, predicted = np.array(pairs, dtype=np.int64).T
    figures = classification_figures(confusion_matrix(truth, predicted, 4))
    present = np.unique(truth)
    np.testing.assert_array_equal(figures.confusion, metrics.confusion_matrix(truth, predicted, labels=range(4)))
    assert figures.accuracy == pytest.approx(metrics.accuracy_score(truth, predicted))
    expected = metrics.f1_score(truth, predicted, labels=present, average="macro", zero_division=0)
    assert figures.macro_f1 == pytest.approx(expected)
    recall = metrics.recall_score(truth, predicted, labels=present, average=None, zero_division=0)
    np.testing.assert_allclose(figures.recall[present], recall)
    assert figures.balanced_accuracy == pytest.approx(recall.mean())
    assert np.isnan(np.delete(figures.recall, present)).all()


def test_shards_add_up() -> None:
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    parts = confusion_matrix(truth[:20], predicted[:20], 3) + confusion_matrix(truth[20:], predicted[20:], 3)
    np.testing.assert_array_equal(parts, confusion_matrix(truth, predicted, 3))


def test_nothing_evaluated_is_nan() -> None:
    empty = np.zeros((3, 3), dtype=np.int64)
    figures = classification_figures(empty)
    assert np.isnan([figures.accuracy, figures.macro_f1, figures.balanced_accuracy]).all()
    assert np.isnan(bootstrap_interval(empty, 10, 0.95, np.random.default_rng(0))).all()


@pytest.mark.parametrize("labels", [[-1, 0], [0, 3]])
def test_labels_outside_the_classes_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"0\.\.2"):
        confusion_matrix(np.array(labels), np.array([0, 0]), 3)


def test_bootstrap_interval_has_the_width_of_the_normal_approximation() -> None:
    confusion = np.array([[800, 100], [100, 0]], dtype=np.int64)
    low, high = bootstrap_interval(confusion, 4000, 0.95, np.random.default_rng(0))
    assert low < 0.8 < high
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(0.8 * 0.2 / 1000), rel=0.08)
    again = bootstrap_interval(confusion, 4000, 0.95, np.random.default_rng(0))
    assert again == (low, high)


def test_bootstrap_of_a_perfect_model_is_a_point() -> None:
    rng = np.random.default_rng(0)
    assert bootstrap_interval(np.diag([5, 6]), 100, 0.95, rng) == (1.0, 1.0)
    assert bootstrap_interval(np.diag([5, 6]), 100, 0.95, rng, "macro_f1") == (1.0, 1.0)


def test_mean_log_loss() -> None:
    assert mean_log_loss(np.zeros((2, 4), dtype=np.float32), np.array([1, 3])) == pytest.approx(np.log(4))
    assert mean_log_loss(np.array([[1e6, 0.0]]), np.array([1])) == pytest.approx(1e6)
    assert np.isnan(mean_log_loss(np.empty((0, 4)), np.empty(0, dtype=np.int64)))
    assert np.isnan(mean_log_loss(np.array([[np.nan, 0.0]]), np.array([0])))
