from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsir.config.data import CohortData, KermanyData, MedMnistData, PhantomData
from fedsir.data.load import load_dataset
from fedsir.errors import BadInput


def test_each_source_is_reached(kermany: Path, cache: Path, tmp_path: Path, cohort: Callable[..., Path]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
    parts = {f"{part}_images": images for part in ("train", "val", "test")}
    labels = {f"{part}_labels": np.arange(4) for part in ("train", "val", "test")}
    np.savez(tmp_path / "octmnist.npz", **parts, **labels)
    manifest = cohort("path,label,patient_id", [f"{i}.png,{'AB'[i % 2]},{i}" for i in range(8)])
    common = {"image_size": 16, "cache_dir": cache}
    sources = (
        KermanyData(source="kermany", root=kermany, **common),
        CohortData(source="cohort", manifest=manifest, **common),
        MedMnistData(source="medmnist", path=tmp_path / "octmnist.npz", **common),
    )
    assert [load_dataset(source).name for source in sources] == ["kermany", "cohort", "octmnist"]


def test_phantoms_need_no_files() -> None:
    config = PhantomData(source="phantom", image_size=32, train_images=64, test_images=64)
    found = load_dataset(config)
    assert found.kind == "phantom"
    assert found.train.images.shape == (64, 32, 32)


def test_images_too_small_for_the_networks_are_refused(kermany: Path, cache: Path) -> None:
    with pytest.raises(BadInput, match="image_size is 15"):
        load_dataset(KermanyData(source="kermany", root=kermany, cache_dir=cache, image_size=15))
    assert not cache.exists()
