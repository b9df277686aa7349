"""Large phantom cohorts are drawn once; what comes back is what was drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsir.config.data import PhantomData
from fedsir.data.cache import EntryWriter
from fedsir.data.phantom import kept, load_phantom

CONFIG = PhantomData(source="phantom", image_size=16, train_images=10, test_images=6)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "WORTH_KEEPING", 16)
    return tmp_path / "cache"


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("images/*"))


def test_kept_images_are_those_that_were_drawn(cache: Path) -> None:
    drawn = load_phantom(CONFIG)
    assert len(entries(cache)) == 1
    again = load_phantom(CONFIG)
    assert isinstance(again.train.images, np.memmap)
    assert again.digest == drawn.digest
    assert again.train.names == drawn.train.names
    assert np.array_equal(again.test.images, drawn.test.images)
    assert not again.train.images.flags.writeable


def test_small_cohorts_leave_no_files(cache: Path) -> None:
    load_phantom(CONFIG.model_copy(update={"test_images": 5}))
    assert entries(cache) == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"images_per_patient": 2}, {"image_size": 20}, {"train_images": 11}])
def test_every_setting_that_changes_pixels_has_its_own_entry(cache: Path, change: dict[str, int]) -> None:
    load_phantom(CONFIG)
    load_phantom(CONFIG.model_copy(update=change))
    assert len(entries(cache)) == 2


def test_other_drawing_code_draws_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_phantom(CONFIG)
    monkeypatch.setattr(kept, "_code", lambda: "changed")
    load_phantom(CONFIG)
    assert len(entries(cache)) == 2


@pytest.mark.usefixtures("cache")
def test_without_a_usable_cache_they_are_drawn_every_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = load_phantom(CONFIG).digest
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDSIR_CACHE", str(tmp_path / "file"))
    assert load_phantom(CONFIG).digest == digest


def test_a_damaged_entry_is_drawn_anew(cache: Path) -> None:
    digest = load_phantom(CONFIG).digest
    (entries(cache)[0] / "train.npy").write_bytes(b"not an array")
    assert load_phantom(CONFIG).digest == digest


@pytest.mark.parametrize(("train", "test", "size"), [(9, 6, 16), (10, 7, 16), (10, 6, 20)])
def test_an_entry_about_other_images_is_drawn_anew(cache: Path, train: int, test: int, size: int) -> None:
    """Whoever shares the cache may have put it there: whole, but of other numbers or sizes."""
    sound = load_phantom(CONFIG)
    (place,) = entries(cache)
    with EntryWriter(cache / "other", size) as writer:
        writer.append("train", np.zeros((train, size, size), np.uint8))
        writer.append("test", np.zeros((test, size, size), np.uint8))
        writer.commit("k", np.zeros((0, 32), np.uint8), {})
    for path in (cache / "other" / "images" / "k").iterdir():
        path.replace(place / path.name)
    assert load_phantom(CONFIG).digest == sound.digest
    # And it has been replaced.
    assert isinstance(load_phantom(CONFIG).train.images, np.memmap)
    assert np.array_equal(load_phantom(CONFIG).train.images, sound.train.images)
