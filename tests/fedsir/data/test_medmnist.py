from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsir.config.data import MedMnistData
from fedsir.data.decode import resize
from fedsir.data.medmnist import load_medmnist
from fedsir.errors import BadInput


def arrays(size: int = 28) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for part, n in (("train", 12), ("val", 4), ("test", 8)):
        found[f"{part}_images"] = rng.integers(0, 256, (n, size, size), dtype=np.uint8)
        found[f"{part}_labels"] = (np.arange(n) % 4).astype(np.uint8)[:, None]
    return found


def config(path: Path, cache: Path, size: int = 16) -> MedMnistData:
    return MedMnistData(source="medmnist", path=path, image_size=size, cache_dir=cache)


def archive(folder: Path, compressed: bool = True, **changes: Any) -> Path:
    path = folder / "octmnist.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, **{**arrays(), **changes})
    return path


@pytest.mark.parametrize("size", [16, 28, 40])
@pytest.mark.parametrize("compressed", [True, False])
def test_train_and_val_train_and_every_image_is_its_own_patient(
    tmp_path: Path, cache: Path, size: int, compressed: bool
) -> None:
    found = load_medmnist(config(archive(tmp_path, compressed), cache, size))
    source = arrays()
    assert (found.name, found.kind) == ("octmnist", "real")
    assert found.class_names == ("CNV", "DME", "DRUSEN", "NORMAL")
    expected = [resize(image, size) for image in [*source["train_images"], *source["val_images"]]]
    np.testing.assert_array_equal(found.train.images, np.stack(expected))
    assert found.train.labels.tolist() == [*range(4)] * 4
    assert found.train.names[12] == "val/0"
    assert len(np.unique(np.concatenate([found.train.patients, found.test.patients]))) == 24
    assert "names no patients" in found.notes[0]


def test_the_second_load_comes_from_the_cache(tmp_path: Path, cache: Path) -> None:
    path = archive(tmp_path)
    calls: list[tuple[int, int, str]] = []
    first = load_medmnist(config(path, cache), lambda *call: calls.append(call))
    assert calls[-1] == (4, 4, "resizing val images")
    calls.clear()
    second = load_medmnist(config(path, cache), lambda *call: calls.append(call))
    assert calls == []
    assert second.digest == first.digest
    assert isinstance(second.train.images, np.memmap)


def test_repeated_pictures_stay_and_are_noted(tmp_path: Path, cache: Path) -> None:
    images = arrays()["test_images"]
    images[0] = arrays()["train_images"][3]
    images[1] = images[2]
    found = load_medmnist(config(archive(tmp_path, test_images=images), cache))
    assert (len(found.train), len(found.test)) == (16, 8)
    assert found.notes[1].startswith("2 images with the same pixels")
    assert found.notes[1].endswith("1 of train are also in test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((12, 28, 28, 3), np.uint8)}, "not grey images"),
        ({"train_images": np.zeros((12, 28, 28), np.float32)}, "not grey images"),
        ({"train_images": np.zeros((11, 28, 28), np.uint8)}, "11 train_images but 12 labels"),
        ({"test_labels": np.full((8, 1), 4)}, "test_labels holds values from 4 to 4"),
        ({"test_labels": np.zeros((8, 14), np.uint8)}, "not one integer per image"),
        ({"test_labels": np.zeros(8, np.uint8)}, "DME: no test image"),
        ({"test_labels": np.array([0, 1, 2, {}], dtype=object)}, "not one integer per image"),
        ({"val_images": np.array([{}], dtype=object)}, "not grey images"),
    ],
)
def test_other_archives_are_refused(
    tmp_path: Path, cache: Path, changes: dict[str, np.ndarray[Any, Any]], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_medmnist(config(archive(tmp_path, **changes), cache))


def test_files_that_are_no_archive(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(BadInput, match=r"(?s)does not exist.*octmnist\*.npz"):
        load_medmnist(config(tmp_path / "none.npz", cache))
    path = tmp_path / "octmnist.npz"
    path.write_text("text")
    with pytest.raises(BadInput, match="cannot be read"):
        load_medmnist(config(path, cache))
    np.savez(path, train_images=arrays()["train_images"])
    with pytest.raises(BadInput, match="lacks test_images, test_labels, train_labels"):
        load_medmnist(config(path, cache))
    whole = archive(tmp_path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="cannot be read"):
        load_medmnist(config(path, cache))
