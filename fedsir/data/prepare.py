"""Image files to cached arrays: hash, decode in parallel, drop duplicates, report what cannot be read."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import FileSource
from fedsir.data import decode
from fedsir.data.cache import SPLITS, Entry, EntryWriter, Split, cache_root, load_entry
from fedsir.data.catalogue import Catalogue, check_classes
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.digest import dataset_digest
from fedsir.data.messages import count, inline, listing
from fedsir.data.progress import Progress
from fedsir.errors import BadInput
from fedsir.files import read_regular

T = TypeVar("T")
R = TypeVar("R")

# Images per hand-out to the threads: long enough to keep them busy, short enough to stop soon on Ctrl-C.
_CHUNK = 256

# Images that a thread takes at a time: handing one over costs a tenth of reading it.
_TOGETHER = 8

# As many bytes as the largest picture that is decoded takes without compression.
MAX_FILE_BYTES = 4 * decode.MAX_PIXELS + 1_000_000


def prepare(catalogue: Catalogue, config: FileSource, name: str, notes: Sequence[str], progress: Progress) -> Dataset:
    """Decode the files of a catalogue, or take them from the cache, and apply the rules about their content.

    Files that cannot be read stop with one `BadInput` or are left out, as `config.on_bad_image` says. Of
    images with equal pixels one stays: a test image rather than a train image, otherwise the first.
    """
    check_classes(
        catalogue.class_names, catalogue.labels[~catalogue.is_test], catalogue.labels[catalogue.is_test], name
    )
    entry = _entry(catalogue, config, progress)
    found = list(notes)
    if entry.bad:
        found.append(_report_bad(catalogue, entry.bad, config.on_bad_image, name))
    duplicate_of = find_duplicates(entry.hashes, catalogue.is_test)
    found += describe_duplicates(catalogue, duplicate_of)
    kept = duplicate_of < 0
    kept[list(entry.bad)] = False
    sets = {
        split: _image_set(
            catalogue, entry.images[split], np.flatnonzero(kept & (catalogue.is_test == (split == "test")))
        )
        for split in SPLITS
    }
    train, test = sets["train"], sets["test"]
    check_classes(catalogue.class_names, train.labels, test.labels, f"{name}, once unusable images are left out,")
    return Dataset(
        name=name,
        kind="real",
        class_names=catalogue.class_names,
        train=train,
        test=test,
        digest=dataset_digest(catalogue.class_names, train, test, entry.pixels),
        notes=tuple(found),
    )


def find_duplicates(hashes: NDArray[np.uint8], is_test: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) int64: the index of the equal image that is kept instead of this one, or -1.

    hashes: (N, 32) uint8 pixel hashes; rows of zeros (files that could not be read) equal nothing. Test
    images come before train images, so of a pair across the splits the train copy goes.
    """
    first: dict[bytes, int] = {}
    duplicate_of = np.full(len(hashes), -1, dtype=np.int64)
    for index in _storage_order(is_test):
        value = hashes[index].tobytes()
        if any(value):
            kept = first.setdefault(value, int(index))
            if kept != index:
                duplicate_of[index] = kept
    return duplicate_of


def describe_duplicates(catalogue: Catalogue, duplicate_of: NDArray[np.int64]) -> list[str]:
    """Notes on dropped duplicates: how many, where, and how many contradict the image that was kept."""
    dropped = np.flatnonzero(duplicate_of >= 0)
    if not len(dropped):
        return []
    kept = duplicate_of[dropped]
    of_train, kept_test = ~catalogue.is_test[dropped], catalogue.is_test[kept]
    note = (
        f"{count(len(dropped), 'image')} dropped because another image has the same pixels: "
        f"{int(np.sum(of_train & ~kept_test))} within train, {int(np.sum(~of_train))} within test, "
        f"{int(np.sum(of_train & kept_test))} from train that are also in test"
    )
    other_patient = int(np.sum(catalogue.patients[dropped] != catalogue.patients[kept]))
    other_label = int(np.sum(catalogue.labels[dropped] != catalogue.labels[kept]))
    return [f"{note}; {other_patient} under another patient, {other_label} with another label"]


def in_threads(function: Callable[[T], R], items: Sequence[T], progress: Progress, what: str) -> Iterator[R]:
    """`map` in order over one thread per core; hashing, decoding and resizing all release the interpreter."""

    def several(part: Sequence[T]) -> list[R]:
        return [function(item) for item in part]

    with ThreadPoolExecutor(preparing_threads()) as pool:
        for start in range(0, len(items), _CHUNK):
            chunk = items[start : start + _CHUNK]
            for done in pool.map(several, [chunk[i : i + _TOGETHER] for i in range(0, len(chunk), _TOGETHER)]):
                yield from done
            progress(min(start + _CHUNK, len(items)), len(items), what)


@dataclass(frozen=True)
class _Picture:
    """A decoded file: its resized pixels and the hash of the full ones, or why there are none."""

    pixels: NDArray[np.uint8] | None = None
    hash: bytes = bytes(32)
    reason: str = ""


