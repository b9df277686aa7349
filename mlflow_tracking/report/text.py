"""A report as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from mlflow_tracking.report.model import FACETS, Cell, Line, Report, Table, letter

CSV_COLUMNS = (
    "table",
    "title",
    "data",
    *FACETS,
    "line",
    "column",
    "unit",
    "mean",
    "sd",
    "low",
    "high",
    "seeds",
    "runs",
    "paper",
    "paper_sd",
    "difference",
    "mark",
    "warnings",
)
_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "α": r"$\alpha$",
    "η": r"$\eta$",
    "χ": r"$\chi$",
    "²": r"$^2$",
    "Δ": r"$\Delta$",
    "·": r"$\cdot$",
    "–": "--",
    "−": r"$-$",
    "…": r"\ldots{}",
    "\u202f": r"\,",
}
_TEX_PATTERN = re.compile("|".join(map(re.escape, _TEX)))
# Of Markdown and of the HTML that it may hold.
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


def as_markdown(report: Report) -> str:
    """GitHub's flavour: warnings, what is missing and failed, then every table; the paper's value in parentheses."""
    parts = [f"# {_md(report.title)}", f"{_md(_data(report.data_kinds))} Source: {_md(report.source)}."]
    for heading, texts in (("Warnings", report.warnings), ("Missing", report.missing), ("Failed", report.failed)):
        if texts:
            parts.append("\n".join([f"## {heading}", "", *(f"- {_md(text)}" for text in texts)]))
    parts += [_md_table(table) for table in report.tables]
    return "\n\n".join(parts) + "\n"


def _md_table(table: Table) -> str:
    notes = _Notes()
    heads = [_md(head) for head in table.heads] + [_md(" ".join((*c.groups, c.label))) for c in table.columns]
    rows = [heads, ["---"] * len(table.heads) + ["---:"] * len(table.columns)]
    for line in table.lines:
        cells = [_cell(c, table, notes, _md, {"best": "**{}**", "second": "<ins>{}</ins>"}) for c in line.cells]
        rows.append([*map(_md, line.labels), *cells])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    caption = _md(f"{_data(table.data_kinds)} {table.caption} {_unit(table)} {_LEGEND}")
    shown = [f"## {_md(table.heading)}", caption, "\n".join(lines)]
    if notes.texts:
        shown.append("\n".join(f"- {letter}: {_md(text)}" for letter, text in notes.texts))
    return "\n\n".join(shown)


def as_latex(report: Report) -> str:
    """Tables with booktabs, one `table` each; to be read with `\\input`. Needs `booktabs`, `graphicx` and UTF-8."""
    head = [f"% {report.title}", f"% {report.source}", f"% {_data(report.data_kinds)}", "% needs booktabs, graphicx"]
    head = [" ".join(line.split()) for line in head]
    return (
        "\n".join([*head, *(f"% warning: {' '.join(w.split())}" for w in report.warnings)])
        + "\n"
        + "".join(f"\n{_tex_table(table)}" for table in report.tables)
    )


def _tex_table(table: Table) -> str:
    notes = _Notes()
    width = len(table.heads) + len(table.columns)
    body: list[str] = []
    groups = [" ".join(column.groups) for column in table.columns]
    if any(groups):
        body.append(_tex_groups(len(table.heads), groups))
    body.append(_tex_row([_tex(text) for text in (*table.heads, *(column.label for column in table.columns))]))
    body.append(r"\midrule")
    previous: Line | None = None
    for line in table.lines:
        # A rule where a new block of lines begins.
        if previous is not None and len(line.labels) > 1 and line.labels[0] != previous.labels[0]:
            body.append(r"\midrule")
        previous = line
        marks = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}
        body.append(_tex_row([*map(_tex, line.labels), *(_cell(c, table, notes, _tex, marks) for c in line.cells)]))
    told = "".join(f" {letter}: {text}." for letter, text in notes.texts)
    caption = f"{_data(table.data_kinds)} {table.title}. {table.caption} {_unit(table)} {_LEGEND}{told}"
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}}}",
            rf"\label{{tab:{re.sub(r'[^A-Za-z0-9-]+', '-', table.key)}}}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * len(table.heads)}{'r' * (width - len(table.heads))}}}",
            r"\toprule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _tex_groups(before: int, groups: Sequence[str]) -> str:
    spans = [(name, len(list(same))) for name, same in groupby(groups)]
    cells = [""] * before + [rf"\multicolumn{{{number}}}{{c}}{{{_tex(name)}}}" for name, number in spans]
    rules, start = [], before + 1
    for _, number in spans:
        rules.append(rf"\cmidrule(lr){{{start}-{start + number - 1}}}")
        start += number
    return f"{_tex_row(cells)}\n{''.join(rules)}"


def _tex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def as_csv(report: Report) -> str:
    """One row per cell that has a figure or a paper's value, with everything that is known of it; unrounded."""
    target = io.StringIO()
    writer = csv.DictWriter(target, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for table in report.tables:
        for line in table.lines:
            for column, cell in zip(table.columns, line.cells, strict=True):
                if cell.mean is None and cell.paper is None:
                    continue
                writer.writerow(
                    {
                        "table": table.key,
                        "title": table.title,
                        "data": " ".join(table.data_kinds),
                        **line.facets,
                        **column.facets,
                        "line": " | ".join(line.labels),
                        "column": " ".join((*column.groups, column.label)),
                        "unit": table.unit,
                        "mean": _exact(cell.mean),
                        "sd": _exact(cell.sd),
                        "low": _exact(cell.low),
                        "high": _exact(cell.high),
                        "seeds": " ".join(map(str, cell.seeds)),
                        "runs": cell.runs,
                        "paper": _exact(cell.paper),
                        "paper_sd": _exact(cell.paper_sd),
                        "difference": _exact(cell.difference),
                        "mark": cell.mark,
                        "warnings": "; ".join(cell.warnings),
                    }
                )
    return target.getvalue()


_LEGEND = "In parentheses: the paper's value and the difference to it. In brackets: interval. Letters: notes."


class _Notes:
    """Warnings of a table's cells, each under a letter."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def letters(self, warnings: Iterable[str]) -> str:
        return ",".join(self._letters.setdefault(text, letter(len(self._letters))) for text in warnings)

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(letter, text) for text, letter in self._letters.items()]


def _cell(cell: Cell, table: Table, notes: _Notes, escape: Callable[[str], str], marks: dict[str, str]) -> str:
    digits = table.digits
    paper = "" if cell.paper is None else f"{cell.paper:.{digits}f}"
    if cell.paper_sd is not None:
        paper += f" ± {cell.paper_sd:.{digits}f}"
    if cell.difference is not None:
        paper += f", {cell.difference:+.{digits}f}"
    shown = escape("–" if cell.mean is None else f"{cell.mean:.{digits}f}")
    if cell.sd is not None:
        shown += f" {escape(f'± {cell.sd:.{digits}f}')}"
    if cell.mark:
        shown = marks[cell.mark].format(shown)
    parts = [shown]
    if cell.low is not None and cell.high is not None:
        parts.append(escape(f"[{cell.low:.{digits}f}, {cell.high:.{digits}f}]"))
    if paper:
        parts.append(escape(f"({paper})"))
    if cell.warnings:
        parts.append(escape(notes.letters(cell.warnings)))
    return " ".join(parts)


def _unit(table: Table) -> str:
    return f"In {table.unit}." if table.unit else ""


def _data(kinds: Sequence[str]) -> str:
    return f"{' AND '.join(kind.upper() for kind in kinds) or 'NO'} DATA."


def _exact(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _md(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _tex(text: str) -> str:
    return _TEX_PATTERN.sub(lambda found: _TEX[found.group()], " ".join(text.split()))
