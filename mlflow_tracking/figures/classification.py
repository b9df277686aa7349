"""The global model on the held-out images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from mlflow_tracking.figures.base import AMOUNTS, Counts, annotate, class_ticks, new_figure


def confusion_figure(confusion: Counts, class_names: Sequence[str], label: str) -> Figure:
    """(C, C) confusion matrix, true classes in rows: colour is the share of the row, numbers are images."""
    classes = len(class_names)
    side = max(4.6, 1.6 + 0.85 * classes)
    figure = new_figure(max(side + 1.4, 6.8), side, "Held-out images, last round", label)
    axis = figure.subplots()
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    image = axis.imshow(share, cmap=AMOUNTS, vmin=0, vmax=1)
    annotate(
        axis,
        share,
        [[f"{n}\n{s:.0%}" for n, s in zip(*r, strict=True)] for r in zip(confusion, share, strict=True)],
        9,
    )
    class_ticks(axis, class_names, rotate=classes > 4)
    axis.set_yticks(range(classes), class_names)
    axis.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, ax=axis, label="share of the true class", fraction=0.046, pad=0.03)
    return figure
