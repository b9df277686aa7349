"""The federation: who holds how many images of which class."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from mlflow_tracking.figures.base import AMOUNTS, CLEAN, NOISY, Counts, Flags, annotate, class_ticks, new_figure


def counts_figure(true: Counts, observed: Counts, noisy: Flags, class_names: Sequence[str], label: str) -> Figure:
    """Heat maps of (K, C) images per client and class by true and by observed labels, noisy ones marked."""
    clients, classes = true.shape
    size = max(6.8, 3.0 + 1.3 * classes), 1.9 + 0.24 * max(clients, 6)
    figure = new_figure(*size, "Images per client and class", label)
    axes = figure.subplots(1, 2, sharey=True)
    top = max(int(true.max()), int(observed.max()), 1)
    for axis, counts, title in zip(axes, (true, observed), ("true labels", "observed labels"), strict=True):
        image = axis.imshow(counts, cmap=AMOUNTS, vmin=0, vmax=top, aspect="auto")
        axis.set_title(title, fontsize=10)
        class_ticks(axis, class_names, rotate=classes > 4)
        annotate(axis, counts / top, [[str(v) for v in row] for row in counts], 7.5)
    axes[0].set_yticks(range(clients), [f"{k}  noisy" if noisy[k] else f"{k}  clean" for k in range(clients)])
    for text, is_noisy in zip(axes[0].get_yticklabels(), noisy, strict=True):
        text.set(color=NOISY if is_noisy else CLEAN, fontsize=8, fontweight="bold" if is_noisy else "normal")
    axes[0].set_ylabel("client")
    figure.colorbar(image, ax=axes, label="images", fraction=0.05, pad=0.02)
    return figure
