"""What a report says, before it is laid out as a page, as Markdown, LaTeX or CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mark = Literal["", "best", "second"]
FACETS = ("task", "noise", "ratio", "alpha", "method", "budget")
"""What the page filters by; values as they are shown (`Kermany`, `symmetric`, `0.3`, `2`, `oct_fedsir`, ...)."""


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    All figures are in the unit of the table (shares in percent). mean: None where nothing was recorded. sd: sample
    standard deviation over seeds, None for one seed. low, high: 95 % bootstrap interval, None where it cannot be had.
    seeds, runs: what went in. paper, paper_sd: the paper's value for the same conditions, None where it has none; on
    phantoms it still is the paper's on real images, as the caption says. warnings: why the figure may mislead.
    """

    mean: float | None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: tuple[int, ...] = ()
    runs: int = 0
    paper: float | None = None
    paper_sd: float | None = None
    mark: Mark = ""
    warnings: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """Own mean minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Column:
    """A column of figures. facets: keys of `FACETS` that all its cells have in common. groups: headings above the
    label that neighbours share, outermost first, as many in every column of a table (`α = 2`, or `Kermany`)."""

    label: str
    facets: Mapping[str, str]
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of a table: its headers, and one cell per column."""

    labels: tuple[str, ...]
    facets: Mapping[str, str]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """key: as in the paper (`1`, `S3`) or a short name. heads: names of the headers of its lines. data_kinds: what
    images it is about (`phantom`, `real`)."""

    key: str
    title: str
    caption: str
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    data_kinds: tuple[str, ...]
    unit: str = "%"
    digits: int = 2

    @property
    def heading(self) -> str:
        """`Table S1: ...` for tables of the paper; the others have their title alone."""
        return f"Table {self.key}: {self.title}" if re.fullmatch(r"S?\d+(\.\d+)?", self.key) else self.title


@dataclass(frozen=True)
class Report:
    """title: of the page. source: where the record lies, without passwords. warnings: what a reader must know first.
    missing: cells that a complete grid would have, in words. failed: failed runs with their errors."""

    title: str
    source: str
    data_kinds: tuple[str, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]
    failed: tuple[str, ...]
    tables: tuple[Table, ...]


def letter(number: int) -> str:
    """The mark of a note, from 0: a, b, ..., z, aa, ab, ..."""
    last = chr(ord("a") + number % 26)
    return last if number < 26 else letter(number // 26 - 1) + last
