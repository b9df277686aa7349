"""Image files to cached arrays: hash, decode in parallel, drop duplicates, report what cannot be read."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import FileSource
from fedsir.data import decode
from fedsir.data.cache import SPLITS, Entry, EntryWriter, Split, cache_root, has_entries, load_entry
from fedsir.data.catalogue import Catalogue, check_classes
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.digest import dataset_digest
from fedsir.data.duplicates import Alike, describe_duplicates, find_duplicates, storage_order
from fedsir.data.messages import count, inline, listing
from fedsir.data.progress import Progress
from fedsir.errors import BadInput
from fedsir.files import read_regular

T = TypeVar("T")
R = TypeVar("R")

# Images that a thread takes at a time: handing one over costs a tenth of reading it.
_TOGETHER = 8

# Such parts per thread that are handed out beforehand: nobody waits for the one who takes them in.
_AHEAD = 4

# Images between two words on progress.
_PROGRESS = 256

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


def in_threads(function: Callable[[T], R], items: Sequence[T], progress: Progress, what: str) -> Iterator[R]:
    """`map` in order over one thread per core; hashing, decoding and resizing all release the interpreter."""

    def several(part: Sequence[T]) -> list[R]:
        return [function(item) for item in part]

    done, threads = 0, preparing_threads()
    handed_out: deque[Future[list[R]]] = deque()
    parts = (items[start : start + _TOGETHER] for start in range(0, len(items), _TOGETHER))
    pool = ThreadPoolExecutor(threads)
    try:
        handed_out.extend(pool.submit(several, part) for part in islice(parts, _AHEAD * threads))
        while handed_out:
            results = handed_out.popleft().result()
            handed_out.extend(pool.submit(several, part) for part in islice(parts, 1))
            yield from results
            before, done = done, done + len(results)
            if done == len(items) or done // _PROGRESS > before // _PROGRESS:
                progress(done, len(items), what)
    finally:
        # Where it ends early, nobody wants what has not begun.
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _File:
    """What one reading of a file gives.

    sha: sha256 (hex) of its bytes, "" where it cannot be read. picture: its resized pixels, and the hash of
    those together with the shape of the full picture, or None where there are none, and then why: `reason`.
    """

    sha: str
    picture: tuple[NDArray[np.uint8], bytes] | None
    reason: str


def _entry(catalogue: Catalogue, config: FileSource, progress: Progress) -> Entry:
    root, is_test, size = cache_root(config.cache_dir), catalogue.is_test, config.image_size
    lengths = [_length(path) for path in catalogue.paths]
    outline = _outline(lengths, is_test, size)
    # Where no entry is about files of these lengths, none is about these files: each is read once then.
    if has_entries(root, _key_prefix(outline)):
        shas = list(in_threads(_sha256, catalogue.paths, progress, "reading files"))
        entry = load_entry(root, _key(outline, shas))
        if entry is not None and entry.fits(size, len(shas)) and entry.counts == _stored(entry, is_test):
            return entry
    return _decode(catalogue, lengths, outline, root, size, progress)


def _stored(entry: Entry, is_test: NDArray[np.bool_]) -> dict[Split, int]:
    """Images of each split that the hashes of an entry lead to."""
    stored = find_duplicates(entry.hashes, is_test) < 0
    stored[list(entry.bad)] = False
    return {split: int(np.sum(stored & (is_test == (split == "test")))) for split in SPLITS}


def _outline(lengths: Sequence[int], is_test: NDArray[np.bool_], size: int) -> str:
    """What is known of an entry before any file is read: files, their lengths, splits and how they are decoded."""
    outline = hashlib.sha256(f"files/{decode.algorithm()}/{size}".encode())
    outline.update(np.array(lengths, dtype="<i8").tobytes() + is_test.tobytes())
    return outline.hexdigest()


def _key_prefix(outline: str) -> str:
    return f"{outline[:16]}-"


def _key(outline: str, shas: Sequence[str]) -> str:
    return _key_prefix(outline) + hashlib.sha256("\n".join([outline, *shas]).encode()).hexdigest()


def _decode(
    catalogue: Catalogue, lengths: Sequence[int], outline: str, root: Path, size: int, progress: Progress
) -> Entry:
    order = storage_order(catalogue.is_test)
    shas = [""] * len(catalogue)
    hashes = np.zeros((len(catalogue), 32), dtype=np.uint8)
    bad: dict[int, str] = {}
    alike = Alike(shas, lambda index: _full_hash(catalogue.paths[index], shas[index]))

    def read(index: int) -> _File:
        return _read_picture(catalogue.paths[index], lengths[index], size)

    with EntryWriter(root, size) as writer, warnings.catch_warnings():
        # Remarks on odd metadata and on size; what matters of them becomes a `BadImageError`.
        warnings.filterwarnings("ignore", module="PIL")
        for index, file in zip(
            order.tolist(), in_threads(read, order.tolist(), progress, "decoding images"), strict=True
        ):
            shas[index] = file.sha
            if file.picture is None:
                bad[index] = file.reason
                continue
            pixels, resized_hash = file.picture
            found, is_new = alike.hash_of(index, resized_hash)
            hashes[index] = np.frombuffer(found, dtype=np.uint8)
            if is_new:
                writer.append("test" if catalogue.is_test[index] else "train", pixels)
        return writer.commit(_key(outline, shas), hashes, bad)


def _full_hash(path: Path, sha: str) -> bytes:
    """The hash of a picture that has been decoded before: equal exactly where all pixels are."""
    data = _read(path)
    if isinstance(data, str) or hashlib.sha256(data).hexdigest() != sha:
        raise _changed(path)
    return decode.pixel_hash(_pixels(path, decode.decode_grey, data))


def _read_picture(path: Path, length: int, size: int) -> _File:
    data = _read(path)
    if isinstance(data, str):
        return _File("", None, data)
    if len(data) != length:
        raise _changed(path)
    sha = hashlib.sha256(data).hexdigest()
    try:
        full = _pixels(path, decode.grey_picture, data)
        pixels = decode.resize(full, size)
    except decode.BadImageError as error:
        return _File(sha, None, str(error))
    return _File(sha, (pixels, decode.pixel_hash(pixels, *full.size)), "")


def _pixels(path: Path, decoder: Callable[[bytes], R], data: bytes) -> R:
    try:
        return decoder(data)
    except MemoryError as error:
        # Not one more bad file: which files are left out must not depend on the machine.
        raise BadInput(
            f"{path}: there is not enough memory to decode this picture.\n"
            "Make it smaller, or run where more memory is free."
        ) from error


def _changed(path: Path) -> BadInput:
    return BadInput(f"{path} changed while it was being read.\nRun again once nothing writes to its folder.")


def _sha256(path: Path) -> str:
    """sha256 (hex) of a file, "" where it cannot be read."""
    data = _read(path)
    return "" if isinstance(data, str) else hashlib.sha256(data).hexdigest()


def _length(path: Path) -> int:
    """Bytes of a file, -1 where there is none that could be read."""
    try:
        status = path.stat()
    except OSError:
        return -1
    return status.st_size if S_ISREG(status.st_mode) else -1


def _read(path: Path) -> bytes | str:
    """All bytes of a file, or why it cannot be read."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return (error.strerror or str(error)).lower()


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
