from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsir.config.data import KermanyData
from fedsir.data import prepare as module
from fedsir.data.kermany import load_kermany
from fedsir.errors import BadInput


def config(root: Path, cache: Path, size: int = 16, bad: str = "stop") -> KermanyData:
    return KermanyData.model_validate(
        {"source": "kermany", "root": root, "image_size": size, "cache_dir": cache, "on_bad_image": bad}
    )


def entries(cache: Path) -> int:
    return len(list((cache / "images").iterdir()))


def damage(root: Path) -> None:
    """Three files that cannot be used, in both splits; each class keeps images in train."""
    whole = (root / "train/CNV/CNV-100-1.jpeg").read_bytes()
    (root / "train/CNV/CNV-100-1.jpeg").write_bytes(whole[: len(whole) // 2])
    (root / "train/DME/DME-101-1.jpeg").write_bytes(b"")
    (root / "test/CNV/CNV-300-2.jpeg").write_text("text")


def test_the_second_load_decodes_nothing(kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_kermany(config(kermany, cache))

    def fail(_: bytes) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(module.decode, "grey_picture", fail)
    second = load_kermany(config(kermany, cache))
    assert second.digest == first.digest
    np.testing.assert_array_equal(second.train.images, first.train.images)


def test_the_key_is_content_and_not_place_or_time(kermany: Path, cache: Path, tmp_path: Path) -> None:
    first = load_kermany(config(kermany, cache))
    moved = kermany.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*.jpeg"):
        os.utime(path, (1, 1))
    assert load_kermany(config(moved, cache)).digest == first.digest
    assert entries(cache) == 1


def test_a_changed_file_and_another_size_are_prepared_anew(kermany: Path, cache: Path) -> None:
    first = load_kermany(config(kermany, cache))
    path = kermany / "train/CNV/CNV-100-1.jpeg"
    before = path.stat()
    picture = np.array(Image.open(path))
    Image.fromarray(255 - picture).save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = load_kermany(config(kermany, cache))
    assert second.digest != first.digest
    assert np.abs(second.train.images[0].astype(int) + first.train.images[0] - 255).max() < 40
    assert load_kermany(config(kermany, cache, size=24)).train.images.shape == (16, 24, 24)
    assert entries(cache) == 3


def test_a_release_of_the_decoder_is_part_of_the_key(
    kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kermany(config(kermany, cache))
    monkeypatch.setattr(module.decode, "pillow_version", "0.0")
    load_kermany(config(kermany, cache))
    assert entries(cache) == 2


def test_all_bad_files_are_reported_together(kermany: Path, cache: Path) -> None:
    damage(kermany)
    (kermany / "train/NORMAL/NORMAL-103-1.jpeg").unlink()
    (kermany / "train/NORMAL/NORMAL-103-1.jpeg").symlink_to("nowhere")
    for _ in range(2):  # the second time from the cache
        with pytest.raises(BadInput) as caught:
            load_kermany(config(kermany, cache))
        lines = str(caught.value).splitlines()
        assert lines[0] == "4 image files of kermany cannot be used:"
        assert lines[1].startswith("  train/CNV/CNV-100-1.jpeg: ")
        assert lines[2] == "  train/DME/DME-101-1.jpeg: empty file"
        assert lines[3] == "  train/NORMAL/NORMAL-103-1.jpeg: no such file"
        assert lines[4].startswith("  test/CNV/CNV-300-2.jpeg: not an image")
        assert "on_bad_image" in lines[5]


def test_many_bad_files_are_counted(kermany: Path, cache: Path) -> None:
    for number in range(12):
        (kermany / f"train/CNV/CNV-800-{number}.jpeg").write_bytes(b"")
    with pytest.raises(BadInput, match=r"(?s)12 image files.*2 more \(12 in all\)"):
        load_kermany(config(kermany, cache))


def test_bad_files_can_be_left_out(kermany: Path, cache: Path) -> None:
    damage(kermany)
    found = load_kermany(config(kermany, cache, bad="skip"))
    assert (len(found.train), len(found.test)) == (14, 4)
    assert "train/DME/DME-101-1.jpeg" not in found.train.names
    assert found.train.names[0] == "train/CNV/CNV-100-2.jpeg"
    assert found.train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 4 + [3] * 4
    assert found.notes[0].startswith("3 image files left out because they cannot be used: train/CNV/CNV-100-1")
    (kermany / "test/DME/DME-301-1.jpeg").write_bytes(b"")
    with pytest.raises(BadInput, match=r"(?s)once unusable images are left out.*DME: no test image"):
        load_kermany(config(kermany, cache, bad="skip"))


def test_a_decompression_bomb_is_one_more_bad_file(kermany: Path, cache: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(kermany / "train/CNV/CNV-800-1.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadInput, match=r"CNV-800-1.png: 10000 x 10000 pixels, more than"):
            load_kermany(config(kermany, cache))


def test_progress_ends_at_the_total_of_each_step(kermany: Path, cache: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    for _ in range(2):  # the second time from the cache
        load_kermany(config(kermany, cache), lambda done, total, what: calls.append((done, total, what)))
    assert calls == [(20, 20, "decoding images"), (20, 20, "reading files")]


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(kermany: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        load_kermany(config(kermany, tmp_path / "file" / "cache"))


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_length", lambda _: 7)
    with pytest.raises(BadInput, match="changed while it was being read"):
        load_kermany(config(kermany, cache))
    assert entries(cache) == 0


def test_a_file_that_changes_before_it_is_compared_in_full_is_not_cached(
    kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, path = Image.fromarray(np.full((20, 30), 90, dtype=np.uint8)), kermany / "train/CNV/CNV-800-1.png"
    picture.save(path)
    picture.save(kermany / "train/CNV/CNV-800-2.png", compress_level=0)

    def replaced(place: Path, limit: int) -> bytes:
        data = read(place, limit)
        if place == path:
            path.write_bytes((kermany / "train/CNV/CNV-100-1.jpeg").read_bytes())
        return data

    read = module.read_regular
    monkeypatch.setattr(module, "read_regular", replaced)
    with pytest.raises(BadInput, match=r"CNV-800-1.png changed while it was being read"):
        load_kermany(config(kermany, cache))
    assert entries(cache) == 0


def test_files_are_read_once_where_the_cache_has_none_of_their_lengths(
    kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def counted(path: Path, limit: int) -> bytes:
        reads.append(path)
        return read(path, limit)

    read = module.read_regular
    monkeypatch.setattr(module, "read_regular", counted)
    for times in (1, 2):
        load_kermany(config(kermany, cache))
        assert sorted(reads) == sorted(list(kermany.rglob("*.jpeg")) * times)


def test_files_of_the_same_lengths_are_told_apart_by_their_bytes(kermany: Path, cache: Path) -> None:
    path = kermany / "train/CNV/CNV-800-1.png"
    found = []
    for value in (90, 91):
        Image.new("L", (30, 20), value).save(path, compress_level=0)
        images = load_kermany(config(kermany, cache)).train
        found.append(images.images[images.names.index("train/CNV/CNV-800-1.png")].mean())
    assert found == [90, 91]
    assert entries(cache) == 2


def test_pictures_that_differ_in_one_pixel_are_two_and_equal_ones_in_other_files_one(
    kermany: Path, cache: Path
) -> None:
    picture = np.full((200, 300), 90, dtype=np.uint8)
    other = picture.copy()
    other[100, 150] = 91  # vanishes when resized
    folder = kermany / "train/CNV"
    for number, (pixels, level) in enumerate(
        [(picture, 9), (other, 9), (picture, 0), (other, 0), (picture.T, 9), (other, 9)]
    ):
        Image.fromarray(pixels).save(folder / f"CNV-800-{number}.png", compress_level=level)
    for _ in range(2):  # the second time from the cache
        images = load_kermany(config(kermany, cache)).train
        kept = [name for name in images.names if "CNV-800" in name]
        assert kept == [f"train/CNV/CNV-800-{number}.png" for number in (0, 1, 4)]
        rows = images.images[[images.names.index(name) for name in kept]]
        assert (rows == 90).all()


def _load(root: Path, cache: Path, barrier: multiprocessing.synchronize.Barrier, results: object) -> None:
    barrier.wait()
    found = load_kermany(config(root, cache))
    results.put((found.digest, found.train.images.tobytes()))  # type: ignore[attr-defined]


def test_two_processes_prepare_the_same_cache(kermany: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_load, args=(kermany, cache, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found[0] == found[1]
    assert entries(cache) == 1
