"""A cohort's CSV manifest: text to checked rows, every problem reported at once with its line."""

from __future__ import annotations

import csv
import io
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from fedsir.data.messages import inline, listing
from fedsir.errors import BadInput
from fedsir.files import open_regular
from fedsir.text import control_character

REQUIRED = ("path", "label", "patient_id")
OPTIONAL = ("site", "eye", "visit", "volume", "split")
# A million images with long paths take a fifth of this.
MAX_FILE_BYTES = 1_000_000_000
# No file system takes longer paths, and no person is shown longer names.
MAX_PATH, MAX_NAME = 4096, 200
LAYOUT = (
    "Expected a CSV file with the columns path,label,patient_id and optionally site,eye,visit,volume,split\n"
    '(split: train, val or test), for example "scans/0001.png,GA,P017"; paths are relative to data.root.'
)


@dataclass(frozen=True)
class Row:
    """One image. `path` is relative with slashes; `split` is train, test or None (no such column)."""

    line: int
    path: str
    label: str
    patient_id: str
    site: str | None
    split: str | None


def read_manifest(manifest: Path, root: Path, known_labels: Sequence[str] | None) -> tuple[list[Row], list[str]]:
    """The rows of a manifest and notes about columns that are not used.

    Raises one `BadInput` with line numbers for everything that is wrong with the rows: cells that are empty
    or missing, too long or with control characters, unknown split values, duplicate paths, labels not among
    `known_labels` (None: any label will do), paths that leave `root`.
    """
    header, records = _read_csv(manifest)
    columns = _columns(header, manifest)
    problems: list[str] = []
    rows: list[Row] = []
    first_line: dict[str, int] = {}
    inside = _Inside(root)
    for line, record in records:
        if len(record) != len(header):
            problems.append(f"line {line}: {len(record)} cells under {len(header)} columns")
            continue
        cells = {name: record[index].strip() for name, index in columns.items()}
        path = _normal(cells["path"])
        found = _cell_problems(cells, known_labels)
        if cells["path"]:
            found += inside.problems(path, cells["path"])
            if path in first_line:
                found.append(f"path {cells['path']} is already on line {first_line[path]}")
            first_line.setdefault(path, line)
        problems += [f"line {line}: {problem}" for problem in found]
        split = {"val": "train"}.get(cells.get("split", ""), cells.get("split"))
        rows.append(Row(line, path, cells["label"], cells["patient_id"], cells.get("site"), split))
    if problems:
        raise BadInput(listing(f"manifest {manifest} has lines that cannot be used:", problems, _remedy(known_labels)))
    if not rows:
        raise BadInput(f"manifest {manifest} lists no images.\n{LAYOUT}")
    unused = [name for name in header if name.lower() not in (*REQUIRED, *OPTIONAL)]
    return rows, [f"manifest columns not used: {inline(unused)}"] if unused else []


def _read_csv(manifest: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        with open_regular(manifest, MAX_FILE_BYTES) as file:
            # utf-8-sig: spreadsheets put a byte order mark first.
            text = file.read(MAX_FILE_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"manifest {manifest} does not exist.\n{LAYOUT}\nSet data.manifest to the file.") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"manifest {manifest} is not UTF-8 text (byte {error.start}).\nSave it as CSV UTF-8.") from None
    except OSError as error:
        raise BadInput(f"manifest {manifest} cannot be read: {error.strerror or error}.\n{LAYOUT}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        records = []
        line = reader.line_num + 1
        for record in reader:
            if any(cell.strip() for cell in record):
                records.append((line, record))
            line = reader.line_num + 1  # where the next record starts; quoted cells may hold line breaks
    except csv.Error as error:
        raise BadInput(f"manifest {manifest} is not a well-formed CSV file: line {reader.line_num}: {error}.") from None
    return header, records


def _columns(header: Sequence[str], manifest: Path) -> dict[str, int]:
    lowered = [name.lower() for name in header]
    repeated = sorted({name for name in lowered if name in (*REQUIRED, *OPTIONAL) and lowered.count(name) > 1})
    missing = [name for name in REQUIRED if name not in lowered]
    if missing:
        found = ", ".join(header) if any(header) else "nothing"
        hint = "\nThe cells seem to be separated by semicolons; separate them by commas." if ";" in found else ""
        raise BadInput(
            f"manifest {manifest} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"its first line has: {found}.{hint}\n{LAYOUT}"
        )
    if repeated:
        raise BadInput(f"manifest {manifest} has more than one column {', '.join(repeated)}.\n{LAYOUT}")
    return {name: lowered.index(name) for name in (*REQUIRED, *OPTIONAL) if name in lowered}


def _cell_problems(cells: Mapping[str, str], known_labels: Sequence[str] | None) -> list[str]:
    # A site or split column that is there must be filled: it decides who holds or tests an image.
    problems = [f"{name} is empty" for name in (*REQUIRED, "site", "split") if cells.get(name) == ""]
    # Names are printed and written to files: escape sequences would reach the terminal.
    for name in ("label", "patient_id", "site"):
        cell = cells.get(name, "")
        if len(cell) > MAX_NAME:
            problems.append(f"{name} has {len(cell)} characters, more than the {MAX_NAME} that are shown")
        elif (character := control_character(cell)) is not None:
            problems.append(f"{name} {cell!a} contains the control character {character}")
    split = cells.get("split")
    if split and split not in ("train", "val", "test"):
        problems.append(f"split is {split!r}, not train, val or test")
    if cells["label"] and known_labels is not None and cells["label"] not in known_labels:
        problems.append(f"label {cells['label']!r} is in none of data.classes")
    return problems


def _normal(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/"))


class _Inside:
    """Tells which paths stay below a folder, links included."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._folders: dict[str, str] = {}

    def problems(self, path: str, written: str) -> list[str]:
        if len(written) > MAX_PATH:
            return [f"path has {len(written)} characters, more than a file system takes"]
        if (character := control_character(written)) is not None:
            return [f"path {written!a} contains the control character {character}"]
        # The letter of a drive is all that Windows adds to what is looked for here.
        windows = PureWindowsPath(written) if ":" in written else None
        if path.startswith("/") or (windows is not None and windows.drive):
            return [f"path {written} is absolute; paths are relative to {self._root}"]
        if ".." in written.replace("\\", "/").split("/"):
            return [f"path {written} contains '..'"]
        if not Path(self._real(path)).is_relative_to(self._root):
            return [f"path {written} is a link out of {self._root}"]
        return []

    def _real(self, path: str) -> str:
        """`path` without links; folders are looked up once, since a cohort of a million images has few."""
        folder, name = posixpath.split(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(self._root / folder)
        place = f"{self._folders[folder]}/{name}"
        # Once per image, where a Path takes twice as long.
        return os.path.realpath(place) if os.path.islink(place) else place  # noqa: PTH114


def _remedy(known_labels: Sequence[str] | None) -> str:
    if known_labels is None:
        return "Mend these lines."
    return f"Mend these lines. Labels in data.classes: {inline(list(known_labels))}."
