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
from fedsir.data.prepare import find_duplicates
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

    monkeypatch.setattr(module.decode, "decode_grey", fail)
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
    load_kermany(config(kermany, cache), lambda done, total, what: calls.append((done, total, what)))
    assert calls == [(20, 20, "reading files"), (20, 20, "decoding images")]


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(kermany: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        load_kermany(config(kermany, tmp_path / "file" / "cache"))


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    kermany: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_file_sha256", lambda _: ("0" * 64, ""))
    with pytest.raises(BadInput, match="changed while it was being read"):
        load_kermany(config(kermany, cache))
    assert entries(cache) == 0


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


def test_find_duplicates_prefers_test_and_then_the_first() -> None:
    values = [1, 2, 1, 3, 2, 0, 0, 3]  # 0: could not be read
    hashes = np.repeat(np.array(values, dtype=np.uint8)[:, None], 32, axis=1)
    is_test = np.array([False, False, False, False, True, False, True, True])
    assert find_duplicates(hashes, is_test).tolist() == [-1, 4, 0, 7, -1, -1, -1, -1]
