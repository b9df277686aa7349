"""Files of studies: CSV with one line per measurement, appended as they come, so that a study can be continued."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedsir.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

READERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": "True".__eq__}


@dataclass(frozen=True)
class RowFile(Generic[R]):
    """Reads and writes rows of one kind. row: a dataclass of fields as in `READERS`; study: `a ... study`."""

    row: type[R]
    study: str

    def read(self, path: Path) -> list[R]:
        """Rows of a file, none if it does not exist. Raises BadInput for other files."""
        if not path.exists():
            return []
        kinds = {f.name: READERS[str(f.type)] for f in fields(self.row)}
        try:
            with path.open(newline="", encoding="utf-8") as file:
                lines = csv.DictReader(file)
                if lines.fieldnames is not None and list(lines.fieldnames) != list(kinds):
                    raise ValueError("its columns are others")
                return [self.row(**{name: kind(line[name]) for name, kind in kinds.items()}) for line in lines]
        except (OSError, csv.Error, ValueError, TypeError) as error:
            raise BadInput(f"{path} is not the file of {self.study} ({error}).\nName another with --out.") from error

    def append(self, path: Path, rows: Sequence[R]) -> None:
        """Add rows to a file, with its header if it is new. Raises BadInput where it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [f.name for f in fields(self.row)])
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerows(asdict(row) for row in rows)
        except OSError as error:
            reason = error.strerror or error
            raise BadInput(f"{path} cannot be written ({reason}).\nName another with --out.") from error
