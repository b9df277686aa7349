"""Class references: projector means and who provides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsir.spectral.decomposition import ClassSpectrum, class_spectra
from fedsir.spectral.references import (
    ClassReference,
    ReferenceSettings,
    class_references,
    provider_weight,
)
from fedsir.spectral.relabeling import relabel

EYE = np.eye(4)


def held(leading: int, residual: list[int], count: int = 100, gap: float = 1.0, s1_ratio: float = 1.0) -> ClassSpectrum:
    """A spectrum along coordinate axes."""
    return ClassSpectrum(EYE[leading], EYE[residual], count, 1, gap, s1_ratio)


def reference(*spectra: ClassSpectrum | None, **settings: Any) -> ClassReference | None:
    return class_references([[s] for s in spectra], ReferenceSettings.model_validate(settings))[0]


def test_published_references(golden: Any) -> None:
    references = class_references(golden.spectra[:2], ReferenceSettings())
    for c, found in enumerate(references):
        assert found is not None
        expected = golden.arrays["reference_direction"][c]
        np.testing.assert_allclose(found.leading * np.sign(found.leading @ expected), expected, atol=1e-4)
        ours = found.residual.T @ found.residual
        published = golden.arrays["reference_residual_projector"][c]
        # Beyond the true rank the published projector holds arbitrary directions: compare within ours.
        np.testing.assert_allclose(ours @ published @ ours, ours, atol=1e-4)
        if golden.number == 3:
            assert len(found.residual) == 12
            np.testing.assert_allclose(ours, published, atol=1e-4)


def test_projector_mean_of_two_axes() -> None:
    found = reference(held(0, [2], count=100), held(1, [2], count=300))
    assert found is not None
    np.testing.assert_allclose(np.abs(found.leading), EYE[1], atol=1e-12)
    assert found.strength == pytest.approx(0.5)
    assert found.providers == (0, 1)


def test_signs_of_the_inputs_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    spectra = [
        ClassSpectrum(q[0], q[1:4], n, 1, 0.5, 0.5)
        for n in (40, 70, 100)
        for q in [np.linalg.qr(rng.normal(size=(8, 8)))[0]]
    ]
    flipped = [
        ClassSpectrum(-s.leading, s.residual * [[-1], [1], [-1]], s.count, 1, s.gap, s.s1_ratio) for s in spectra
    ]
    a, b = reference(*spectra), reference(*flipped)
    assert a is not None
    assert b is not None
    assert abs(a.leading @ b.leading) == pytest.approx(1.0)
    np.testing.assert_allclose(a.residual.T @ a.residual, b.residual.T @ b.residual, atol=1e-9)
    projector = sum(s.count / 210 * np.outer(s.leading, s.leading) for s in spectra)
    eigenvalues, eigenvectors = np.linalg.eigh(projector)
    assert abs(a.leading @ eigenvectors[:, -1]) == pytest.approx(1.0)
    assert a.strength == pytest.approx(eigenvalues[-1] - eigenvalues[-2])


def test_one_provider_passes_its_directions_on() -> None:
    found = reference(held(0, [1, 3]))
    assert found is not None
    np.testing.assert_allclose(np.abs(found.leading), EYE[0])
    np.testing.assert_allclose(found.residual.T @ found.residual, np.diag([0, 1, 0, 1]), atol=1e-12)
    assert found.strength == pytest.approx(1.0)


def test_directions_end_with_rank_and_with_l() -> None:
    together = reference(held(0, [1, 2]), held(0, [2, 3]))
    assert together is not None
    assert len(together.residual) == 3
    limited = reference(held(0, [1, 2]), held(0, [2, 3]), residual_directions=1)
    assert limited is not None
    np.testing.assert_allclose(np.abs(limited.residual), [EYE[2]], atol=1e-12)


def test_weights() -> None:
    spectrum = held(0, [1], count=200, gap=0.8, s1_ratio=10 / 13)
    assert provider_weight(spectrum, "n") == 200
    assert provider_weight(spectrum, "n_gap_s1") == pytest.approx(123.08, abs=0.005)
    plain = reference(held(0, [2], 100, gap=0.9), held(1, [2], 300, gap=0.1))
    weighted = reference(held(0, [2], 100, gap=0.9), held(1, [2], 300, gap=0.1), weight="n_gap_s1")
    assert plain is not None
    assert weighted is not None
    np.testing.assert_allclose(np.abs(plain.leading), EYE[1], atol=1e-12)
    np.testing.assert_allclose(np.abs(weighted.leading), EYE[0], atol=1e-12)


def test_weights_that_vanish_fall_back_on_counts() -> None:
    found = reference(held(0, [2], 100, gap=0.0), held(1, [2], 300, gap=0.0), weight="n_gap_s1")
    assert found is not None
    np.testing.assert_allclose(np.abs(found.leading), EYE[1], atol=1e-12)


def test_small_providers_are_left_out_unless_all_are_small() -> None:
    left_out = reference(held(0, [2], count=19), held(1, [2], count=20))
    assert left_out is not None
    assert left_out.providers == (1,)
    all_small = reference(held(0, [2], count=5), held(1, [2], count=7), held(3, [2], count=7))
    assert all_small is not None
    assert all_small.providers == (1,)


def test_weak_means_fall_back_on_the_largest_provider() -> None:
    spectra = (held(0, [2], count=100), held(1, [2], count=101))
    weak = reference(*spectra)
    assert weak is not None
    assert weak.strength < 0.03
    strong = reference(*spectra, strength_threshold=0.03)
    assert strong is not None
    assert strong.providers == (1,)
    assert strong.strength == 1.0


def test_classes_without_provider_or_residual_are_unreferenced() -> None:
    assert reference(None, None) is None
    assert reference(held(0, [])) is None
    mixed = class_references([[held(0, [1]), None], [None, None]], ReferenceSettings())
    assert [r is None for r in mixed] == [False, True]
    assert class_references([], ReferenceSettings()) == ()


def test_a_large_holder_without_residual_does_not_hide_a_smaller_one_with() -> None:
    found = reference(held(0, [], count=10), held(0, [1], count=4))
    assert found is not None
    assert found.providers == (1,)


def test_order_of_clients_does_not_matter() -> None:
    a = reference(held(0, [1, 2], 50), held(0, [2, 3], 80))
    b = reference(held(0, [2, 3], 80), held(0, [1, 2], 50))
    assert a is not None
    assert b is not None
    np.testing.assert_allclose(a.residual.T @ a.residual, b.residual.T @ b.residual, atol=1e-12)


# -- bases filled up to L, as in FedSIR's published code ---------------------------------------------------------------


def test_a_filled_basis_has_always_l_directions_and_contains_the_true_ones() -> None:
    """Two providers whose residual directions span 5 of 40 dimensions."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(40, 40)))[0]
    spectra = [ClassSpectrum(q[0], q[1:4], 30, 1, 0.5, 0.5), ClassSpectrum(q[0], q[3:6], 50, 1, 0.5, 0.5)]
    true, filled = reference(*spectra), reference(*spectra, basis="filled")
    assert true is not None
    assert filled is not None
    assert len(true.residual) == 5
    assert filled.residual.shape == (12, 40)
    np.testing.assert_allclose(filled.residual @ filled.residual.T, np.eye(12), atol=1e-9)
    np.testing.assert_allclose(true.residual @ filled.residual.T @ filled.residual, true.residual, atol=1e-6)
    # The first one is the shared direction, which carries most weight.
    assert abs(filled.residual[0] @ q[3]) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_array_equal(filled.leading, true.leading)
    assert (filled.providers, filled.strength) == (true.providers, true.strength)


