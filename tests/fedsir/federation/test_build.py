"""A federation as a whole: independence of its random streams, truth kept apart, report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsir.config.federation import FederationConfig
from fedsir.errors import BadInput
from fedsir.federation.build import build_federation, public_pool
from fedsir.federation.federation import Federation, FederationFacts, Truth
from fedsir.federation.report import federation_rows, federation_table

NAMES = ("CNV", "DME", "DRUSEN", "NORMAL")
LABELS = np.random.default_rng(0).choice(4, 800, p=[0.4, 0.2, 0.1, 0.3])


def build(seed: int = 0, **settings: Any) -> tuple[Federation, Truth, FederationFacts]:
    config = FederationConfig.model_validate({"clients": 8, "clean_clients": 3, **settings})
    return build_federation(LABELS, None, NAMES, config, seed)


def equal(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_truth_matches_the_data_and_clean_clients_keep_it() -> None:
    federation, truth, _ = build()
    assert federation.sizes.sum() == len(LABELS) - 8
    for k in range(8):
        np.testing.assert_array_equal(truth.labels[k], LABELS[federation.indices[k]])
        wrong = np.count_nonzero(federation.observed[k] != truth.labels[k])
        assert (wrong > 0) == truth.noisy[k]
    assert truth.noisy.sum() == 5


@pytest.mark.parametrize(
    "noise",
    [
        {"type": "none"},
        {"ratio": 0.9},
        {"type": "asymmetric", "label_map": "kermany", "ratio": 0.4, "rounding": "round"},
    ],
)
def test_partition_does_not_depend_on_noise(noise: dict[str, Any]) -> None:
    assert equal(build()[0].indices, build(noise=noise)[0].indices)


def test_clean_clients_do_not_depend_on_noise() -> None:
    other = build(noise={"type": "asymmetric", "label_map": "kermany", "ratio": 0.4})
    np.testing.assert_array_equal(build()[1].noisy, other[1].noisy)


def test_noise_of_a_client_does_not_depend_on_who_else_is_noisy() -> None:
    few, many = build(clean_selection="random"), build(clean_clients=0)
    assert many[1].noisy.all()
    for k in np.flatnonzero(few[1].noisy).tolist():
        np.testing.assert_array_equal(few[0].observed[k], many[0].observed[k])


@pytest.mark.parametrize(("demand", "size"), [("auto", 8), (0, 0), (100, 100)])
def test_the_public_pool_is_nobodys(demand: int | str, size: int) -> None:
    federation, _, _ = build(public_pool=demand)
    everything = np.concatenate([federation.public_pool, *federation.indices])
    assert len(federation.public_pool) == size
    np.testing.assert_array_equal(np.sort(everything), np.arange(len(LABELS)))


def test_the_public_pool_depends_on_the_seed_alone() -> None:
    pool = build()[0].public_pool
    other = build(clients=4, clean_clients=1, noise={"type": "none"}, partition={"alpha": 0.5})[0].public_pool
    np.testing.assert_array_equal(pool, other)
    assert not np.array_equal(pool, build(1)[0].public_pool)


def test_a_public_pool_of_everything_is_refused() -> None:
    with pytest.raises(BadInput, match=r"public_pool is 800, but there are only 800"):
        build(public_pool=800)


def test_the_automatic_pool_is_limited() -> None:
    pool, dealt = public_pool(100_000, "auto", np.random.default_rng(0))
    assert (len(pool), len(dealt)) == (512, 99_488)


def test_no_noise_means_nobody_is_noisy() -> None:
    federation, truth, facts = build(noise={"type": "none"})
    assert not truth.noisy.any()
    assert equal(federation.observed, truth.labels)
    assert facts.notes == ()


def test_ratio_zero_gives_the_labels_of_no_noise() -> None:
    zero, none = build(noise={"ratio": 0.0}), build(noise={"type": "none"})
    assert equal(zero[0].observed, none[0].observed)
    assert zero[1].noisy.sum() == 5
    assert any("5 noisy clients hold no wrong label" in note for note in zero[2].notes)


def test_observed_labels_share_no_memory_with_the_truth() -> None:
    federation, truth, _ = build()
    for observed, labels in zip(federation.observed, truth.labels, strict=True):
        assert not np.shares_memory(observed, labels)


def test_seeds_differ_and_repeat() -> None:
    assert equal(build(1)[0].observed, build(1)[0].observed)
    assert not equal(build(1)[0].indices, build(2)[0].indices)


def test_grown_clean_set_is_noted() -> None:
    labels = np.repeat(np.arange(4), 200)
    config = FederationConfig.model_validate(
        {
            "clients": 6,
            "clean_clients": 1,
            "cover_min_per_class": 90,
            "partition": {"alpha": 0.1, "min_client_size": 1},
        }
    )
    built = [build_federation(labels, None, NAMES, config, seed) for seed in range(6)]
    for _, truth, facts in built:
        grown = (~truth.noisy).sum() > 1
        assert grown == any("instead of the 1 asked for" in n for n in facts.notes)
    assert any((~truth.noisy).sum() > 1 for _, truth, _ in built)


@pytest.mark.parametrize("labels", [np.array([0, 4]), np.array([-1, 0]), np.empty(0, dtype=np.int64)])
def test_labels_that_are_no_classes_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(BadInput, match=r"class indices 0\.\.3"):
        build_federation(labels, None, NAMES, FederationConfig(), 0)


def test_table_counts_before_and_after() -> None:
    federation, truth, _ = build()
    rows = federation_rows(federation, truth)
    table = federation_table(federation, truth)
    assert len(rows) == len(table) == 8
    np.testing.assert_array_equal(table[[f"{n} observed" for n in NAMES]], federation.observed_counts())
    dealt = np.concatenate(truth.labels)
    assert table[[f"{n} true" for n in NAMES]].sum().tolist() == np.bincount(dealt).tolist()
    assert table["images"].tolist() == federation.sizes.tolist()
    np.testing.assert_array_equal(table["status"] == "noisy", truth.noisy)
    np.testing.assert_array_equal(table["wrong labels"] > 0, truth.noisy)


def test_sites_hold_their_own_images_and_may_be_noisy() -> None:
    sites = np.random.default_rng(1).choice(["Rush", "Cook", "Lurie"], len(LABELS))
    settings = {"clients": 3, "clean_clients": 2, "public_pool": 10, "partition": {"variant": "site"}}
    config = FederationConfig.model_validate(settings)
    federation, truth, _ = build_federation(LABELS, None, NAMES, config, 0, sites.tolist())
    assert [np.unique(sites[i]).tolist() for i in federation.indices] == [["Cook"], ["Lurie"], ["Rush"]]
    assert federation.sizes.sum() == len(LABELS) - 10
    assert truth.noisy.sum() == 1
