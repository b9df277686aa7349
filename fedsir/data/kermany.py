"""The Kermany OCT2017 release folder."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedsir.config.data import KermanyData
from fedsir.data.catalogue import Catalogue, resolve_overlap
from fedsir.data.dataset import Dataset
from fedsir.data.messages import listing
from fedsir.data.prepare import prepare
from fedsir.data.progress import Progress, silent
from fedsir.errors import BadInput
from fedsir.files import is_folder, user_path

CLASSES = ("CNV", "DME", "DRUSEN", "NORMAL")
LAYOUT = "Expected ROOT/{train,test}/{CNV,DME,DRUSEN,NORMAL}/CLASS-PATIENT-N.jpeg, as the release unpacks."

_FILE_NAME = re.compile(r"(?P<label>[A-Z]+)-(?P<patient>\d+)-(?P<number>\d+)\.(?:jpeg|jpg|png)", re.IGNORECASE)
_LITTER = {"thumbs.db", "desktop.ini"}


def load_kermany(config: KermanyData, progress: Progress = silent) -> Dataset:
    """Train and test of the release; raises `BadInput` for a folder or files that cannot be used."""
    root = user_path(config.root, "data.root")
    catalogue, notes = list_kermany(root)
    catalogue, dropped = resolve_overlap(catalogue, config.on_patient_overlap, "kermany")
    return prepare(catalogue, config, "kermany", (*notes, *dropped), progress)


def list_kermany(root: Path) -> tuple[Catalogue, tuple[str, ...]]:
    """The files of a release folder, train then test, by class and name; and notes about what is not used.

    Patients are told apart by the number alone: the release uses one number under several classes for one
    person, and the name of a file is not unique across its editions.
    """
    try:
        return _list(root)
    except OSError as error:
        raise BadInput(f"kermany data: {root} cannot be read: {error.strerror or error}.\n{LAYOUT}") from error


def _list(root: Path) -> tuple[Catalogue, tuple[str, ...]]:
    _check_layout(root)
    files: list[tuple[Path, str, int, int, bool]] = []
    strange: list[str] = []
    for split in ("train", "test"):
        for label, class_name in enumerate(CLASSES):
            folder = root / split / class_name
            for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
                if _is_litter(path):
                    continue
                match = _FILE_NAME.fullmatch(path.name)
                name = f"{split}/{class_name}/{path.name}"
                if match is None:
                    strange.append(f"{name}: not named CLASS-PATIENT-N.jpeg")
                elif match["label"].upper() != class_name:
                    strange.append(f"{name}: the name says {match['label']}, the folder {class_name}")
                else:
                    files.append((path, name, label, int(match["patient"]), split == "test"))
    if strange:
        raise BadInput(
            listing(
                f"the kermany folder {root} holds files of unknown patient or class:",
                strange,
                "Rename them to CLASS-PATIENT-N.jpeg or move them out of the folder.",
            )
        )
    # Python's integers: a number in a file name may have any number of digits.
    numbers = sorted({file[3] for file in files})
    index_of = {number: index for index, number in enumerate(numbers)}
    catalogue = Catalogue(
        class_names=CLASSES,
        paths=tuple(file[0] for file in files),
        names=tuple(file[1] for file in files),
        labels=np.array([file[2] for file in files], dtype=np.int64),
        patients=np.array([index_of[file[3]] for file in files], dtype=np.int64),
        patient_names=tuple(str(number) for number in numbers),
        is_test=np.array([file[4] for file in files], dtype=np.bool_),
    )
    unused = ("folder val of the release is not used",) if (root / "val").is_dir() else ()
    return catalogue, unused


def _check_layout(root: Path) -> None:
    if not is_folder(root):
        what = "is not a folder" if root.exists() else "does not exist"
        raise BadInput(f"kermany data: {root} {what}.\n{LAYOUT}\nSet data.root to the unpacked release.")
    if not (root / "train").is_dir() and not (root / "test").is_dir():
        inner = sorted(path.parent for path in root.glob("*/train") if path.is_dir())
        hint = f'Set data.root to "{inner[0]}".' if inner else "Set data.root to the folder that holds train and test."
        raise BadInput(f"kermany data: {root} holds neither train nor test.\n{LAYOUT}\n{hint}")
    missing = [
        f"{split}/{name}" for split in ("train", "test") for name in CLASSES if not (root / split / name).is_dir()
    ]
    if missing:
        raise BadInput(listing(f"kermany data: {root} lacks folders:", missing, LAYOUT))
    unknown = [
        f"{split}/{path.name}"
        for split in ("train", "test")
        for path in sorted((root / split).iterdir())
        if path.is_dir() and path.name not in CLASSES and not _is_litter(path)
    ]
    if unknown:
        raise BadInput(listing(f"kermany data: {root} holds folders of unknown classes:", unknown, LAYOUT))


def _is_litter(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in _LITTER
