"""Label noise: how many, which and to what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsir.config.federation import NoiseConfig
from fedsir.errors import BadInput
from fedsir.federation.noise import corrupt_labels, flip_count, transitions

KERMANY = ("CNV", "DME", "DRUSEN", "NORMAL")
UIC = ("control", "mild", "moderate", "severe")


def asymmetric(label_map: Any) -> NoiseConfig:
    return NoiseConfig(type="asymmetric", label_map=label_map)


@pytest.mark.parametrize(
    ("images", "ratio", "rounding", "expected"),
    [
        (90, 0.7, "floor", 63),  # floor(0.7 * 90) is 62 in floating point
        (1, 0.9, "floor", 0),
        (5, 0.9, "floor", 4),
        (5, 0.9, "round", 4),  # 4.5 rounds to even
        (15, 0.9, "round", 14),  # 13.5 rounds to even
        (7, 1.0, "floor", 7),
        (7, 0.0, "round", 0),
        (8, 0.125, "floor", 1),
        (0, 0.6, "floor", 0),
    ],
)
def test_flip_count(images: int, ratio: float, rounding: Any, expected: int) -> None:
    assert flip_count(images, ratio, rounding) == expected


@given(st.integers(0, 100_000), st.integers(0, 100))
def test_flip_count_is_integer_arithmetic_on_percents(images: int, percent: int) -> None:
    assert flip_count(images, percent / 100, "floor") == images * percent // 100


def test_named_maps() -> None:
    swap = ((1,), (0,), (3,), (2,))
    assert transitions(asymmetric("kermany"), KERMANY) == swap
    assert transitions(asymmetric("kermany"), ("normal", "drusen", "dme", "cnv")) == swap
    assert transitions(asymmetric("uic_up"), UIC) == ((1,), (2,), (3,), (2,))
    assert transitions(asymmetric("uic_pair_swap"), UIC) == swap
    assert transitions(asymmetric("uic_random_neighbour"), UIC) == ((1,), (0, 2), (1, 3), (2,))
    assert transitions(asymmetric("wake_forest"), ("NGA", "GA")) == ((), (0,))


def test_explicit_map_by_class_name() -> None:
    table = transitions(asymmetric({"cnv": "NORMAL", "DME": "drusen"}), KERMANY)
    assert table == ((3,), (2,), (), ())


@pytest.mark.parametrize(
    ("label_map", "names", "message"),
    [
        ({"CNV": "DMO"}, KERMANY, "'DMO' is not one of .* CNV, DME, DRUSEN, NORMAL"),
        ({"CNV": "cnv"}, KERMANY, "mapped to itself"),
        ({"CNV": "DME", "cnv": "DRUSEN"}, KERMANY, "source twice"),
        ("kermany", UIC, "kermany: class 'CNV' is not one of"),
        ("uic_pair_swap", ("a", "b", "c"), "even number"),
        ("uic_up", ("a",), "at least two"),
    ],
)
def test_maps_that_do_not_fit_are_refused(label_map: Any, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        transitions(asymmetric(label_map), names)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 100), st.sampled_from(["floor", "round"]), st.booleans())
def test_every_class_loses_its_share_to_permitted_classes(
    seed: int, percent: int, rounding: Any, symmetric: bool
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 150)
    config = NoiseConfig() if symmetric else asymmetric("uic_random_neighbour")
    table = transitions(config, UIC)
    before = labels.copy()
    observed = corrupt_labels(labels, table, percent / 100, rounding, rng)
    np.testing.assert_array_equal(labels, before)
    for c in range(4):
        of_class = observed[labels == c]
        wrong = of_class[of_class != c]
        assert len(wrong) == flip_count(len(of_class), percent / 100, rounding)
        assert set(wrong.tolist()) <= set(table[c])


def test_symmetric_targets_are_uniform() -> None:
    labels = np.zeros(30_000, dtype=np.int64)
    table = transitions(NoiseConfig(), UIC)
    observed = corrupt_labels(labels, table, 0.9, "floor", np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(observed)[1:] / 27_000, 1 / 3, atol=0.01)


def test_random_neighbour_uses_both_sides() -> None:
    labels = np.ones(1000, dtype=np.int64)
    table = transitions(asymmetric("uic_random_neighbour"), UIC)
    counts = np.bincount(corrupt_labels(labels, table, 1.0, "floor", np.random.default_rng(0)))
    assert counts[1] == 0
    assert min(counts[0], counts[2]) > 400


def test_ratios_are_nested() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 400)
    table = transitions(NoiseConfig(), UIC)
    low, high = (corrupt_labels(labels, table, r, "floor", np.random.default_rng(5)) for r in (0.3, 0.7))
    changed = low != labels
    np.testing.assert_array_equal(low[changed], high[changed])
    assert (high != labels).sum() > changed.sum()


def test_non_source_classes_keep_their_labels() -> None:
    labels = np.array([0] * 50 + [1] * 50)
    observed = corrupt_labels(
        labels, transitions(asymmetric("wake_forest"), ("NGA", "GA")), 0.9, "floor", np.random.default_rng(0)
    )
    assert (observed[:50] == 0).all()
    assert (observed[50:] == 0).sum() == 45
