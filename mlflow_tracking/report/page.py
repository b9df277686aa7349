"""A report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from mlflow_tracking.report.figures import method_order
from mlflow_tracking.report.model import FACETS, Cell, Report, Table, letter
from mlflow_tracking.report.paper import shown_method
from mlflow_tracking.report.sheet import Pictures

FACET_NAMES = {
    "task": "data set",
    "noise": "noise",
    "ratio": "ratio η",
    "alpha": "α",
    "method": "method",
    "budget": "budget",
}
_FILES = ("report.html.j2", "report.css", "report.js")


def as_html(report: Report, pictures: Pictures, made: str = "") -> str:
    """One page of HTML with style, script and figures inside; everything from the record is escaped.

    made: when and with what, for the foot of the page.
    """
    folder = resources.files("mlflow_tracking.report") / "templates"
    files = {name: (folder / name).read_text("utf-8") for name in _FILES}
    environment = Environment(
        loader=DictLoader({_FILES[0]: files[_FILES[0]]}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files["report.js"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    sections = [(name, tuple(shown)) for name, shown in groupby(pictures.shown, lambda p: p.section)]
    return environment.get_template(_FILES[0]).render(
        report=report,
        made=made,
        # Our own files and figures, which escape what they hold; the script is also the only one that may run.
        css=Markup(files["report.css"]),
        script=Markup(script),
        script_digest=digest,
        tables=[_table_view(table) for table in report.tables],
        sections=[
            (f"section-{i}", name, [(p, Markup(p.markup), _json(p.facets)) for p in shown])
            for i, (name, shown) in enumerate(sections)
        ],
        notes=pictures.notes,
        filters=_filters(report, pictures),
    )


@dataclass(frozen=True)
class CellView:
    """A cell as text. Empty where there is nothing to say. notes: letters."""

    value: str
    sd: str
    interval: str
    paper: str
    paper_sd: str
    difference: str
    mark: str
    notes: str
    count: str


@dataclass(frozen=True)
class Heading:
    """span: columns under it."""

    text: str
    span: int


@dataclass(frozen=True)
class LineView:
    """labels: text of each header and whether it only repeats the line above. starts: a new outermost header."""

    facets: str
    labels: tuple[tuple[str, bool], ...]
    cells: tuple[CellView, ...]
    starts: bool


@dataclass(frozen=True)
class TableView:
    """heading_rows: from the outermost to the label of each column. naming_head: see `_naming_head`. notes: letters
    with their texts. seeds: of most cells, in words."""

    anchor: str
    name: str
    table: Table
    naming_head: int
    heading_rows: tuple[tuple[Heading, ...], ...]
    column_facets: tuple[str, ...]
    lines: tuple[LineView, ...]
    notes: tuple[tuple[str, str], ...]
    seeds: str


def _naming_head(table: Table) -> int:
    """Position of the header that tells lines apart best, which stays in view: words with most different values."""
    words = [
        {line.labels[i] for line in table.lines if line.labels[i] and line.labels[i][0].isalpha()}
        for i in range(len(table.heads))
    ]
    return max(range(len(table.heads)), key=lambda i: (len(words[i]), -i), default=0)


def _table_view(table: Table) -> TableView:
    cells = [cell for line in table.lines for cell in line.cells]
    warnings = list(dict.fromkeys(text for cell in cells for text in cell.warnings))
    letters = {text: letter(number) for number, text in enumerate(warnings)}
    counts = Counter(len(cell.seeds) for cell in cells if cell.mean is not None and cell.seeds)
    usual = counts.most_common(1)[0][0] if counts else 0
    depth = max((len(column.groups) for column in table.columns), default=0)
    rows = [_headings([column.groups[: level + 1] for column in table.columns]) for level in range(depth)]
    rows.append(tuple(Heading(column.label, 1) for column in table.columns))
    previous: tuple[str, ...] = ()
    lines = []
    for line in table.lines:
        # A header repeats the line above only where those before it do.
        same = [line.labels[: i + 1] == previous[: i + 1] for i in range(len(line.labels))]
        cells_of_line = tuple(_cell_view(cell, table, letters, usual) for cell in line.cells)
        labels = tuple(zip(line.labels, same, strict=True))
        starts = bool(previous) and len(labels) > 1 and not same[0]
        lines.append(LineView(_json(line.facets), labels, cells_of_line, starts))
        previous = line.labels
    return TableView(
        anchor=f"table-{table.key}",
        name=table.heading,
        table=table,
        naming_head=_naming_head(table),
        heading_rows=tuple(rows),
        column_facets=tuple(_json(column.facets) for column in table.columns),
        lines=tuple(lines),
        notes=tuple((letters[text], text) for text in warnings),
        seeds="" if not usual else f"{usual} seed{'' if usual == 1 else 's'} per cell",
    )


def _cell_view(cell: Cell, table: Table, letters: Mapping[str, str], usual_seeds: int) -> CellView:
    difference = cell.difference
    return CellView(
        value="" if cell.mean is None else _number(cell.mean, table.digits),
        sd="" if cell.mean is None or cell.sd is None else _number(cell.sd, table.digits),
        interval=(
            ""
            if cell.low is None or cell.high is None
            else f"{_number(cell.low, table.digits)} – {_number(cell.high, table.digits)}"
        ),
        paper="" if cell.paper is None else _number(cell.paper, table.digits),
        paper_sd="" if cell.paper_sd is None else _number(cell.paper_sd, table.digits),
        difference="" if difference is None else _number(difference, table.digits, signed=True),
        mark=cell.mark,
        notes=" ".join(letters[text] for text in cell.warnings),
        count="" if not cell.seeds or len(cell.seeds) == usual_seeds else f"n = {len(cell.seeds)}",
    )


def _headings(groups: Sequence[tuple[str, ...]]) -> tuple[Heading, ...]:
    """Neighbours whose headings agree from the outermost on share one."""
    return tuple(Heading(path[-1] if path else "", len(list(same))) for path, same in groupby(groups))


def _filters(report: Report, pictures: Pictures) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Facets with at least two values: key, name and values in order, each with the text for it."""
    found: dict[str, dict[str, None]] = {facet: {} for facet in FACETS}

    def note(facets: Mapping[str, str]) -> None:
        for facet, value in facets.items():
            found[facet][value] = None

    for table in report.tables:
        for facets in (*(column.facets for column in table.columns), *(line.facets for line in table.lines)):
            note(facets)
    for picture in pictures.shown:
        note(picture.facets)
    return [
        (facet, FACET_NAMES[facet], [(v, shown_method(v) if facet == "method" else v) for v in _ordered(facet, values)])
        for facet, values in found.items()
        if len(values) > 1
    ]


def _ordered(facet: str, values: Iterable[str]) -> list[str]:
    if facet == "method":
        return method_order(values)
    if facet == "alpha":
        return sorted(values, key=_descending)
    if facet == "ratio":
        return sorted(values, key=lambda value: -_descending(value)[0])
    return list(values)


def _descending(value: str) -> tuple[float, str]:
    try:
        return -float(value), value
    except ValueError:
        return float("inf"), value


def _number(value: float, digits: int, signed: bool = False) -> str:
    """With a true minus; what rounds to nothing has no sign, and is told from 0 where it stands alone."""
    text = f"{abs(value):,.{digits}f}".replace(",", "\u202f")
    if not text.strip("0."):
        smallest = f"{10.0**-digits:.{digits}f}"
        return f"±{text}" if signed else text if value == 0 else f"< {smallest}" if value > 0 else f"> −{smallest}"
    return f"−{text}" if value < 0 else f"+{text}" if signed else text


def _json(facets: Mapping[str, str]) -> str:
    return json.dumps(dict(facets), ensure_ascii=False)
