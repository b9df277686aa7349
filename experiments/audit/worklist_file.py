"""The worklist as a CSV file that graders fill in, and what comes back."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsir.audit.worklist import Proposal
from fedsir.errors import BadInput
from fedsir.files import read_regular

GRADER = "grader_label"
UNSURE = "unsure"
COLUMNS = (
    "rank",
    "image",
    "site",
    "observed_label",
    "proposed_label",
    "margin",
    "stability",
    "representative_observed",
    "representative_proposed",
    "residual_observed",
    "residual_proposed",
    GRADER,
)
MAX_BYTES = 200_000_000
MAX_NAMED = 8

# Spreadsheets take cells that begin so for formulas.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Entry:
    """One row: which image, which change is proposed, and the grader's label; None where it is still empty."""

    image: str
    site: str
    observed: str
    proposed: str
    grader: str | None


def worklist_rows(
    proposals: Sequence[Proposal], images: Sequence[str], sites: Sequence[str], class_names: Sequence[str]
) -> list[dict[str, str | int]]:
    """Cells by column; `images` and `sites` name every training image and its site."""
    return [
        {
            "rank": rank,
            "image": _shielded(images[p.image]),
            "site": _shielded(sites[p.image]),
            "observed_label": _shielded(class_names[p.observed]),
            "proposed_label": _shielded(class_names[p.proposed]),
            "margin": f"{p.margin:.4f}",
            "stability": f"{p.stability:.3f}",
            "representative_observed": f"{p.representative[0]:.5f}",
            "representative_proposed": f"{p.representative[1]:.5f}",
            "residual_observed": f"{p.residual[0]:.5f}",
            "residual_proposed": f"{p.residual[1]:.5f}",
            GRADER: "",
        }
        for rank, p in enumerate(proposals, start=1)
    ]


def write_worklist(path: Path, rows: Sequence[Mapping[str, str | int]]) -> None:
    """Write the rows with their header, readable by spreadsheets."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue(), encoding="utf-8-sig", newline="")


def read_worklist(path: Path) -> list[Entry]:
    """Rows of a worklist, graded or not. Raises BadInput for files that are none."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
        lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in lines.fieldnames or ()]
        missing = [c for c in ("image", "site", "observed_label", "proposed_label", GRADER) if c not in header]
        if missing:
            hint = " The cells seem to be separated by semicolons." if header and ";" in header[0] else ""
            raise BadInput(
                f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}.{hint}\n"
                "Give the worklist.csv of an audit with the column grader_label filled in, saved as CSV with commas."
            )
        lines.fieldnames = header
        rows = list(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read as a worklist ({reason}).\nSave it as CSV UTF-8.") from error
    entries = []
    for row in rows:
        cells = {name: (row[name] or "").strip() for name in header if name is not None}
        entries.append(
            Entry(
                image=_bare(cells["image"]),
                site=_bare(cells["site"]),
                observed=_bare(cells["observed_label"]),
                proposed=_bare(cells["proposed_label"]),
                grader=_bare(cells[GRADER]) or None,
            )
        )
    return entries


def graded(original: Sequence[Entry], returned: Sequence[Entry], class_names: Sequence[str], path: Path) -> list[Entry]:
    """The returned rows that have a verdict, with labels as the classes are spelled, or `UNSURE`.

    Rows may come in any order and may be left out. Raises BadInput, with every fault, for rows that are not in the
    `original` worklist, are there twice, propose something else, or whose grader's label is no class.
    """
    known = {entry.image: entry for entry in original}
    spelled = {name.casefold(): name for name in class_names} | {UNSURE: UNSURE}
    faults, seen, found = [], set(), []
    for entry in returned:
        asked = known.get(entry.image)
        if asked is None:
            faults.append(f"{entry.image}: not in the audit's worklist")
        elif entry.image in seen:
            faults.append(f"{entry.image}: twice")
        elif (asked.observed, asked.proposed) != (entry.observed, entry.proposed):
            faults.append(
                f"{entry.image}: {entry.observed} to {entry.proposed}, "
                f"but the audit proposed {asked.observed} to {asked.proposed}"
            )
        elif entry.grader is not None and entry.grader.casefold() not in spelled:
            faults.append(f"{entry.image}: {GRADER} {entry.grader!r} is no class")
        elif entry.grader is not None:
            label = spelled[entry.grader.casefold()]
            found.append(Entry(entry.image, asked.site, asked.observed, asked.proposed, label))
        seen.add(entry.image)
    if faults:
        more = f"\n... and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise BadInput(
            f"{path} does not fit the audit:\n  " + "\n  ".join(faults[:MAX_NAMED]) + more + "\n"
            f"{GRADER} must be one of {', '.join(class_names)}, {UNSURE}, or empty; change no other column."
        )
    return found


def _shielded(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def _bare(text: str) -> str:
    return text[1:] if text.startswith("'") and text[1:].startswith(_FORMULA) else text
