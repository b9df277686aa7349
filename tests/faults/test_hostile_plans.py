"""A plan looks at the images that a grid names, and is as careful with them as the run."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.expansion import expand
from experiments.grid import load_grid
from experiments.sweeps import images
from experiments.sweeps.images import ImageFacts, image_facts
from fedsir.data import medmnist


@pytest.fixture
def facts(tmp_path: Path) -> Callable[[str], ImageFacts]:
    """What a plan knows of the images of a source."""

    def look(data: str) -> ImageFacts:
        grid = tmp_path / "grid.yaml"
        text = f"name: g\nbase: demo\nset: ['data={data}']\nmethods: [fedavg]\nseeds: [0]\n"
        grid.write_text(text, encoding="utf-8")
        return image_facts(expand(load_grid(str(grid))).runs[0])

    return look


@pytest.mark.parametrize("name", ["pipe", "gone", "text", "folder", "/dev/zero", "~nobody-of-this-name/x"])
@pytest.mark.parametrize("source", ["source: cohort, manifest", "source: medmnist, path"])
def test_what_is_no_file_of_images_is_not_readable(
    facts: Callable[[str], ImageFacts], tmp_path: Path, source: str, name: str
) -> None:
    """A pipe would be waited for, a device read without end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_bytes(b"path,label\n\xff,a\n")
    found = facts(f"{{{source}: {name if '/' in name else tmp_path / name}}}")
    assert (found.train, found.test, found.origin) == (None, None, "not readable")


@pytest.mark.parametrize("content", [b"PK\x03\x04 and no more", b"\x80\x04N.", b"\x93NUMPY\x01\x00\x05\x00{{{{\n", b""])
def test_damaged_archives_are_not_readable(facts: Callable[[str], ImageFacts], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert facts(f"{{source: medmnist, path: {tmp_path / 'a.npz'}}}").origin == "not readable"


def test_a_manifest_of_any_size_is_not_read(
    facts: Callable[[str], ImageFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.csv").write_text("path,label,patient_id,split\n" + "a,b,c,train\n" * 5)
    source = f"{{source: cohort, manifest: {tmp_path / 'm.csv'}}}"
    assert facts(source).train == 5
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 60)
    images._in_manifest.cache_clear()
    assert facts(source).train is None


def test_a_decompression_bomb_is_not_unfolded(
    facts: Callable[[str], ImageFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medmnist, "SMALL_BYTES", 100_000)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for part in medmnist.PARTS:
            for what in ("images", "labels"):
                archive.writestr(f"{part}_{what}.npy", bytes(5_000_000))
    assert facts(f"{{source: medmnist, path: {tmp_path / 'a.npz'}}}").origin == "not readable"
