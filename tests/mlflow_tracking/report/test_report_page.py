"""The HTML page: nothing missing, nothing unescaped, nothing from outside. Its behaviour: `test_report_browser`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from mlflow_tracking.report.model import Cell, Column, Line, Report, Table
from mlflow_tracking.report.page import as_html
from mlflow_tracking.report.sheet import Picture, Pictures
from mlflow_tracking.report.tables import build_report

NASTY = """<script>alert("x")</script>'"&amp;</style></table>$5$ {{ 7 * 7 }}"""
VOID = {"meta", "link", "input", "img", "br"}


class Page(HTMLParser):
    """Elements in order with their attributes and the text inside of them; well-formedness on the way."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._inside: list[list[str]] = []
        self.contents: list[tuple[str, dict[str, str | None], str]] = []
        self._attributes: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self._inside.append([])
            self._attributes.append(dict(attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        text = "".join(self._inside.pop())
        self.contents.append((tag, self._attributes.pop(), text))
        if self._inside:
            self._inside[-1].append(text)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._inside:
            self._inside[-1].append(data)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def inside(self, tag: str, **wanted: str) -> list[str]:
        """Text of the elements with these attributes."""
        return [
            " ".join(text.split())
            for name, attributes, text in self.contents
            if name == tag and all(attributes.get(key.rstrip("_")) == value for key, value in wanted.items())
        ]


def one_table(*lines: Line, columns: tuple[Column, ...] = (Column("a", {}),), **changes: Any) -> Table:
    settings: dict[str, Any] = {"key": "S1", "title": "Accuracy", "caption": "Words.", "heads": ("Method",), **changes}
    return Table(columns=columns, lines=lines, data_kinds=("phantom",), **settings)


def report_of(*tables: Table, **changes: Any) -> Report:
    settings: dict[str, Any] = {
        "title": "Report",
        "source": "sqlite:///store.db",
        "data_kinds": ("phantom",),
        "warnings": (),
        "missing": (),
        "failed": (),
        **changes,
    }
    return Report(tables=tables, **settings)


def line(label: str, *cells: Cell, facets: Mapping[str, str] | None = None) -> Line:
    return Line((label,), facets or {"method": label}, cells)


def page_of(*cells: Cell, **changes: Any) -> Page:
    columns = tuple(Column(str(i), {}) for i in range(len(cells)))
    return Page(as_html(report_of(one_table(line("fedavg", *cells), columns=columns, **changes)), Pictures()))


def test_every_table_of_a_report_is_on_the_page(frames: Any) -> None:
    methods = ("fedavg", "fedcorr", "oct_fedsir", "oct_fedsir/no_kd", "spectral_pruning", "all_clean")
    report = build_report(frames.results(frames.grid(methods, tasks=("Kermany", "UIC"))), "Grid unit")
    page = Page(as_html(report, Pictures(), "made"))
    assert len(report.tables) >= 8
    assert [a["id"] for a in page.attributes("article")] == [f"table-{table.key}" for table in report.tables]
    cells = sum(len(line.cells) for table in report.tables for line in table.lines)
    assert len(page.attributes("td")) == cells
    names = [f"Table {t.key}: {t.title}" if re.fullmatch(r"S?\d", t.key) else t.title for t in report.tables]
    assert [text for text in page.inside("h2") if text in names] == names
    for table in report.tables:
        assert table.caption in " ".join(" ".join(page.texts).split())


def test_a_cell_shows_value_spread_interval_paper_and_difference() -> None:
    page = page_of(Cell(87.421, sd=1.2, low=85.0, high=89.5, seeds=(0, 1, 2), runs=3, paper=91.05, paper_sd=0.4))
    assert page.inside("span", class_="value")[-1] == "87.42"
    assert page.inside("span", class_="sd")[0] == "± 1.20"
    assert page.inside("span", class_="interval") == ["85.00 – 89.50"]
    assert page.inside("span", class_="paper") == ["paper 91.05 ± 0.40 −3.63"]


@pytest.mark.parametrize(
    ("mean", "paper", "value", "difference"),
    [
        (50.0, 48.5, "50.00", "+1.50"),
        (50.0, 50.001, "50.00", "±0.00"),
        (-1.5, None, "−1.50", None),
        (0.001, None, "< 0.01", None),
        (0.0, None, "0.00", None),
        (12345.678, None, "12\u202f345.68", None),
    ],
)
def test_numbers(mean: float, paper: float | None, value: str, difference: str | None) -> None:
    page = page_of(Cell(mean, paper=paper))
    assert page.inside("td")[0].startswith(value.replace("\u202f", " "))
    assert page.inside("b") == ([] if difference is None else [difference])


def test_what_was_not_recorded_is_a_dash_and_keeps_the_papers_value() -> None:
    page = page_of(Cell(None, paper=91.0))
    assert page.inside("span", class_="none") == ["–"]
    assert page.inside("span", class_="paper") == ["paper 91.00"]


def test_marks_can_be_heard_as_well_as_seen() -> None:
    page = page_of(Cell(2.0, mark="best"), Cell(1.0, mark="second"), Cell(0.5))
    assert [a.get("class") for a in page.attributes("td")] == ["best", "second", None]
    cells = page.inside("td")
    assert "(best)" in cells[0]
    assert "(second best)" in cells[1]
    assert "best" not in cells[2]


def test_warnings_of_cells_are_notes_below_the_table_each_once() -> None:
    page = page_of(Cell(1.0, warnings=("few seeds",)), Cell(2.0, warnings=("few seeds", "two budgets")), Cell(3.0))
    assert page.inside("ol") == ["a few seeds b two budgets"]
    assert [page.inside("td")[i] for i in range(3)] == ["1.00a", "2.00a b", "3.00"]


def test_seeds_are_said_once_and_where_they_differ() -> None:
    page = page_of(*[Cell(1.0, seeds=(0, 1, 2))] * 3, Cell(1.0, seeds=(0,)))
    assert any("3 seeds per cell" in text for text in page.texts)
    assert page.inside("span", class_="count") == ["n = 1"]


def test_neighbours_share_headings() -> None:
    columns = (
        Column("sym", {}, ("Kermany",)),
        Column("asym", {}, ("Kermany",)),
        Column("sym", {}, ("UIC",)),
        Column("all", {}, ("Kermany",)),
    )
    table = one_table(line("fedavg", *[Cell(1.0)] * 4), columns=columns)
    page = Page(as_html(report_of(table), Pictures()))
    groups = [a for a in page.attributes("th") if a.get("class") == "group"]
    assert [a["colspan"] for a in groups] == ["2", "1", "1"]
    assert [a["rowspan"] for a in page.attributes("th") if a.get("rowspan")] == ["2"]


def test_repeated_headers_of_lines_are_marked_from_the_outside_in() -> None:
    lines = [
        Line((alpha, clients, method), {"alpha": alpha, "method": method}, (Cell(1.0),))
        for alpha, clients, method in (("2", "3", "a"), ("2", "3", "b"), ("0.1", "3", "b"))
    ]
    page = Page(as_html(report_of(one_table(*lines, heads=("α", "clients", "Method"))), Pictures()))
    heads = [str(a["class"]) for a in page.attributes("th") if a.get("scope") == "row"]
    assert ["repeats" in c for c in heads] == [False] * 3 + [True, True, False] + [False] * 3
    assert ["pin" in c for c in heads] == [False, False, True] * 3


def test_names_are_escaped_everywhere() -> None:
    cell = Cell(1.0, paper=2.0, warnings=(NASTY,))
    table = Table(
        "x", NASTY, NASTY, (NASTY,), (Column(NASTY, {"task": NASTY}, (NASTY,)), Column("b", {"task": "UIC"}, ("c",))),
        (Line((NASTY,), {"method": NASTY}, (cell, cell)), Line(("b",), {"method": "b"}, (cell, cell))), (NASTY,), NASTY,
    )  # fmt: skip
    report = Report(NASTY, NASTY, (NASTY,), (NASTY,) * 8, (NASTY,), (NASTY,), (table,))
    picture = Picture(NASTY, NASTY, NASTY, NASTY, "<svg></svg>", {"task": NASTY})
    html = as_html(report, Pictures((picture,), (NASTY,)), NASTY)
    page = Page(html)
    assert len(page.attributes("script")) == 1
    assert len(page.attributes("style")) == 1
    assert len(page.attributes("table")) == 1
    assert " ".join(page.texts).count(NASTY) >= 20
    assert page.inside("h1") == [NASTY]
    facets = [json.loads(str(a["data-facets"])) for _, a in page.elements if "data-facets" in a]
    assert {"task": NASTY} in facets
    assert {"method": NASTY} in facets
    assert NASTY in [a["value"] for a in page.attributes("input")]


def test_nothing_comes_from_outside_and_only_the_own_script_may_run(frames: Any) -> None:
    report = build_report(frames.results(frames.grid(("fedavg", "oct_fedsir"))), "Grid unit")
    html = as_html(report, Pictures())
    page = Page(html)
    for _, attributes in page.elements:
        for key in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(key) or "#").startswith(("#", "data:"))
    assert not re.search(r"@import|url\((?!#|data:)", html)
    policy = str(next(a["content"] for a in page.attributes("meta") if a.get("http-equiv")))
    script = next(text for tag, _, text in page.contents if tag == "script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_filters_offer_what_differs_in_order() -> None:
    columns = tuple(
        Column(f"{task} {ratio}", {"task": task, "ratio": ratio, "noise": "symmetric"})
        for task, ratio in (("Kermany", "0.6"), ("UIC", "0.3"))
    )
    lines = [
        Line((m,), {"method": m, "alpha": alpha}, (Cell(1.0), Cell(1.0)))
        for m, alpha in (("all_clean", "0.1"), ("oct_fedsir", "2"), ("fedavg", "0.5"))
    ]
    page = Page(as_html(report_of(one_table(*lines, columns=columns)), Pictures()))
    offered: dict[str, list[str]] = {}
    for attributes in page.attributes("input"):
        offered.setdefault(str(attributes["name"]), []).append(str(attributes["value"]))
    assert offered == {
        "task": ["Kermany", "UIC"],
        "ratio": ["0.3", "0.6"],
        "alpha": ["2", "0.5", "0.1"],
        "method": ["fedavg", "oct_fedsir", "all_clean"],
        "view": ["sd", "interval", "paper"],
    }
    assert "OCT-FedSIR" in page.inside("label")


def test_gaps_failures_and_warnings_are_listed() -> None:
    warnings = tuple(f"warning {i}" for i in range(9))
    report = report_of(one_table(line("a", Cell(1.0))), warnings=warnings, missing=("hole",), failed=("run: boom",))
    page = Page(as_html(report, Pictures(notes=("no file",))))
    items = page.inside("li")
    assert [text for text in items if text.startswith("warning")] == list(warnings)
    assert {"hole", "run: boom", "no file"} <= set(items)
    assert "PHANTOM DATA" in page.inside("strong")


def test_ids_are_unique_with_figures_of_one_kind_twice(frames: Any) -> None:
    from mlflow_tracking.report.pictures import draw_pictures

    results = frames.results(
        frames.grid(("fedavg", "oct_fedsir", "all_clean"), tasks=("Kermany", "UIC"), alphas=(0.1,), seeds=(0,))
    )
    page = Page(as_html(build_report(results, "Grid unit"), draw_pictures(results)))
    ids = [str(attributes["id"]) for _, attributes in page.elements if "id" in attributes]
    assert len(page.attributes("figure")) >= 4
    assert len(ids) == len(set(ids))
    # Every reference leads somewhere, within figures and from the contents.
    for _, attributes in page.elements:
        for key in ("href", "xlink:href"):
            target = attributes.get(key)
            if target and target.startswith("#"):
                assert target[1:] in ids
