"""OCTMNIST archives of MedMNIST (`octmnist.npz`, `octmnist_128.npz`, ...)."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedsir.config.data import MedMnistData
from fedsir.data import decode
from fedsir.data.cache import SPLITS, Entry, EntryWriter, Split, cache_root, load_entry
from fedsir.data.catalogue import check_classes
from fedsir.data.dataset import Dataset, ImageSet
from fedsir.data.digest import dataset_digest
from fedsir.data.duplicates import find_duplicates
from fedsir.data.messages import count
from fedsir.data.prepare import in_threads
from fedsir.data.progress import Progress, silent
from fedsir.errors import BadInput, first_line
from fedsir.files import open_regular, user_path

# Choroidal neovascularization, diabetic macular edema, drusen, normal: the archive's 0, 1, 2, 3.
CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
PARTS: dict[str, Split] = {"test": "test", "train": "train", "val": "train"}
LAYOUT = (
    "Expected an octmnist*.npz archive of MedMNIST with {train,val,test}_images (N, H, W) uint8 and\n"
    "{train,val,test}_labels (N, 1) from 0 to 3."
)
_CHUNK_BYTES = 64_000_000

# A scan does not compress further; small members may.
MAX_COMPRESSION = 100
SMALL_BYTES = 100_000_000
# Far more than there are images in any edition.
MAX_LABELS = 10_000_000


def load_medmnist(config: MedMnistData, progress: Progress = silent) -> Dataset:
    """An archive's train and val to train on, its test to test on; `BadInput` for any other file.

    Pickled members are never read. Pictures are resized where their size is not `config.image_size`.
    """
    path = user_path(config.path, "data.path")
    with _explained(path):
        return _load(path, config, progress)


def count_images(path: Path) -> dict[Split, int]:
    """How many images an archive has labels for, by split; `BadInput` as `load_medmnist`. No image is looked at."""
    with _explained(path):
        labels = _labels(path)
    return _by_split({part: len(of_part) for part, of_part in labels.items()})


def _by_split(counts: Mapping[str, int]) -> dict[Split, int]:
    """Images of each split from those of each part."""
    return {split: sum(counts[part] for part in PARTS if PARTS[part] == split) for split in SPLITS}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"medmnist data: {path} does not exist.\n{LAYOUT}\nSet data.path to the file.") from None
    except Exception as error:  # readers of damaged archives raise about anything: of zip, lzma, tokenize, ...
        raise BadInput(f"medmnist data: {path} cannot be read: {first_line(error)}.\n{LAYOUT}") from error


def _load(path: Path, config: MedMnistData, progress: Progress) -> Dataset:
    labels = _labels(path)
    joined = {
        "train": np.concatenate([labels["train"], labels["val"]]),
        "test": labels["test"],
    }
    name = path.stem
    check_classes(CLASSES, joined["train"], joined["test"], name)
    entry = _entry(path, config, {part: len(labels[part]) for part in PARTS}, progress)
    names = {
        "train": tuple(f"{part}/{i}" for part in ("train", "val") for i in range(len(labels[part]))),
        "test": tuple(f"test/{i}" for i in range(len(labels["test"]))),
    }
    n_train = len(joined["train"])
    train = ImageSet(entry.images["train"], joined["train"], np.arange(n_train, dtype=np.int64), names["train"])
    others = np.arange(n_train, n_train + len(joined["test"]), dtype=np.int64)
    test = ImageSet(entry.images["test"], joined["test"], others, names["test"])
    return Dataset(
        name=name,
        kind="real",
        class_names=CLASSES,
        train=train,
        test=test,
        digest=dataset_digest(CLASSES, train, test, entry.pixels),
        notes=_notes(entry),
    )


def _labels(path: Path) -> dict[str, NDArray[np.int64]]:
    labels: dict[str, NDArray[np.int64]] = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        present = set(archive.namelist())
        wanted = [f"{part}_{what}.npy" for part in PARTS for what in ("images", "labels")]
        missing = [name.removesuffix(".npy") for name in wanted if name not in present]
        if missing:
            raise BadInput(f"medmnist data: {path} lacks {', '.join(missing)}.\n{LAYOUT}")
        for name in wanted:
            _refuse_bomb(archive.getinfo(name), path, os.fstat(file.fileno()).st_size)
        for part in PARTS:
            with archive.open(f"{part}_labels.npy") as member:
                shape, _, dtype = _header(member)
            if not np.issubdtype(dtype, np.integer) or not shape or math.prod(shape) != shape[0]:
                raise BadInput(f"medmnist data: {path}: {part}_labels is not one integer per image.\n{LAYOUT}")
            if shape[0] > MAX_LABELS:
                raise BadInput(f"medmnist data: {path}: {part}_labels claims {shape[0]:,} images.\n{LAYOUT}")
            with archive.open(f"{part}_labels.npy") as member:
                values = np.lib.format.read_array(member, allow_pickle=False)
            labels[part] = values.reshape(-1).astype(np.int64)
            if values.size and (labels[part].min() < 0 or labels[part].max() >= len(CLASSES)):
                raise BadInput(
                    f"medmnist data: {path}: {part}_labels holds values from {labels[part].min()} to "
                    f"{labels[part].max()}.\n{LAYOUT}"
                )
    return labels


def _refuse_bomb(member: zipfile.ZipInfo, path: Path, archive_bytes: int) -> None:
    """Raise BadInput for a member that would unfold into far more than scans do; it cannot be larger than the file."""
    packed = min(member.compress_size, archive_bytes)
    if member.file_size > max(SMALL_BYTES, MAX_COMPRESSION * packed):
        raise BadInput(
            f"medmnist data: {path}: {member.filename} unfolds from {packed:,} to "
            f"{member.file_size:,} bytes, which scans do not; it is damaged or hostile.\n{LAYOUT}"
        )


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type that a .npy member claims to have."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)


def _entry(path: Path, config: MedMnistData, counts: dict[str, int], progress: Progress) -> Entry:
    root, size = cache_root(config.cache_dir), config.image_size
    with open_regular(path) as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    key = hashlib.sha256(f"medmnist/{decode.algorithm()}/{size}/{sha}".encode()).hexdigest()
    entry = load_entry(root, key)
    if entry is not None and entry.fits(size, sum(counts.values())) and entry.counts == _by_split(counts):
        return entry
    hashes: list[bytes] = []
    with (
        open_regular(path) as file,
        zipfile.ZipFile(file) as archive,
        EntryWriter(root, size) as writer,
    ):
        for part, split in PARTS.items():
            with archive.open(f"{part}_images.npy") as member:
                done = 0
                for chunk in _stream(member, f"{part}_images", counts[part]):
                    hashes += [decode.pixel_hash(image) for image in chunk]
                    resized = list(in_threads(partial(decode.resize, size=size), list(chunk), silent, ""))
                    writer.append(split, np.stack(resized))
                    done += len(chunk)
                    progress(done, counts[part], f"resizing {part} images")
        return writer.commit(key, np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 32), {})


def _stream(member: IO[bytes], name: str, expected: int) -> Iterator[NDArray[np.uint8]]:
    """The images of one member, a piece at a time: the largest archives do not fit into small machines."""
    shape, fortran, dtype = _header(member)
    if dtype != np.uint8 or len(shape) != 3 or fortran or min(shape[1:]) < 1:
        raise BadInput(f"medmnist data: {name} is {dtype} of shape {shape}, not grey images.\n{LAYOUT}")
    if shape[0] != expected:
        raise BadInput(f"medmnist data: {shape[0]} {name} but {expected} labels.\n{LAYOUT}")
    pixels = shape[1] * shape[2]
    if pixels > decode.MAX_PIXELS:
        raise BadInput(
            f"medmnist data: {name} are of {shape[1]} x {shape[2]} pixels, more than the {decode.MAX_PIXELS:,} that "
            f"are decoded.\n{LAYOUT}"
        )
    chunk = max(1, _CHUNK_BYTES // pixels)
    for start in range(0, expected, chunk):
        rows = min(chunk, expected - start)
        data = member.read(rows * pixels)
        if len(data) != rows * pixels:
            raise BadInput(f"medmnist data: {name} ends early.\n{LAYOUT}")
        yield np.frombuffer(data, dtype=np.uint8).reshape(rows, *shape[1:])


def _notes(entry: Entry) -> tuple[str, ...]:
    notes = [
        "the archive names no patients: each image counts as its own patient, and one person's images may be "
        "in train and in test"
    ]
    is_test = np.arange(len(entry.hashes)) < len(entry.images["test"])
    duplicate_of = find_duplicates(entry.hashes, is_test)
    repeated = int(np.sum(duplicate_of >= 0))
    if repeated:
        across = int(np.sum((duplicate_of >= 0) & ~is_test & is_test[duplicate_of]))
        notes.append(
            f"{count(repeated, 'image')} with the same pixels as another kept as the archive has them; "
            f"{across} of train are also in test"
        )
    return tuple(notes)
