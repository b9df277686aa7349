"""The paper's Figure 2: what gives noisy clients away, and who was taken for noisy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fedsir.spectral.descriptors import DESCRIPTOR_NAMES
from mlflow_tracking.figures.base import (
    AMOUNTS,
    CLEAN,
    MAX_ANNOTATED_CLASSES,
    NOISY,
    UNOBSERVED,
    Array,
    annotate,
    light_grid,
    new_figure,
)

KINDS = ("clean", "asymmetric", "symmetric")
# Both kinds of noisy clients are warm, clean ones blue; markers repeat it.
_LOOKS = {"clean": (CLEAN, "o"), "asymmetric": (NOISY, "s"), "symmetric": ("#E69F00", "^")}
# Beyond this many clients dots are drawn as pixels.
MAX_VECTOR_DOTS = 400


@dataclass(frozen=True)
class Example:
    """(C, C) class similarities of one client. words: which one."""

    similarity: Array
    words: str


def identification_figure(
    examples: Sequence[Example], clients: pd.DataFrame, class_names: Sequence[str], title: str, label: str
) -> Figure:
    """Similarities of a clean and of noisy clients (a-c), descriptors of all clients by kind (d, e), verdicts (f).

    clients: one row per client and run with kind (of `KINDS`), noise (of the run), the three descriptors,
    predicted_noisy and truly_noisy.
    """
    figure = new_figure(12.4, 8.0, title, label)
    noises = [kind for kind in KINDS[1:] if (clients["noise"] == kind).any()]
    kinds = [kind for kind in KINDS if (clients["kind"] == kind).any()]
    # Nested figures do not keep clear of the title by themselves.
    _, above, below = figure.subfigures(3, 1, height_ratios=(0.13, 1, 1.05), squeeze=False)[:, 0]
    matrices, verdicts = above.subfigures(1, 2, width_ratios=(3, 2))
    distributions, space = below.subfigures(1, 2, width_ratios=(3, 2))
    if examples:
        axes = matrices.subplots(1, len(examples), squeeze=False)[0]
        low, high = _scale(examples)
        for letter, axis, example in zip("abc", axes, examples, strict=False):
            image = _similarity(axis, example.similarity, class_names, low, high, first=axis is axes[0])
            _title(axis, f"{letter}  {example.words}")
        matrices.colorbar(image, ax=axes, label="similarity (off the diagonal)", location="bottom", shrink=0.5)
    for axis, name in zip(distributions.subplots(1, len(DESCRIPTOR_NAMES)), DESCRIPTOR_NAMES, strict=True):
        _distribution(axis, clients, kinds, name)
        _title(axis, f"{'d  ' if name == DESCRIPTOR_NAMES[0] else ''}{name} of similarities")
    _space(space.subplots(), clients, kinds)
    for axis, noise in zip(verdicts.subplots(1, len(noises), squeeze=False)[0], noises, strict=True):
        _confusion(axis, clients[clients["noise"] == noise], first=noise == noises[0])
        _title(axis, f"{'f  ' if noise == noises[0] else ''}verdicts, {noise}")
    return figure


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, fontsize=9.5, loc="left")


def _scale(examples: Sequence[Example]) -> tuple[float, float]:
    """Limits of the colour scale: the diagonal is 1 by construction and tells nothing."""
    off = [e.similarity[~np.eye(len(e.similarity), dtype=bool)] for e in examples]
    known = np.concatenate([np.empty(0), *off])
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    return low, max(high, low + 1e-6)


def _similarity(
    axis: Axes, matrix: Array, class_names: Sequence[str], low: float, high: float, first: bool
) -> AxesImage:
    palette = colormaps[AMOUNTS].with_extremes(bad=UNOBSERVED, over="#FFFFFF")
    classes = len(class_names)
    image = axis.imshow(matrix, cmap=palette, vmin=low, vmax=high)
    if classes <= MAX_ANNOTATED_CLASSES:
        texts = [["" if np.isnan(v) or i == j else f"{v:.2f}" for j, v in enumerate(r)] for i, r in enumerate(matrix)]
        annotate(axis, (matrix - low) / (high - low), texts, 8)
    axis.set_xticks(range(classes), class_names, rotation=90, fontsize=8)
    axis.set_yticks(range(classes), class_names if first else [""] * classes, fontsize=8)
    return image


def _distribution(axis: Axes, clients: pd.DataFrame, kinds: Sequence[str], name: str) -> None:
    """Boxes with all clients as dots beside them."""
    # The same everywhere: dots are only spread out so that they do not hide each other.
    rng = np.random.default_rng(0)
    for position, kind in enumerate(kinds):
        colour, marker = _LOOKS[kind]
        values = clients.loc[clients["kind"] == kind, name].dropna().to_numpy(dtype=np.float64)
        axis.boxplot(
            values, positions=[position], widths=0.5, showfliers=False, manage_ticks=False,
            medianprops={"color": "#000000", "linewidth": 1.4}, boxprops={"color": colour},
            whiskerprops={"color": colour}, capprops={"color": colour},
        )  # fmt: skip
        axis.scatter(
            position + rng.uniform(-0.2, 0.2, len(values)), values, s=9, color=colour, marker=marker, alpha=0.45,
            linewidths=0, rasterized=len(clients) > MAX_VECTOR_DOTS,
        )  # fmt: skip
    axis.set_xticks(range(len(kinds)), [f"{kind}\nn = {(clients['kind'] == kind).sum()}" for kind in kinds], fontsize=8)
    light_grid(axis)


def _space(axis: Axes, clients: pd.DataFrame, kinds: Sequence[str]) -> None:
    for kind in kinds:
        colour, marker = _LOOKS[kind]
        rows = clients[clients["kind"] == kind]
        axis.scatter(
            rows["mean"], rows["maximum"], s=22, color=colour, marker=marker, alpha=0.6, linewidths=0, label=kind,
            rasterized=len(clients) > MAX_VECTOR_DOTS,
        )  # fmt: skip
    axis.set(xlabel="mean similarity", ylabel="maximum of similarities")
    axis.legend(fontsize=8, frameon=False, title="client's labels (truth)", title_fontsize=8)
    _title(axis, "e  descriptor space")
    light_grid(axis)


def _confusion(axis: Axes, clients: pd.DataFrame, first: bool) -> None:
    """Verdicts beside the truth in clients, summed over runs."""
    truth, judged = clients["truly_noisy"].to_numpy(dtype=int), clients["predicted_noisy"].to_numpy(dtype=int)
    counts = np.zeros((2, 2), dtype=np.int64)
    np.add.at(counts, (truth, judged), 1)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axis.imshow(share, cmap=AMOUNTS, vmin=0, vmax=1)
    annotate(
        axis, share, [[f"{n}\n{s:.0%}" for n, s in zip(*r, strict=True)] for r in zip(counts, share, strict=True)], 9
    )
    axis.set_xticks(range(2), ["clean", "noisy"], fontsize=8)
    axis.set_yticks(range(2), ["clean", "noisy"] if first else ["", ""], fontsize=8)
    axis.set_xlabel("judged")
    axis.set_ylabel("truth" if first else "")
