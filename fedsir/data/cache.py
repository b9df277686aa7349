"""Content-addressed store of prepared images: one folder per key, written once, then only read.

    <cache>/images/<key>/train.npy, test.npy   (N, size, size) uint8, memory-mapped read-only
                         hashes.npy            (files, 32) uint8, one hash per file offered, equal where pixels are
                         entry.json            counts, hashes of the two arrays, files that could not be read

An entry is assembled in a temporary folder beside its final place and renamed into it. The rename is atomic
and fails where the entry exists already, so of several processes the first to finish wins and nobody ever
sees half an entry. Arrays are appended with ordinary writes, not through a map: a full disk is then an error
that can be reported and not the end of the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from fedsir.errors import BadInput
from fedsir.files import open_regular, read_regular, user_path

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

_ABANDONED_AFTER_S = 24 * 3600
_MAX_METADATA_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Entry:
    """A prepared set of images.

    images: (N, size, size) uint8 of each split, read-only. pixels: sha256 of each array's bytes.
    hashes: (files, 32) uint8, equal exactly where full pictures are, in this entry alone; zeros where `bad` gives the
    reason why the file at that index was left out.
    """

    images: dict[Split, NDArray[np.uint8]]
    pixels: dict[Split, str]
    hashes: NDArray[np.uint8]
    bad: dict[int, str]

    @property
    def size(self) -> int:
        """Side of the images in pixels."""
        return int(self.images["train"].shape[1])

    @property
    def counts(self) -> dict[Split, int]:
        """Images of each split."""
        return {split: len(images) for split, images in self.images.items()}

    def fits(self, size: int, files: int) -> bool:
        """Whether it can be about that many files at that size; one that cannot has been tampered with.

        How many images they have led to is for the caller to compare with `counts`.
        """
        return self.size == size and len(self.hashes) == files and all(index < files for index in self.bad)


def cache_root(configured: Path | None) -> Path:
    """`data.cache_dir`, else $FEDSIR_CACHE, else ~/.cache/fedsir."""
    if configured is not None:
        return user_path(configured, "data.cache_dir")
    named = os.environ.get("FEDSIR_CACHE")
    if named:
        return user_path(Path(named), "FEDSIR_CACHE")
    try:
        return Path.home() / ".cache" / "fedsir"
    except RuntimeError:
        raise BadInput(
            "no cache folder: this account has no home folder.\nSet data.cache_dir or FEDSIR_CACHE."
        ) from None


def has_entries(root: Path, start: str) -> bool:
    """Whether there is an entry whose key begins like this; a folder that cannot be listed has none."""
    try:
        return any(place.name.startswith(start) for place in (root / "images").iterdir())
    except OSError:
        return False


def load_entry(root: Path, key: str) -> Entry | None:
    """The entry `key`, or None where there is none or what is there is damaged.

    Others may write to a shared cache: what is in it is data and never code, and no reason to fail.
    """
    folder = _place(root, key)
    try:
        meta = json.loads(read_regular(folder / "entry.json", _MAX_METADATA_BYTES))
        images = {split: _open(folder / f"{split}.npy", int(meta["counts"][split])) for split in SPLITS}
        pixels = {split: str(meta["pixels"][split]) for split in SPLITS}
        with open_regular(folder / "hashes.npy") as file:
            hashes = np.lib.format.read_array(file, allow_pickle=False)
        bad = {int(index): str(reason) for index, reason in meta["bad"]}
    except Exception:  # what is damaged or put there fails in any way: a header may claim any size, JSON any depth
        return None
    known = hashes.ndim == 2 and hashes.shape[1] == 32 and hashes.dtype == np.uint8 and all(i >= 0 for i in bad)
    if not known or images["train"].shape[1:] != images["test"].shape[1:]:
        return None
    return Entry(images=images, pixels=pixels, hashes=hashes, bad=bad)


def _place(root: Path, key: str) -> Path:
    return root / "images" / key


def _open(path: Path, expected: int) -> NDArray[np.uint8]:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    images: NDArray[Any]
    if expected:
        # Not `np.load`, which takes other formats as well.
        images = np.lib.format.open_memmap(path, mode="r")
    else:
        # An array without rows cannot be mapped.
        with path.open("rb") as file:
            images = np.lib.format.read_array(file, allow_pickle=False)
    if images.ndim != 3 or len(images) != expected or images.dtype != np.uint8 or images.shape[1] != images.shape[2]:
        raise ValueError(f"{path} does not hold {expected} images")
    return images


class EntryWriter:
    """Writes one entry; nothing is in the cache before `commit`, and nothing stays behind without it.

    A context manager. Raises `BadInput` where the folder cannot be written or the disk is full.
    """

    def __init__(self, root: Path, size: int) -> None:
        self._root, self._size = root, size
        # Not `tempfile`: its folders are private to the user, and a cluster shares one cache.
        self._folder = root / "images" / f".partial-{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True)
            self._blocks = {split: _Block(self._folder / f"{split}.npy", size) for split in SPLITS}
        except OSError as error:
            raise _unwritable(root, error) from error
        _remove_abandoned(root / "images")

    def __enter__(self) -> EntryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for block in self._blocks.values():
            # It writes again what a full disk has refused, and that has been said.
            with contextlib.suppress(OSError):
                block.file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(self, split: Split, images: NDArray[np.uint8]) -> None:
        """Add (size, size) or (M, size, size) uint8 rows to a split."""
        try:
            self._blocks[split].append(images)
        except OSError as error:
            raise _unwritable(self._root, error) from error

    def commit(self, key: str, hashes: NDArray[np.uint8], bad: dict[int, str]) -> Entry:
        """Publish the entry under `key`, or take the one that another process has published meanwhile."""
        meta = {
            "counts": {split: block.rows for split, block in self._blocks.items()},
            "pixels": {split: block.sha.hexdigest() for split, block in self._blocks.items()},
            "bad": sorted(bad.items()),
        }
        place = _place(self._root, key)
        try:
            for block in self._blocks.values():
                block.finish()
            np.save(self._folder / "hashes.npy", hashes)
            (self._folder / "entry.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            self._publish(key, hashes, bad)
        except OSError as error:
            raise _unwritable(self._root, error) from error
        entry = load_entry(self._root, key)
        if entry is None:
            raise BadInput(f"cache entry {place} cannot be read back.\nDelete that folder and run again.")
        return entry

    def _alike(self, found: Entry, hashes: NDArray[np.uint8], bad: dict[int, str]) -> bool:
        """Whether an entry can be what another process has made of the same files."""
        rows = {split: block.rows for split, block in self._blocks.items()}
        same = found.size == self._size and found.counts == rows and found.bad.keys() == bad.keys()
        return same and np.array_equal(found.hashes, hashes)

    def _publish(self, key: str, hashes: NDArray[np.uint8], bad: dict[int, str]) -> None:
        place = _place(self._root, key)
        for _ in range(5):
            try:
                self._folder.rename(place)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            found = load_entry(self._root, key)
            if found is not None and self._alike(found, hashes, bad):
                return
            # Damaged: out of the way and try again, unless another process has just done the same.
            with contextlib.suppress(FileNotFoundError):
                place.rename(self._folder / "damaged")
            shutil.rmtree(self._folder / "damaged", ignore_errors=True)


class _Block:
    """A .npy file that grows row by row; the header is rewritten once the number of rows is known."""

    def __init__(self, path: Path, size: int) -> None:
        # Rows are short: many go into one write.
        self.file: BinaryIO = path.open("wb", buffering=1 << 20)
        self.sha = hashlib.sha256()
        self.size, self.rows = size, 0
        self._write_header()
        self._start = self.file.tell()

    def _write_header(self) -> None:
        header: dict[str, Any] = {
            "descr": "|u1",
            "fortran_order": False,
            "shape": (self.rows, self.size, self.size),
        }
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, images: NDArray[np.uint8]) -> None:
        rows = images.reshape(-1, self.size, self.size)
        data = rows.tobytes()
        self.file.write(data)
        self.sha.update(data)
        self.rows += len(rows)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        # NumPy pads headers so that the first axis may grow; were that to change, rows would be overwritten.
        if self.file.tell() != self._start:
            raise RuntimeError("the .npy header grew with the number of rows")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _unwritable(root: Path, error: OSError) -> BadInput:
    return BadInput(
        f"the image cache {root} cannot be written: {error.strerror or error}.\n"
        "Set data.cache_dir or FEDSIR_CACHE to a folder with space that you may write to."
    )


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed processes left behind; a day is far longer than any preparation takes."""
    for path in folder.glob(".partial-*"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process was quicker
            continue
