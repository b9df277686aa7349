from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from mlflow_tracking.report.model import Cell, Column, Line, Report, Table
from mlflow_tracking.report.tables import build_report
from mlflow_tracking.report.text import as_csv, as_latex, as_markdown

NASTY = "a_b & <i>50 %</i> | #1 ~ {x} $y$ \\z ^ *w* [l](u)"


def report(cell: Cell, label: str = "m") -> Report:
    columns = (Column("c", {"task": "Kermany"}, ("g",)), Column("d", {}, ("g",)))
    table = Table(
        "1", "T", "C.", ("Method",), columns, (Line((label,), {"method": label}, (cell, Cell(None))),), ("phantom",)
    )
    return Report(label, "store", ("phantom",), (label,), (label,), (label,), (table,))


def test_markdown_has_value_spread_interval_paper_and_notes() -> None:
    cell = Cell(80, 1.234, 70, 90, (0, 1), 2, 75.5, 0.5, "best", ("over 1 of 2 conditions",))
    text = as_markdown(report(cell))
    assert "| m | **80.00 ± 1.23** \\[70.00, 90.00\\] (75.50 ± 0.50, +4.50) a | – |" in text
    assert "- a: over 1 of 2 conditions" in text
    assert text.count("PHANTOM DATA") == 2


def test_every_row_of_a_markdown_table_has_all_columns() -> None:
    rows = [line for line in as_markdown(report(Cell(1), NASTY)).splitlines() if line.startswith("| ")]
    assert len(rows) == 3
    assert {row.replace("\\|", "").count("|") for row in rows} == {4}


def test_names_are_escaped() -> None:
    markdown, latex = as_markdown(report(Cell(1), NASTY)), as_latex(report(Cell(1), NASTY))
    assert "\\<i\\>" in markdown
    assert "\\[l\\](u)" in markdown
    body = latex[latex.index("\\begin{table}") :]
    assert (
        r"a\_b \& \textless{}i\textgreater{}50 \%\textless{}/i\textgreater{} \textbar{} \#1 \textasciitilde{}" in body
    )
    assert r"\{x\} \$y\$ \textbackslash{}z \textasciicircum{}" in body


def test_names_with_line_breaks_stay_on_their_line() -> None:
    broken = report(Cell(1), "one\n\\input{x}\n| two")
    assert "one \\\\input\\{x\\} \\| two" in as_markdown(broken)
    assert all(
        line.startswith("%") or "input" not in line or "textbackslash" in line for line in as_latex(broken).splitlines()
    )


def test_latex_is_balanced(frames: Any) -> None:
    text = as_latex(build_report(frames.results(frames.grid(("fedavg", "oct_fedsir", "all_clean"))), "t"))
    assert text.count("\\begin{table}") == text.count("\\end{table}") == text.count("\\toprule") > 3
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}")
    escaped = text.replace("\\{", "").replace("\\}", "")
    assert escaped.count("{") == escaped.count("}")
    assert text.isascii()
    assert r"\textbf{" in text


def test_marks_of_latex() -> None:
    assert r"\underline{80.00}" in as_latex(report(Cell(80, mark="second")))


def test_csv_holds_every_cell_unrounded(frames: Any) -> None:
    made = build_report(frames.results(frames.grid(("fedavg", "oct_fedsir"), accuracy=lambda _: 1 / 3)), "t")
    rows = list(csv.DictReader(io.StringIO(as_csv(made))))
    filled = sum(c.mean is not None or c.paper is not None for t in made.tables for line in t.lines for c in line.cells)
    assert len(rows) == filled
    own = next(
        r
        for r in rows
        if r["table"] == "1" and r["method"] == "fedavg" and r["task"] == "Kermany" and r["noise"] == "symmetric"
    )
    assert float(own["mean"]) == pytest.approx(100 / 3, rel=1e-15)
    assert (own["seeds"], own["runs"], own["unit"], own["data"]) == ("0 1 2", "12", "%", "phantom")
    assert float(own["difference"]) == pytest.approx(float(own["mean"]) - float(own["paper"]))


def test_csv_keeps_names_whole() -> None:
    (row,) = csv.DictReader(io.StringIO(as_csv(report(Cell(1), 'a, "b"\nc'))))
    assert row["method"] == 'a, "b"\nc'
