"""Figures of one run: pure functions from arrays to `Figure`, without pyplot and its process-wide state.

Colours are safe for colour-blind readers: cividis for amounts, blue for clean and vermilion for noisy clients
(Okabe and Ito); shape repeats what colour says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

CLEAN, NOISY, MISJUDGED, GREY = "#0072B2", "#D55E00", "#000000", "#6B6B6B"
UNOBSERVED = "#D9D9D9"
AMOUNTS = "cividis"
DPI = 130
# Beyond this many classes numbers no longer fit into the small matrices.
MAX_ANNOTATED_CLASSES = 5

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


def save_png(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=DPI)


def counts_figure(true: Counts, observed: Counts, noisy: Flags, class_names: Sequence[str], label: str) -> Figure:
    """Heat maps of (K, C) images per client and class by true and by observed labels, noisy ones marked."""
    clients, classes = true.shape
    figure = _figure(max(6.8, 3.0 + 1.3 * classes), 1.9 + 0.24 * max(clients, 6), "Images per client and class", label)
    axes = figure.subplots(1, 2, sharey=True)
    top = max(int(true.max()), int(observed.max()), 1)
    for axis, counts, title in zip(axes, (true, observed), ("true labels", "observed labels"), strict=True):
        image = axis.imshow(counts, cmap=AMOUNTS, vmin=0, vmax=top, aspect="auto")
        axis.set_title(title, fontsize=10)
        _class_ticks(axis, class_names, rotate=classes > 4)
        _annotate(axis, counts / top, [[str(v) for v in row] for row in counts], 7.5)
    axes[0].set_yticks(range(clients), [f"{k}  noisy" if noisy[k] else f"{k}  clean" for k in range(clients)])
    for text, is_noisy in zip(axes[0].get_yticklabels(), noisy, strict=True):
        text.set(color=NOISY if is_noisy else CLEAN, fontsize=8, fontweight="bold" if is_noisy else "normal")
    axes[0].set_ylabel("client")
    figure.colorbar(image, ax=axes, label="images", fraction=0.05, pad=0.02)
    return figure


def similarity_figure(
    similarity: Array, noisy: Flags, predicted_noisy: Flags | None, class_names: Sequence[str], label: str
) -> Figure:
    """Grid of the (K, C, C) class-similarity matrices; frame colour tells who is truly noisy."""
    clients, classes, _ = similarity.shape
    columns = min(clients, 5 if clients <= 15 else 6)
    rows = -(-clients // columns)
    figure = _figure(
        max(6.8, 1.75 * columns + 1.2),
        1.9 * rows + 1.5,
        "Similarity between the classes of each client",
        label,
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    off_diagonal = similarity[:, ~np.eye(classes, dtype=bool)]
    known = off_diagonal[np.isfinite(off_diagonal)]
    # The diagonal is 1 by construction, so the scale follows the values that tell clients apart.
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    high = max(high, low + 1e-6)
    palette = colormaps[AMOUNTS].with_extremes(bad=UNOBSERVED, over="#FFFFFF")
    for position, axis in enumerate(axes.flat):
        if position >= clients:
            axis.set_axis_off()
            continue
        matrix = similarity[position]
        image = axis.imshow(matrix, cmap=palette, vmin=low, vmax=high)
        if classes <= MAX_ANNOTATED_CLASSES:
            text = [
                ["" if np.isnan(v) or i == j else f"{v:.2f}" for j, v in enumerate(r)] for i, r in enumerate(matrix)
            ]
            _annotate(axis, (matrix - low) / (high - low), text, 6)
        _frame_client(axis, position, bool(noisy[position]), _verdict(predicted_noisy, position))
        first_column, last_row = position % columns == 0, position + columns >= clients
        axis.set_xticks(range(classes), class_names if last_row else [""] * classes, rotation=90, fontsize=7)
        axis.set_yticks(range(classes), class_names if first_column else [""] * classes, fontsize=7)
    figure.colorbar(image, ax=axes, label="similarity (off the diagonal)", fraction=0.025, pad=0.02)
    _status_legend(figure, shapes=False, unobserved=bool(np.isnan(similarity).any()))
    return figure


def descriptor_figure(
    descriptors: Array, p_clean: Array, noisy: Flags, predicted_noisy: Flags | None, label: str
) -> Figure:
    """(K, 3) descriptors mean, energy, maximum as two scatter plots; the (K,) posterior of being clean."""
    clients = len(noisy)
    figure = _figure(12.0, max(4.8, 1.8 + 0.17 * clients), "Spectral descriptors and verdict per client", label)
    mean_energy, mean_maximum, posterior = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    wrong = np.zeros(clients, dtype=bool) if predicted_noisy is None else predicted_noisy != noisy
    for axis, column, name in ((mean_energy, 1, "energy"), (mean_maximum, 2, "maximum")):
        for k in np.argsort(wrong, kind="stable"):  # misjudged clients last, on top
            x, y = float(descriptors[k, 0]), float(descriptors[k, column])
            _client_marker(axis, x, y, k, noisy, predicted_noisy, 60)
            if wrong[k]:  # numbering all would bury the dense clusters
                axis.annotate(
                    f"client {k}", (x, y), (8, 8), textcoords="offset points", fontsize=8, zorder=4,
                    bbox={"boxstyle": "round,pad=0.2", "fc": "w", "ec": "none", "alpha": 0.8},
                )  # fmt: skip
        axis.set(xlabel="mean similarity", ylabel=f"{name} of similarities")
        axis.margins(0.12)
        axis.grid(color="#E5E5E5", linewidth=0.6)
        axis.set_axisbelow(True)
    posterior.axvline(0.5, color=GREY, linewidth=1, linestyle="--")
    for k in range(clients):
        if np.isnan(p_clean[k]):
            posterior.annotate("not in the fit", (0.02, k), va="center", fontsize=7, color=GREY)
        else:
            posterior.plot([0, p_clean[k]], [k, k], color="#CCCCCC", linewidth=1.2, zorder=1)
            _client_marker(posterior, p_clean[k], k, k, noisy, predicted_noisy, 45)
    posterior.set(xlabel="posterior of being clean", ylabel="client", xlim=(-0.06, 1.06), ylim=(clients - 0.4, -0.6))
    posterior.set_yticks(range(clients))
    posterior.tick_params(axis="y", labelsize=7 if clients > 15 else 9)
    _status_legend(figure, shapes=predicted_noisy is not None)
    return figure


def confusion_figure(confusion: Counts, class_names: Sequence[str], label: str) -> Figure:
    """(C, C) confusion matrix, true classes in rows: colour is the share of the row, numbers are images."""
    classes = len(class_names)
    side = max(4.6, 1.6 + 0.85 * classes)
    figure = _figure(max(side + 1.4, 6.8), side, "Held-out images, last round", label)
    axis = figure.subplots()
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    image = axis.imshow(share, cmap=AMOUNTS, vmin=0, vmax=1)
    _annotate(
        axis,
        share,
        [[f"{n}\n{s:.0%}" for n, s in zip(*r, strict=True)] for r in zip(confusion, share, strict=True)],
        9,
    )
    _class_ticks(axis, class_names, rotate=classes > 4)
    axis.set_yticks(range(classes), class_names)
    axis.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, ax=axis, label="share of the true class", fraction=0.046, pad=0.03)
    return figure


def _figure(width: float, height: float, title: str, label: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n", fontsize=12, fontweight="bold")
    # One more line of the title in a lighter weight; suptitle has only one style.
    figure.text(0.5, 1 - 0.36 / height, label, ha="center", va="top", fontsize=9, color="#333333")
    return figure


def _annotate(axis: Axes, shade: Array, texts: Sequence[Sequence[str]], size: float) -> None:
    """Numbers on an image, white where the colour map is dark (`shade` below one half)."""
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            axis.text(j, i, text, ha="center", va="center", fontsize=size, color="w" if shade[i, j] < 0.5 else "k")


def _class_ticks(axis: Axes, class_names: Sequence[str], rotate: bool) -> None:
    axis.set_xticks(range(len(class_names)), class_names)
    axis.tick_params(axis="x", labelsize=8, labelrotation=35 if rotate else 0)


def _verdict(predicted_noisy: Flags | None, client: int) -> bool | None:
    return None if predicted_noisy is None else bool(predicted_noisy[client])


def _frame_client(axis: Axes, client: int, noisy: bool, verdict: bool | None) -> None:
    colour = NOISY if noisy else CLEAN
    wrong = verdict is not None and verdict != noisy
    title = f"{client} {'noisy' if noisy else 'clean'}" + (" (misjudged)" if wrong else "")
    axis.set_title(title, fontsize=8, color=colour, fontweight="bold" if wrong else "normal", pad=3)
    for spine in axis.spines.values():
        spine.set(color=colour, linewidth=2.2)


def _client_marker(
    axis: Axes, x: float, y: float, client: int, noisy: Flags, predicted_noisy: Flags | None, size: float
) -> None:
    verdict = _verdict(predicted_noisy, client)
    truth = bool(noisy[client])
    wrong = verdict is not None and verdict != truth
    axis.scatter(
        [x], [y], s=size, marker="s" if verdict else "o", color=NOISY if truth else CLEAN,
        edgecolors=MISJUDGED if wrong else "w", linewidths=2.0 if wrong else 0.6,
        alpha=1.0 if wrong else 0.85, zorder=3,
    )  # fmt: skip


def _status_legend(figure: Figure, shapes: bool, unobserved: bool = False) -> None:
    def mark(colour: str, text: str, marker: str = "o", edge: str = "none") -> Line2D:
        return Line2D(
            [], [], linestyle="none", marker=marker, markersize=8, color=colour, markeredgecolor=edge,
            markeredgewidth=1.8, label=text,
        )  # fmt: skip

    handles = [mark(CLEAN, "truly clean"), mark(NOISY, "truly noisy")]
    if shapes:
        handles.append(mark("w", "judged clean", "o", GREY))
        handles.append(mark("w", "judged noisy", "s", GREY))
        handles.append(mark("#CCCCCC", "misjudged", "o", MISJUDGED))
    if unobserved:
        handles.append(mark(UNOBSERVED, "class not observed", "s"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
