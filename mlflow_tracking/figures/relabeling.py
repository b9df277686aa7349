"""What relabelling did: figures over checkpoints, flow of labels between classes, margins of the two criteria."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mlflow_tracking.figures.base import (
    AMOUNTS,
    CLEAN,
    GREY,
    MAX_ANNOTATED_CLASSES,
    NOISY,
    Array,
    Counts,
    annotate,
    light_grid,
    new_figure,
)
from mlflow_tracking.relabeling import CRITERIA, OUTCOMES

# Okabe and Ito's green and purple join the module's colours; markers and line styles repeat them.
_GREEN, _PURPLE = "#009E73", "#CC79A7"
_HIGHER = (("recovery", "wrong labels recovered", CLEAN, "o", "-"), ("precision", "changes right", _GREEN, "s", "--"))
_LOWER = (
    ("residual", "labels wrong", NOISY, "^", "-"),
    ("false_correction", "right labels spoiled", _PURPLE, "D", "--"),
    ("edit", "labels changed (ideally as many as were wrong at first)", GREY, "v", ":"),
)
# Right answers are blue, wrong ones vermilion; what was kept is hatched.
_OUTCOME_STYLES = ((CLEAN, ""), (NOISY, ""), (CLEAN, "////"), (NOISY, "////"))


def checkpoint_figure(checkpoints: pd.DataFrame, label: str) -> Figure:
    """Trend of the relabelling figures over checkpoints, from the rows of `checkpoint_table`.

    Left what should be high, right what should be low; a dotted line marks the share of wrong labels at first.
    """
    figure = new_figure(11.0, 5.0, "Relabelling over its checkpoints", label)
    axes = figure.subplots(1, 2)
    rounds = checkpoints["after_round"].to_numpy(dtype=np.float64)
    for axis, lines, title in zip(axes, (_HIGHER, _LOWER), ("higher is better", "lower is better"), strict=True):
        for column, text, colour, marker, style in lines:
            values = checkpoints[column].to_numpy(dtype=np.float64)
            if np.isfinite(values).any():
                size = 6 if len(rounds) <= 20 else 3
                axis.plot(rounds, values, color=colour, marker=marker, linestyle=style, markersize=size, label=text)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rounds finished before the checkpoint")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        light_grid(axis)
    axes[0].set_ylim(-0.03, 1.03)
    images = checkpoints["images"].to_numpy(dtype=np.float64)
    if len(images) and images[-1] > 0:
        before = float(checkpoints["corrupted"].iloc[-1] / images[-1])
        axes[1].axhline(before, color="#000000", linewidth=0.9, linestyle=(0, (1, 2)), label="labels wrong at first")
    axes[1].set_ylim(bottom=min(-0.01, axes[1].get_ylim()[0]))
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
    return figure


def flow_figure(flows: Mapping[str, Counts], class_names: Sequence[str], title: str, label: str) -> Figure:
    """(C, C) matrices of images from row to column class, side by side: colour is the share of the row."""
    classes = len(class_names)
    annotated = classes <= 2 * MAX_ANNOTATED_CLASSES
    side = 2.4 + 0.62 * classes if annotated else 4.6
    figure = new_figure(max(3 * side + 1.2, 9.0), side + 1.2, title, label)
    axes = figure.subplots(1, len(flows), sharey=True)
    for axis, (name, matrix) in zip(np.atleast_1d(axes), flows.items(), strict=True):
        share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        image = axis.imshow(share, cmap=AMOUNTS, vmin=0, vmax=1)
        if annotated:
            texts = [[f"{n}\n{s:.0%}" for n, s in zip(*r, strict=True)] for r in zip(matrix, share, strict=True)]
            annotate(axis, share, texts, 8 if classes <= MAX_ANNOTATED_CLASSES else 6)
        source, _, target = name.partition(" to ")
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(classes), class_names, rotation=0 if classes <= 3 else 35, fontsize=8)
        axis.set_yticks(range(classes), class_names, fontsize=8)
        axis.set(xlabel=f"{target} label", ylabel=f"{source} label")
    figure.colorbar(image, ax=axes, label="share of the row", fraction=0.02, pad=0.015)
    return figure


def margin_figure(edges: Array, counts: Counts, medians: Array, label: str) -> Figure:
    """Histograms of the margins from `margin_counts`: a row per outcome, a column per criterion.

    medians: (2, 4) per criterion and outcome, drawn as a line; NaN without images.
    """
    figure = new_figure(
        10.5, 7.6, "Margins of the last relabelling, by what became of the label (images with a decision)", label
    )
    axes = figure.subplots(len(OUTCOMES), len(CRITERIA), sharex="col", squeeze=False)
    quantity = ("S_R: alignment", "S_N: leakage")
    for column, edge in enumerate(edges):
        for row, outcome in enumerate(OUTCOMES):
            axis, count = axes[row, column], counts[column, row]
            colour, hatch = _OUTCOME_STYLES[row]
            axis.stairs(count, edge, fill=True, facecolor=colour if not hatch else "w", edgecolor=colour, hatch=hatch)
            axis.stairs(count, edge, color=colour, linewidth=1.2)
            _median_line(axis, float(medians[column, row]))
            axis.set_title(f"{outcome}: {count.sum()} images", fontsize=9, loc="left")
            axis.set_ylim(0, max(1.0, 1.12 * float(count.max(initial=0))))
            axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            axis.set_ylabel("images" if column == 0 else "")
            light_grid(axis)
        axes[-1, column].set_xlabel(f"{quantity[column]}, lead of the best class over the second")
        axes[-1, column].set_xlim(float(edge[0]), float(edge[-1]))
    return figure


def _median_line(axis: Axes, median: float) -> None:
    if np.isfinite(median):
        axis.axvline(median, color="#000000", linewidth=1.1, linestyle="--")
        axis.annotate(
            f"median {median:.3g}", (median, 1), (4, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="left", va="top", fontsize=8,
            bbox={"boxstyle": "round,pad=0.15", "fc": "w", "ec": "none", "alpha": 0.8},
        )  # fmt: skip
