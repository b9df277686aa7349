from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from fedsir.data.cache import Entry, EntryWriter, cache_root, has_entries, load_entry
from fedsir.data.digest import pixels_sha256
from fedsir.errors import BadInput

KEY = "0" * 64


def write(root: Path, rows: int = 1200, value: int = 7) -> Entry:
    with EntryWriter(root, 16) as writer:
        for start in range(0, rows, 100):
            writer.append("train", np.full((min(100, rows - start), 16, 16), value, dtype=np.uint8))
        writer.append("test", np.full((16, 16), 9, dtype=np.uint8))
        return writer.commit(KEY, np.arange(64, dtype=np.uint8).reshape(2, 32), {5: "empty file", 3: "no such file"})


def test_an_entry_is_read_as_it_was_written(cache: Path) -> None:
    assert load_entry(cache, KEY) is None
    write(cache)
    entry = load_entry(cache, KEY)
    assert entry is not None
    assert entry.images["train"].shape == (1200, 16, 16)
    assert entry.images["test"].shape == (1, 16, 16)
    assert (entry.images["train"] == 7).all()
    assert entry.bad == {3: "no such file", 5: "empty file"}
    assert entry.pixels == {split: pixels_sha256(images) for split, images in entry.images.items()}
    np.testing.assert_array_equal(entry.hashes[0], np.arange(32))


def test_entries_are_found_by_how_their_key_begins(cache: Path) -> None:
    assert not has_entries(cache, KEY[:16])
    write(cache)
    assert has_entries(cache, KEY[:16])
    assert not has_entries(cache, "1" + KEY[:15])


def test_arrays_are_mapped_read_only(cache: Path) -> None:
    images = write(cache).images["train"]
    assert isinstance(images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        images[0, 0, 0] = 1


def test_without_commit_nothing_stays(cache: Path) -> None:
    with EntryWriter(cache, 16) as writer:
        writer.append("train", np.zeros((16, 16), dtype=np.uint8))
        assert len(list((cache / "images").iterdir())) == 1
    assert list((cache / "images").iterdir()) == []


def test_a_split_without_images_is_allowed(cache: Path) -> None:
    with EntryWriter(cache, 16) as writer:
        entry = writer.commit(KEY, np.zeros((0, 32), dtype=np.uint8), {})
    assert entry.images["train"].shape == (0, 16, 16)


def test_the_second_writer_takes_what_the_first_published(cache: Path) -> None:
    first = write(cache, value=1)
    second = write(cache, value=2)
    assert second.images["train"][0, 0, 0] == first.images["train"][0, 0, 0] == 1
    assert [path.name for path in (cache / "images").iterdir()] == [KEY]


@pytest.mark.parametrize("damage", ["short array", "no metadata", "broken metadata"])
def test_a_damaged_entry_is_written_anew(cache: Path, damage: str) -> None:
    write(cache)
    folder = cache / "images" / KEY
    if damage == "short array":
        data = (folder / "train.npy").read_bytes()
        (folder / "train.npy").write_bytes(data[: len(data) // 2])
    elif damage == "no metadata":
        (folder / "entry.json").unlink()
    else:
        (folder / "entry.json").write_text('{"counts": ')
    assert load_entry(cache, KEY) is None
    assert (write(cache, value=3).images["train"] == 3).all()
    assert [path.name for path in (cache / "images").iterdir()] == [KEY]


def _write_often(root: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait()
    for _ in range(20):
        entry = write(root, rows=50)
        assert (entry.images["train"] == 7).all()


def test_two_processes_do_not_disturb_each_other(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=_write_often, args=(cache, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [path.name for path in (cache / "images").iterdir()] == [KEY]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(BadInput, match=r"file.*cannot be written.*\n.*cache_dir or FEDSIR_CACHE"):
        EntryWriter(occupied, 16)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(cache: Path) -> None:
    with EntryWriter(cache, 16) as writer:
        writer._blocks["train"].file.close()
        writer._blocks["train"].file = Path("/dev/full").open("w+b", buffering=0)  # noqa: SIM115
        with pytest.raises(BadInput, match="No space left"):
            writer.append("train", np.zeros((16, 16), dtype=np.uint8))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_nothing_stays_behind_where_a_full_disk_refuses_what_was_kept_for_later(cache: Path) -> None:
    with pytest.raises(BadInput, match="No space left"), EntryWriter(cache, 16) as writer:  # noqa: PT012
        writer._blocks["train"].file.close()
        writer._blocks["train"].file = Path("/dev/full").open("wb")  # noqa: SIM115
        for _ in range(100):
            writer.append("train", np.zeros((16, 16), dtype=np.uint8))
    assert list((cache / "images").iterdir()) == []


def test_what_killed_processes_left_is_removed_after_a_day(cache: Path) -> None:
    fresh, old = cache / "images" / ".partial-fresh", cache / "images" / ".partial-old"
    for folder in (fresh, old):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    write(cache)
    assert fresh.exists()
    assert not old.exists()


def test_cache_root_prefers_configuration_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIR_CACHE", str(tmp_path / "environment"))
    assert cache_root(tmp_path / "configured") == tmp_path / "configured"
    assert cache_root(None) == tmp_path / "environment"
    monkeypatch.delenv("FEDSIR_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "fedsir"


@pytest.mark.parametrize("part", ["hashes", "bad", "size"])
def test_an_entry_of_other_files_is_not_taken_for_what_another_process_has_written(cache: Path, part: str) -> None:
    size = 20 if part == "size" else 16
    with EntryWriter(cache, size) as writer:
        writer.append("train", np.full((1, size, size), 1, dtype=np.uint8))
        writer.commit(
            KEY, np.full((2, 32), part != "hashes", dtype=np.uint8), {0 if part == "bad" else 1: "empty file"}
        )
    with EntryWriter(cache, 16) as writer:
        writer.append("train", np.full((1, 16, 16), 2, dtype=np.uint8))
        entry = writer.commit(KEY, np.ones((2, 32), dtype=np.uint8), {1: "empty file"})
    assert (entry.images["train"] == 2).all()
    assert entry.images["train"].shape == (1, 16, 16)
