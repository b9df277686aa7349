"""Figures where several client models are evaluated instead of one global model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsir.evaluation.classification import bootstrap_interval, bootstrap_mean_interval, mean_log_loss
from fedsir.evaluation.run import Evaluator
from fedsir.methods.base import MethodState


def evaluator(lab: Any, config: Any) -> tuple[Evaluator, Any]:
    condition = lab.condition(config)
    return Evaluator(config, condition.dataset, condition.federation, condition.truth), condition


def test_the_interval_of_a_mean_is_that_of_accuracy_for_one_model() -> None:
    correct = np.repeat([1.0, 0.0], [70, 30])
    low, high = bootstrap_mean_interval(correct, 4000, 0.95, np.random.default_rng(0))
    confusion = np.array([[70, 30], [0, 0]])
    assert (low, high) == pytest.approx(bootstrap_interval(confusion, 4000, 0.95, np.random.default_rng(1)), abs=0.01)


def test_images_are_drawn_with_all_of_their_predictions() -> None:
    """Ten models that agree on every image are no more certain than one."""
    correct = np.repeat([1.0, 0.0], [60, 40])
    one = bootstrap_mean_interval(correct, 500, 0.9, np.random.default_rng(2))
    ten = bootstrap_mean_interval(np.mean([correct] * 10, axis=0), 500, 0.9, np.random.default_rng(2))
    assert ten == pytest.approx(one)
    disagreeing = bootstrap_mean_interval(np.full(100, 0.6), 500, 0.9, np.random.default_rng(2))
    assert disagreeing == pytest.approx((0.6, 0.6))


def test_without_images_there_is_no_interval() -> None:
    assert np.isnan(bootstrap_mean_interval(np.empty(0), 10, 0.9, np.random.default_rng(0))).all()


def test_means_over_models_and_the_sum_of_their_confusions(lab: Any) -> None:
    config = lab.config("rhfl")
    judge, condition = evaluator(lab, config)
    truth = condition.dataset.test.labels
    right = np.eye(4, dtype=np.float32)[truth]
    constant = np.tile(np.array([1, 0, 0, 0], np.float32), (len(truth), 1))
    weights = condition.initial_weights
    figures = judge.evaluate(MethodState(weights, client_models=(weights, weights)), (right, constant))
    share = float((truth == 0).mean())
    assert figures.metrics["test/accuracy"] == pytest.approx((1 + share) / 2)
    assert figures.metrics["test/balanced_accuracy"] == pytest.approx((1 + 0.25) / 2)
    expected = (mean_log_loss(right, truth) + mean_log_loss(constant, truth)) / 2
    assert figures.metrics["test/loss"] == pytest.approx(expected)
    assert figures.confusion.sum() == 2 * len(truth)
    assert figures.confusion[:, 0].sum() == len(truth) + (truth == 0).sum()
    final = judge.final(figures)
    assert final["final/client_accuracy_sd"] == pytest.approx((1 - share) / 2)
    assert final["final/accuracy_low"] <= final["final/accuracy"] <= final["final/accuracy_high"]


def test_a_global_model_has_no_spread_over_clients(lab: Any) -> None:
    judge, condition = evaluator(lab, lab.config())
    logits = np.eye(4, dtype=np.float32)[condition.dataset.test.labels]
    final = judge.final(judge.evaluate(MethodState(condition.initial_weights), (logits,)))
    assert final == {"final/accuracy": 1.0, "final/accuracy_low": 1.0, "final/accuracy_high": 1.0}
