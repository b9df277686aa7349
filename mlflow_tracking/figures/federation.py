"""The federation: who holds how many images of which class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from mlflow_tracking.figures.base import AMOUNTS, CLEAN, NOISY, Counts, Flags, annotate, class_ticks, new_figure

MAX_NAMED_CLIENTS = 60
"""Beyond so many clients rows are too low for names and numbers, and drawing these would take seconds."""


def counts_figure(true: Counts, observed: Counts, noisy: Flags, class_names: Sequence[str], label: str) -> Figure:
    """Heat maps of (K, C) images per client and class by true and by observed labels, noisy ones marked."""
    clients, classes = true.shape
    named = clients <= MAX_NAMED_CLIENTS
    rows = clients if named else MAX_NAMED_CLIENTS // 2
    size = max(6.8, 3.0 + 1.3 * classes), 1.9 + 0.24 * max(rows, 6)
    figure = new_figure(*size, "Images per client and class", label)
    axes = figure.subplots(1, 2, sharey=True)
    top = max(int(true.max()), int(observed.max()), 1)
    for axis, counts, title in zip(axes, (true, observed), ("true labels", "observed labels"), strict=True):
        image = axis.imshow(counts, cmap=AMOUNTS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        axis.set_title(title, fontsize=10)
        class_ticks(axis, class_names, rotate=classes > 4)
        if named:
            annotate(axis, counts / top, [[str(v) for v in row] for row in counts], 7.5)
    if named:
        axes[0].set_yticks(range(clients), [f"{k}  noisy" if noisy[k] else f"{k}  clean" for k in range(clients)])
        for text, is_noisy in zip(axes[0].get_yticklabels(), noisy, strict=True):
            text.set(color=NOISY if is_noisy else CLEAN, fontsize=8, fontweight="bold" if is_noisy else "normal")
        axes[0].set_ylabel("client")
    else:
        for flags, colour in ((noisy, NOISY), (~noisy, CLEAN)):
            marked = np.flatnonzero(flags)
            axes[0].plot(np.full(len(marked), -0.56), marked, "_", color=colour, markersize=6, clip_on=False)
        axes[0].set_ylabel(f"client ({int(noisy.sum())} noisy: orange at the edge)")
    figure.colorbar(image, ax=axes, label="images", fraction=0.05, pad=0.02)
    return figure
