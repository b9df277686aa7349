"""Relabelling: the two criteria, the rules and every case in which nothing may change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir.spectral.decomposition import class_spectra
from fedsir.spectral.references import ClassReference, ReferenceSettings, class_references
from fedsir.spectral.relabeling import relabel, spectral_scores

EYE = np.eye(3)
Z = np.array([[0.9, 0.1, 0.2]])


def along(leading: int, residual: list[int]) -> ClassReference:
    return ClassReference(EYE[leading], EYE[residual], (0,), 1.0)


AGREEING = (along(0, [1]), along(1, [0]))
DISAGREEING = (along(0, [2]), along(1, [1]))


def test_scores_of_a_known_feature() -> None:
    alignment, leakage = spectral_scores(Z, AGREEING)
    np.testing.assert_allclose(alignment, [[0.9, 0.1]])
    np.testing.assert_allclose(leakage, [[0.1, 0.9]])


def test_agreement_changes_the_label() -> None:
    outcome = relabel(Z, AGREEING, np.array([1]))
    assert outcome.targets.tolist() == [0]
    assert outcome.agreement.tolist() == [True]
    length = np.linalg.norm(Z)
    assert outcome.representative_margin[0] == pytest.approx(0.8 / length)
    assert outcome.residual_margin[0] == pytest.approx(0.8 / length)


def test_disagreement_keeps_it_and_single_criteria_follow_theirs() -> None:
    _, leakage = spectral_scores(Z, DISAGREEING)
    np.testing.assert_allclose(leakage, [[0.2, 0.1]])
    outcome = relabel(Z, DISAGREEING, np.array([1]))
    assert (outcome.targets.tolist(), outcome.agreement.tolist()) == ([1], [False])
    assert (outcome.representative.tolist(), outcome.residual.tolist()) == ([0], [1])
    assert relabel(Z, DISAGREEING, np.array([1]), rule="sr").targets.tolist() == [0]
    assert relabel(Z, DISAGREEING, np.array([0]), rule="sn").targets.tolist() == [1]


def test_root_mean_square_uses_the_actual_number_of_directions() -> None:
    wide, narrow = along(0, [0, 1]), along(1, [1])
    _, leakage = spectral_scores(np.array([[1.0, 1.0, 0.0]]), (wide, narrow))
    np.testing.assert_allclose(leakage, [[1.0, 1.0]])


@given(
    st.lists(st.lists(st.floats(0.01, 5), min_size=3, max_size=3), min_size=1, max_size=10),
    st.floats(1e-6, 1e6),
)
def test_scaling_features_changes_no_decision(rows: list[list[float]], scale: float) -> None:
    z, observed = np.array(rows), np.zeros(len(rows), dtype=np.int64)
    a, b = relabel(z, AGREEING, observed), relabel(z * scale, AGREEING, observed)
    clear = (a.representative_margin > 1e-9) & (a.residual_margin > 1e-9)
    np.testing.assert_array_equal(a.targets[clear], b.targets[clear])
    np.testing.assert_allclose(a.residual_margin, b.residual_margin, atol=1e-9)


def test_signs_of_references_change_nothing() -> None:
    rng = np.random.default_rng(0)
    q, p = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    z, observed = rng.normal(size=(50, 6)), rng.integers(0, 2, 50)
    plain = (ClassReference(q[0], q[1:3], (0,), 1.0), ClassReference(p[0], p[1:4], (0,), 1.0))
    flipped = tuple(ClassReference(-r.leading, -r.residual, (0,), 1.0) for r in plain)
    np.testing.assert_array_equal(relabel(z, plain, observed).targets, relabel(z, flipped, observed).targets)


def test_unreferenced_classes_are_no_candidates_and_keep_their_images() -> None:
    references = (*AGREEING, None)
    z = np.repeat(Z, 3, axis=0)
    kept = relabel(z, references, np.array([0, 1, 2]))
    assert kept.targets.tolist() == [0, 0, 2]
    assert kept.agreement.tolist() == [True, True, False]
    moved = relabel(z, references, np.array([0, 1, 2]), keep_unreferenced=False)
    assert moved.targets.tolist() == [0, 0, 0]
    alignment, leakage = spectral_scores(z, references)
    assert np.isnan(alignment[:, 2]).all()
    assert np.isnan(leakage[:, 2]).all()


@pytest.mark.parametrize("references", [(), (None, None), (AGREEING[0], None)])
def test_fewer_than_two_references_change_nothing(references: tuple[ClassReference | None, ...]) -> None:
    observed = np.array([1, 0])
    outcome = relabel(np.repeat(Z, 2, axis=0), references, observed)
    assert outcome.targets.tolist() == [1, 0]
    assert not outcome.agreement.any()
    assert outcome.representative.tolist() == [-1, -1]
    assert np.isnan(outcome.residual_margin).all()
    assert not np.shares_memory(outcome.targets, observed)


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0], [np.nan, 1.0, 0.0], [np.inf, 0.0, 0.0]])
@pytest.mark.parametrize("rule", ["agree", "sr", "sn"])
def test_features_without_direction_keep_their_label(row: list[float], rule: Any) -> None:
    outcome = relabel(np.array([row, Z[0]]), AGREEING, np.array([1, 1]), rule=rule)
    assert outcome.targets.tolist() == [1, 0]
    assert outcome.agreement.tolist() == [False, True]
    assert np.isnan(outcome.representative_margin[0])


def test_a_client_without_images() -> None:
    outcome = relabel(np.empty((0, 3)), AGREEING, np.empty(0, dtype=np.int64))
    assert outcome.targets.shape == (0,)


def test_published_relabelling(golden: Any) -> None:
    arrays = golden.arrays
    references = class_references(golden.spectra[:2], ReferenceSettings())
    if golden.number == 1:
        # The published residual bases are filled up with arbitrary directions here: take them as given.
        bases = [np.linalg.eigh(p)[1][:, -12:].T for p in arrays["reference_residual_projector"]]
        references = tuple(
            ClassReference(r.leading, basis, (0, 1), 1.0)
            for r, basis in zip(references, bases, strict=True)
            if r is not None
        )
    outcome = relabel(arrays["features_2"], references, arrays["observed_2"])
    np.testing.assert_array_equal(outcome.representative, arrays["relabel_client2_rep"])
    np.testing.assert_array_equal(outcome.residual, arrays["relabel_client2_res"])
    np.testing.assert_array_equal(outcome.targets, arrays["relabel_client2_target"])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(["agree", "sr", "sn"]))
def test_relabelling_of_separated_classes_repairs_labels(seed: int, rule: Any) -> None:
    rng = np.random.default_rng(seed)
    centres = np.eye(3, 20) * 5 + 0.1

    def images(labels: np.ndarray) -> np.ndarray:
        return np.maximum(centres[labels] + rng.normal(0, 0.4, (len(labels), 20)), 0).astype(np.float32)

    clean = np.repeat(np.arange(3), 60)
    references = class_references([class_spectra(images(clean), clean, 3)], ReferenceSettings())
    truth = rng.integers(0, 3, 120)
    observed = np.where(rng.random(120) < 0.6, (truth + rng.integers(1, 3, 120)) % 3, truth)
    outcome = relabel(images(truth), references, observed, rule=rule)
    assert set(np.unique(outcome.targets).tolist()) <= {0, 1, 2}
    if rule == "agree":
        np.testing.assert_array_equal(outcome.targets[~outcome.agreement], observed[~outcome.agreement])
    assert (outcome.targets == truth).mean() > (observed == truth).mean()