def test_a_class_without_residual_directions_is_a_candidate_with_a_filled_basis_only() -> None:
    lone, ordinary, other = held(0, []), held(1, [2]), held(2, [1])
    by_rank, filled = (
        class_references([[lone, ordinary, other, None]], ReferenceSettings(basis=basis))  # type: ignore[arg-type]
        for basis in ("rank", "filled")
    )
    assert [r is None for r in by_rank] == [True, False, False, True]
    assert [r is None for r in filled] == [False, False, False, True]
    assert filled[0] is not None
    assert filled[0].residual.shape == (0, 4)
    # Its S_N is 0 for every image, so it wins every arg min, as in the published code.
    features = np.random.default_rng(0).normal(size=(50, 4))
    observed = np.ones(50, dtype=np.int64)
    assert set(relabel(features, filled, observed, "sn").targets.tolist()) == {0}
    assert 0 not in relabel(features, by_rank, observed, "sn").targets
    # Images that also point along its leading direction are relabelled to it, and no others.
    agreed = relabel(features, filled, observed).targets
    strongest = np.abs(features / np.linalg.norm(features, axis=1, keepdims=True))[:, :3].argmax(axis=1) == 0
    assert 0 < strongest.sum() < 50
    np.testing.assert_array_equal(agreed == 0, strongest)


@pytest.mark.parametrize("providers", [1, 3])
def test_both_bases_decide_alike_where_the_rank_is_full(providers: int) -> None:
    rng = np.random.default_rng(4)
    centres = rng.normal(size=(3, 24)) * 3
    settings = {"residual_directions": 4, "min_count": 1}

    def images(count: int) -> tuple[Any, Any]:
        labels = rng.integers(0, 3, count)
        return centres[labels] + rng.normal(size=(count, 24)), labels.astype(np.int64)

    spectra = [class_spectra(*images(200), num_classes=3, max_residual=4) for _ in range(providers)]
    by_rank, filled = (
        class_references(spectra, ReferenceSettings.model_validate({**settings, "basis": basis}))
        for basis in ("rank", "filled")
    )
    assert [len(r.residual) for r in by_rank if r is not None] == [4, 4, 4]
    features, labels = images(300)
    observed = rng.permutation(labels)
    for rule in ("agree", "sn", "sr"):
        one, other = (relabel(features, references, observed, rule) for references in (by_rank, filled))  # type: ignore[arg-type]
        np.testing.assert_array_equal(one.targets, other.targets)
        np.testing.assert_array_equal(one.agreement, other.agreement)
        assert (one.targets != observed).any()


def test_filled_bases_of_published_features_agree_with_the_published_projector(golden: Any) -> None:
    """Where the rank ends before L the filling is arbitrary; there the sizes agree and the true directions."""
    references = class_references(golden.spectra[:2], ReferenceSettings(basis="filled"))
    for c, found in enumerate(references):
        assert found is not None
        published = golden.arrays["reference_residual_projector"][c]
        assert len(found.residual) == min(12, published.shape[0])
        assert np.trace(published) == pytest.approx(len(found.residual), abs=1e-3)
