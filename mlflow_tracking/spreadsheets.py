"""CSV files that are safe to open in a spreadsheet, whatever classes and sites are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

# What spreadsheets take for the beginning of a formula; also after the white space that they skip.
_STARTS = ("=", "+", "-", "@")


def inert(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula with an apostrophe before it; numbers and other values as is."""
    if not isinstance(value, str) or not value.lstrip().startswith(_STARTS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value  # a number that is written as text


def write_csv(table: pd.DataFrame, path: Path, index: bool = False, float_format: str | None = None) -> None:
    """`table` as CSV with no cell or heading that a spreadsheet would run."""
    texts = [i for i, kind in enumerate(table.dtypes) if not pd.api.types.is_numeric_dtype(kind)]
    # By position: names of classes make headings, and two may be equal.
    columns = [table.iloc[:, i].map(inert) if i in set(texts) else table.iloc[:, i] for i in range(table.shape[1])]
    safe = pd.concat(columns, axis=1) if columns else table.copy()
    safe.columns = [inert(name) for name in table.columns]
    safe.to_csv(path, index=index, float_format=float_format)
