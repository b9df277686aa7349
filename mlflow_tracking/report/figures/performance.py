"""Methods against each other: over noise ratios, over rounds, over what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mlflow_tracking.figures.base import light_grid, new_figure
from mlflow_tracking.report.figures.markup import of_method
from mlflow_tracking.report.figures.style import MethodStyle
from mlflow_tracking.report.paper import ALL_CLEAN, OURS, shown_method

LEGEND_COLUMNS = 6
COSTS = (
    ("seconds", "wall-clock time of a run (s)"),
    ("client_epochs", "client-epochs of a run"),
    ("megabytes", "data sent in a run (MB)"),
)
"""Columns of `cost_figure`'s table with their meaning."""


def ratio_figure(
    points: pd.DataFrame,
    references: Mapping[float, float],
    styles: Mapping[str, MethodStyle],
    title: str,
    label: str,
) -> Figure:
    """Macro-F1 (%) against the noise ratio, a panel per alpha from even to uneven.

    points: columns alpha, ratio, method, mean, sd (NaN for one seed). references: the all-clean value per alpha.
    The standard deviation over seeds is drawn for OCT-FedSIR alone, since twelve bands would hide each other.
    """
    alphas = sorted(points["alpha"].unique(), reverse=True)
    figure = _panels_figure(len(alphas), _rows(styles), title, label)
    axes = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    for axis, alpha in zip(axes, alphas, strict=True):
        here = points[points["alpha"] == alpha]
        for method, style in styles.items():
            line = here[here["method"] == method].sort_values("ratio")
            if line.empty:
                continue
            _line(axis, line["ratio"], line["mean"], method, style)
            if method == OURS and line["sd"].notna().any():
                band = axis.fill_between(
                    line["ratio"], line["mean"] - line["sd"], line["mean"] + line["sd"],
                    color=style.colour, alpha=0.13, linewidth=0,
                )  # fmt: skip
                of_method(band, method)
        if alpha in references:
            style = styles[ALL_CLEAN]
            of_method(
                axis.axhline(references[alpha], color=style.colour, linestyle=style.line, linewidth=style.width),
                ALL_CLEAN,
            )
        axis.set_title(f"α = {alpha:g}", fontsize=10)
        axis.set_xlabel("noise ratio η")
        axis.set_xticks(sorted(points["ratio"].unique()))
        light_grid(axis)
    axes[0].set_ylabel("macro-F1 (%)")
    _legend(figure, styles)
    return figure


def curve_figure(curves: pd.DataFrame, styles: Mapping[str, MethodStyle], title: str, label: str) -> Figure:
    """Macro-F1 (%) of the global model against finished rounds, a panel per value of `panel`.

    curves: columns panel, method, step, mean.
    """
    panels = list(dict.fromkeys(curves["panel"]))
    figure = _panels_figure(len(panels), _rows(styles), title, label)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        here = curves[curves["panel"] == panel]
        for method, style in styles.items():
            line = here[here["method"] == method].sort_values("step")
            if not line.empty:
                _line(axis, line["step"], line["mean"], method, style, marks=len(line) <= 12)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("finished rounds")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        light_grid(axis)
    axes[0].set_ylabel("macro-F1 (%)")
    _legend(figure, styles)
    return figure


def cost_figure(
    costs: pd.DataFrame, reference: float | None, styles: Mapping[str, MethodStyle], title: str, label: str
) -> Figure:
    """Accuracy (%) against what a run costs, a panel per quantity of `COSTS` that is known.

    costs: columns method, accuracy and those of `COSTS`, one row per method. reference: the all-clean accuracy.
    """
    known = [(column, words) for column, words in COSTS if (costs[column] > 0).any()]
    figure = _panels_figure(max(len(known), 1), _rows(styles), title, label)
    axes = figure.subplots(1, max(len(known), 1), sharey=True, squeeze=False)[0]
    for axis, (column, words) in zip(axes, known, strict=False):
        for method, style in styles.items():
            point = costs[(costs["method"] == method) & (costs[column] > 0)]
            if point.empty:
                continue
            of_method(
                axis.scatter(
                    point[column], point["accuracy"], s=90 if method == OURS else 55, color=style.colour,
                    marker=style.marker or "o", edgecolors="w", linewidths=0.7, zorder=style.order, clip_on=False,
                ),
                method,
            )  # fmt: skip
        if reference is not None:
            style = styles[ALL_CLEAN]
            of_method(
                axis.axhline(reference, color=style.colour, linestyle=style.line, linewidth=style.width), ALL_CLEAN
            )
        axis.set_xlabel(words)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        light_grid(axis)
    axes[0].set_ylabel("accuracy (%)")
    _legend(figure, styles, lines=False)
    return figure


def _panels_figure(panels: int, legend_rows: int, title: str, label: str) -> Figure:
    return new_figure(max(3.55 * panels, 6.4) + 0.5, 4.1 + 0.24 * legend_rows, title, label)


def _rows(styles: Mapping[str, MethodStyle]) -> int:
    return -(-len(styles) // LEGEND_COLUMNS)


def _line(
    axis: Axes, x: Sequence[float], y: Sequence[float], method: str, style: MethodStyle, marks: bool = True
) -> None:
    (line,) = axis.plot(
        x, y, color=style.colour, linestyle=style.line, linewidth=style.width, zorder=style.order,
        marker=style.marker if marks else "", markersize=5 if method == OURS else 4.2,
        markeredgecolor="w", markeredgewidth=0.5,
    )  # fmt: skip
    of_method(line, method)


def _legend(figure: Figure, styles: Mapping[str, MethodStyle], lines: bool = True) -> None:
    handles = []
    for method, style in styles.items():
        # The reference is a line also where the methods are points.
        line: Literal["-", "--", "none"] = style.line if lines or method == ALL_CLEAN else "none"
        handles.append(
            Line2D(
                [], [], color=style.colour, marker=style.marker, linestyle=line, linewidth=style.width,
                markersize=5.5, markeredgecolor="w", markeredgewidth=0.5, label=shown_method(method),
            )
        )  # fmt: skip
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), LEGEND_COLUMNS), frameon=False, fontsize=9
    )
    for method, handle, text in zip(styles, legend.legend_handles, legend.get_texts(), strict=True):
        if handle is not None:
            of_method(handle, method)
        of_method(text, method)
