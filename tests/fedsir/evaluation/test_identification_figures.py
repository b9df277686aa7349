"""Figures of identification: counts, undefined cases and the margin."""

from __future__ import annotations

import numpy as np
import pytest

from fedsir.evaluation.identification import flipped_counts, identification_figures, identification_margin

NOISY = np.array([False, False, True, True, True])


def descriptors(means: list[float]) -> np.ndarray:
    mean = np.array(means)
    return np.stack([mean, mean**2, mean + 0.1], axis=1)


def test_counts_of_a_mixed_verdict() -> None:
    figures = identification_figures(NOISY, np.array([False, True, True, True, False]))
    assert figures["accuracy"] == pytest.approx(0.6)
    assert figures["clean_precision"] == figures["clean_recall"] == figures["clean_f1"] == 0.5
    assert figures["noisy_recall"] == pytest.approx(2 / 3)
    assert (figures["missed_noisy"], figures["accused_clean"]) == (1.0, 1.0)
    assert np.isnan(figures["margin"])


def test_perfect_verdict() -> None:
    figures = identification_figures(NOISY, NOISY, descriptors([0.4, 0.5, 0.8, 0.9, 0.95]))
    assert figures["accuracy"] == figures["clean_f1"] == figures["noisy_recall"] == 1.0
    assert figures["margin"] > 0


def test_empty_groups_are_undefined_not_perfect() -> None:
    all_clean = identification_figures(np.zeros(3, bool), np.zeros(3, bool), descriptors([0.1, 0.2, 0.3]))
    assert np.isnan(all_clean["noisy_recall"])
    assert np.isnan(all_clean["margin"])
    assert all_clean["accuracy"] == 1.0
    all_noisy = identification_figures(np.ones(3, bool), np.ones(3, bool))
    assert np.isnan([all_noisy[k] for k in ("clean_precision", "clean_recall", "clean_f1")]).all()


def test_margin_is_the_gap_of_extreme_scores_in_standard_deviations() -> None:
    single = np.array([[0.0], [2.0], [3.0], [5.0]])
    noisy = np.array([False, False, True, True])
    assert identification_margin(noisy, single) == pytest.approx(1.0 / single.std())
    assert identification_margin(~noisy, single) == pytest.approx(-5.0 / single.std())


def test_clients_without_descriptors_have_no_part_in_the_margin() -> None:
    values = descriptors([0.4, 0.5, 0.8, 0.9, 0.95])
    with_gap = np.insert(values, 2, np.nan, axis=0)
    assert identification_margin(np.insert(NOISY, 2, True), with_gap) == pytest.approx(
        identification_margin(NOISY, values)
    )


def test_noisy_clients_with_intact_labels_are_counted_apart() -> None:
    truth = tuple(np.array([0, 1]) for _ in range(5))
    observed = (*truth[:3], np.array([1, 1]), np.array([1, 0]))
    flipped = flipped_counts(truth, observed)
    assert flipped.tolist() == [0, 0, 0, 1, 2]
    figures = identification_figures(NOISY, np.array([False, False, False, True, False]), flipped=flipped)
    assert figures["missed_noisy"] == 2.0
    assert (figures["unflipped_noisy"], figures["unflipped_noisy_missed"]) == (1.0, 1.0)