def _entry(catalogue: Catalogue, config: FileSource, progress: Progress) -> Entry:
    root, is_test = cache_root(config.cache_dir), catalogue.is_test
    files = list(in_threads(_file_sha256, catalogue.paths, progress, "reading files"))
    key = _key(files, is_test, config.image_size)
    entry = load_entry(root, key)
    if entry is not None and entry.fits(config.image_size, len(files)) and entry.counts == _stored(entry, is_test):
        return entry
    return _decode(catalogue, files, root, key, config.image_size, progress)


def _stored(entry: Entry, is_test: NDArray[np.bool_]) -> dict[Split, int]:
    """Images of each split that the hashes of an entry lead to."""
    stored = find_duplicates(entry.hashes, is_test) < 0
    stored[list(entry.bad)] = False
    return {split: int(np.sum(stored & (is_test == (split == "test")))) for split in SPLITS}


def _key(files: Sequence[tuple[str, str]], is_test: NDArray[np.bool_], size: int) -> str:
    key = hashlib.sha256(f"files/{decode.algorithm()}/{size}".encode())
    for (sha, _), test in zip(files, is_test, strict=True):
        key.update(f"\n{'test' if test else 'train'} {sha or 'unreadable'}".encode())
    return key.hexdigest()


def _decode(
    catalogue: Catalogue,
    files: Sequence[tuple[str, str]],
    root: Path,
    key: str,
    size: int,
    progress: Progress,
) -> Entry:
    order = _storage_order(catalogue.is_test)
    hashes = np.zeros((len(catalogue), 32), dtype=np.uint8)
    bad: dict[int, str] = {}
    seen: set[bytes] = set()

    def picture(index: int) -> _Picture:
        sha, reason = files[index]
        return _picture(catalogue.paths[index], sha, size) if sha else _Picture(reason=reason)

    with EntryWriter(root, key, size) as writer, warnings.catch_warnings():
        # Remarks on odd metadata and on size; what matters of them becomes a `BadImageError`.
        warnings.filterwarnings("ignore", module="PIL")
        decoded = in_threads(picture, order.tolist(), progress, "decoding images")
        for index, found in zip(order, decoded, strict=True):
            if found.pixels is None:
                bad[int(index)] = found.reason
                continue
            hashes[index] = np.frombuffer(found.hash, dtype=np.uint8)
            if found.hash not in seen:
                seen.add(found.hash)
                split: Split = "test" if catalogue.is_test[index] else "train"
                writer.append(split, found.pixels)
        return writer.commit(hashes, bad)


def _picture(path: Path, sha: str, size: int) -> _Picture:
    data = _read(path)
    if isinstance(data, str) or hashlib.sha256(data).hexdigest() != sha:
        raise BadInput(f"{path} changed while it was being read.\nRun again once nothing writes to its folder.")
    try:
        full = decode.decode_grey(data)
    except decode.BadImageError as error:
        return _Picture(reason=str(error))
    except MemoryError as error:
        # Not one more bad file: which files are left out must not depend on the machine.
        raise BadInput(
            f"{path}: there is not enough memory to decode this picture.\n"
            "Make it smaller, or run where more memory is free."
        ) from error
    return _Picture(pixels=decode.resize(full, size), hash=decode.pixel_hash(full))


def _file_sha256(path: Path) -> tuple[str, str]:
    """The sha256 of a file and "", or "" and why it cannot be read."""
    data = _read(path)
    return ("", data) if isinstance(data, str) else (hashlib.sha256(data).hexdigest(), "")


def _read(path: Path) -> bytes | str:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _storage_order(is_test: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Test before train, each in the order of the source."""
    return np.argsort(~is_test, kind="stable").astype(np.int64)


def _image_set(catalogue: Catalogue, images: NDArray[np.uint8], chosen: NDArray[np.int64]) -> ImageSet:
    return ImageSet(
        images=images,
        labels=catalogue.labels[chosen],
        patients=catalogue.patients[chosen],
        names=tuple(catalogue.names[i] for i in chosen),
        sites=None if catalogue.sites is None else tuple(catalogue.sites[i] for i in chosen),
    )


def _report_bad(catalogue: Catalogue, bad: dict[int, str], policy: Literal["stop", "skip"], name: str) -> str:
    lines = [f"{catalogue.names[index]}: {reason}" for index, reason in sorted(bad.items())]
    what = count(len(bad), "image file")
    if policy == "stop":
        raise BadInput(
            listing(
                f"{what} of {name} cannot be used:",
                lines,
                "Replace or remove them, or set data.on_bad_image to skip to leave them out.",
            )
        )
    return f"{what} left out because they cannot be used: {inline(lines)}"


def preparing_threads() -> int:
    """Threads that prepare images: one per core of this process, at most 32."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 32)
    return min(os.cpu_count() or 1, 32)
