"""Figures of relabelling: definitions, identities between them, undefined cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir.evaluation.relabeling import relabeling_figures


def test_figures_of_a_small_case() -> None:
    truth = (np.array([0, 0, 1, 1, 2]), np.array([0]))
    observed = (np.array([0, 1, 1, 0, 0]), np.array([1]))
    corrected = (np.array([2, 0, 1, 2, 0]), np.array([0]))
    figures = relabeling_figures(truth, observed, corrected, np.array([True, False]))
    assert figures == pytest.approx(
        {"edit": 0.6, "recovery": 1 / 3, "precision": 1 / 3, "false_correction": 0.5, "residual": 0.6}
    )


def test_all_images_of_noisy_clients_are_pooled() -> None:
    truth = (np.zeros(9, dtype=np.int64), np.zeros(1, dtype=np.int64))
    observed = (np.zeros(9, dtype=np.int64), np.ones(1, dtype=np.int64))
    figures = relabeling_figures(truth, observed, truth, np.array([True, True]))
    assert figures["edit"] == pytest.approx(0.1)
    assert figures["recovery"] == figures["precision"] == 1.0
    assert figures["residual"] == 0.0


def test_empty_denominators_are_nan() -> None:
    truth = (np.array([0, 1]),)
    nobody = relabeling_figures(truth, truth, truth, np.array([False]))
    assert np.isnan(list(nobody.values())).all()
    untouched = relabeling_figures(truth, truth, truth, np.array([True]))
    assert np.isnan([untouched["recovery"], untouched["precision"]]).all()
    assert untouched["edit"] == untouched["false_correction"] == untouched["residual"] == 0.0


TRIPLES = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=80)


@settings(deadline=None)
@given(TRIPLES)
def test_residual_follows_from_noise_recovery_and_false_correction(
    triples: list[tuple[int, int, int]],
) -> None:
    y, before, after = np.array(triples, dtype=np.int64).T
    figures = relabeling_figures((y,), (before,), (after,), np.array([True]))
    eta = np.mean(before != y)
    still_wrong = eta * (1 - np.nan_to_num(figures["recovery"]))
    made_wrong = (1 - eta) * np.nan_to_num(figures["false_correction"])
    assert figures["residual"] == pytest.approx(still_wrong + made_wrong)
    set_right = figures["edit"] * np.nan_to_num(figures["precision"])
    assert set_right == pytest.approx(eta * np.nan_to_num(figures["recovery"]))
