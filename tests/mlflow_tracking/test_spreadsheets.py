"""Names of classes and sites end up in CSV files; a spreadsheet must show them and not run them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tracking.spreadsheets import inert, write_csv


def cells(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_formulas_become_text_in_cells_and_headings_and_nothing_else_changes(tmp_path: Path) -> None:
    table = pd.DataFrame({"=x true": ["=HYPERLINK(1)", "-cmd|x", "CNV"], "n": [-1.5, 2.0, np.nan], "k": [1, -2, 3]})
    write_csv(table, tmp_path / "t.csv")
    assert cells(tmp_path / "t.csv") == [
        ["'=x true", "n", "k"],
        ["'=HYPERLINK(1)", "-1.5", "1"],
        ["'-cmd|x", "2.0", "-2"],
        ["CNV", "", "3"],
    ]


def test_harmless_tables_are_written_as_pandas_does(tmp_path: Path) -> None:
    table = pd.DataFrame({"class": ["CNV", 'ä, "b"\nc', None], "agree": [True, None, False], "x": [1e-9, -2.5, 3.0]})
    write_csv(table, tmp_path / "a.csv", float_format="%.6g")
    table.to_csv(tmp_path / "b.csv", index=False, float_format="%.6g")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    write_csv(table.rename_axis("client"), tmp_path / "a.csv", index=True)
    table.rename_axis("client").to_csv(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@pytest.mark.parametrize("text", ["-0.5", "+1e9", "-inf", "CNV", "a=b", ""])
def test_numbers_and_other_text_stay(text: str) -> None:
    assert inert(text) == text


@given(st.text(max_size=8) | st.sampled_from(["=", "+", "-", "@", "\t=", " @"]).flatmap(lambda s: st.just(s + "A1")))
def test_no_text_starts_a_formula(text: str) -> None:
    shown = inert(text)
    assert shown in (text, f"'{text}")
    try:
        float(shown)
    except ValueError:
        assert not shown.lstrip().startswith(("=", "+", "-", "@"))
