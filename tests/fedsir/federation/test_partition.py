"""The Dirichlet partition deals every image once and meets its demands or says why not; sites become clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsir.config.federation import PartitionConfig
from fedsir.errors import BadInput
from fedsir.federation.partition import Partition, dirichlet_partition, site_names, site_partition


def deal(
    labels: np.ndarray,
    clients: int,
    config: PartitionConfig,
    seed: int = 0,
    patients: np.ndarray | None = None,
) -> Partition:
    num_classes = int(labels.max()) + 1
    return dirichlet_partition(labels, num_classes, clients, config, np.random.default_rng(seed), patients)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.integers(1, 8),
    st.sampled_from([0.05, 0.5, 2.0, 1e3]),
    st.sampled_from(["multinomial", "split"]),
    st.sampled_from(["image", "patient"]),
)
def test_every_image_goes_to_exactly_one_client(seed: int, clients: int, alpha: float, variant: str, unit: str) -> None:
    rng = np.random.default_rng(seed)
    labels, patients = rng.integers(0, 3, 240), np.sort(rng.integers(0, 80, 240))
    config = PartitionConfig.model_validate({"alpha": alpha, "variant": variant, "unit": unit, "min_client_size": 1})
    partition = deal(labels, clients, config, seed, patients)
    assert len(partition.indices) == clients
    together = np.concatenate(partition.indices)
    np.testing.assert_array_equal(np.sort(together), np.arange(240))
    for part in partition.indices:
        assert part.dtype == np.int64
        assert len(part) >= 1
        assert (np.diff(part) > 0).all()
    if unit == "patient":
        owners = [set(patients[part].tolist()) for part in partition.indices]
        assert sum(len(o) for o in owners) == len(set(patients.tolist()))


@pytest.mark.parametrize("variant", ["multinomial", "split"])
def test_same_stream_same_partition(variant: str) -> None:
    labels = np.random.default_rng(0).integers(0, 4, 500)
    config = PartitionConfig.model_validate({"variant": variant})
    first, second, other = (deal(labels, 5, config, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, second.indices, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


def test_small_alpha_concentrates_classes() -> None:
    labels = np.repeat(np.arange(4), 1000)

    def largest_share(alpha: float) -> float:
        config = PartitionConfig(alpha=alpha, min_client_size=1)
        parts = [p for seed in range(5) for p in deal(labels, 10, config, seed).indices]
        return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))

    assert largest_share(1e4) < 0.3 < largest_share(2.0) < largest_share(0.1)


def test_small_clients_are_redrawn_and_counted() -> None:
    labels = np.repeat(np.arange(2), 200)
    partition = deal(labels, 5, PartitionConfig(alpha=0.3, min_client_size=20))
    assert min(len(p) for p in partition.indices) >= 20
    assert partition.redraws > 0


def test_more_demanded_than_there_is_is_refused_at_once() -> None:
    config = PartitionConfig(min_client_size=50, max_redraws=100_000)
    with pytest.raises(BadInput, match=r"10 clients.*50 images.*500 training images, there are 499") as error:
        deal(np.zeros(499, dtype=np.int64), 10, config)
    assert "Remedy: at most 9 federation.clients" in str(error.value)


def test_unlucky_draws_end_with_the_numbers_and_a_remedy() -> None:
    config = PartitionConfig(alpha=0.01, min_client_size=20, max_redraws=3)
    with pytest.raises(BadInput) as error:
        deal(np.repeat(np.arange(2), 60), 6, config)
    for part in ("4 draws", "alpha = 0.01", "120 training images", "6 clients", "least 20", "Remedy"):
        assert part in str(error.value)


def test_fewer_patients_than_clients_are_refused() -> None:
    config = PartitionConfig(unit="patient", min_client_size=1)
    with pytest.raises(BadInput, match="unit is patient and 3 of them cannot fill 4 clients"):
        deal(np.zeros(30, dtype=np.int64), 4, config, patients=np.repeat(np.arange(3), 10))


def test_patient_unit_without_patients_is_refused() -> None:
    with pytest.raises(BadInput, match="patient ids"):
        deal(np.zeros(30, dtype=np.int64), 2, PartitionConfig(unit="patient"))


# -- by site -----------------------------------------------------------------------------------------------------------


def test_sites_become_clients_in_the_order_of_their_names() -> None:
    sites = ("West", "East", "West", "North")
    partition = site_partition(sites, 3)
    assert [i.tolist() for i in partition.indices] == [[1], [3], [0, 2]]
    assert site_names(sites) == ("East", "North", "West")


def test_another_number_of_clients_than_sites_is_refused_with_the_right_one() -> None:
    with pytest.raises(BadInput, match=r"2 sites: East, West.\nRemedy: federation.clients: 2"):
        site_partition(("West", "East"), 3)


def test_images_without_sites_cannot_be_dealt_by_site() -> None:
    with pytest.raises(BadInput, match="the images name no sites"):
        site_partition(None, 3)


def test_settings_of_a_draw_have_no_place_beside_sites() -> None:
    assert PartitionConfig(variant="site").variant == "site"
    with pytest.raises(ValidationError, match="leave out alpha, min_client_size"):
        PartitionConfig(variant="site", alpha=0.5, min_client_size=4)


def test_configurations_without_sites_keep_their_identity() -> None:
    """Of a run before sites could be clients; a change here would make every record unfindable."""
    assert PartitionConfig().model_dump(mode="json") == {
        "alpha": 2.0,
        "variant": "multinomial",
        "unit": "image",
        "min_client_size": 10,
        "max_redraws": 1000,
    }
