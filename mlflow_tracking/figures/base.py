"""What all figures share: colours, titles, ticks and numbers on matrices.

Colours are safe for colour-blind readers: cividis for amounts, blue for clean and right, vermilion for noisy and
wrong (Okabe and Ito); shape, line style or hatching repeats what colour says. Without pyplot and its process-wide
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path as Shape
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

CLEAN, NOISY, MISJUDGED, GREY = "#0072B2", "#D55E00", "#000000", "#6B6B6B"
UNOBSERVED = "#D9D9D9"
AMOUNTS = "cividis"
DPI = 130
# Beyond this many classes numbers no longer fit into the small matrices.
MAX_ANNOTATED_CLASSES = 5
# Shares of the font size.
DIGIT_HEIGHT, LINE_HEIGHT = 0.73, 1.2

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


def save_png(figure: Figure, target: Path | IO[bytes]) -> None:
    """Write `figure` at the resolution that all figures share."""
    # `Figure.savefig` would lay out and draw it twice; stronger compression takes long for what it saves.
    FigureCanvasAgg(figure).print_png(target, pil_kwargs={"compress_level": 1})  # type: ignore[no-untyped-call]


def new_figure(width: float, height: float, title: str, label: str) -> Figure:
    """A figure of that many inches with a bold title and `label` in a lighter weight below it."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.suptitle(f"{title}\n", fontsize=12, fontweight="bold")
    # suptitle has only one style.
    figure.text(0.5, 1 - 0.36 / height, label, ha="center", va="top", fontsize=9, color="#333333")
    return figure


def annotate(axis: Axes, shade: Array, texts: Sequence[Sequence[str]], size: float) -> None:
    """Numbers on an image, white where the colour map is dark (`shade` below one half), with a line for each "\\n".

    They are drawn as shapes, all together: hundreds of texts, each laid out on its own, would take most of a second.
    """
    shapes, offsets, colours = [], [], []
    known: dict[str, Shape] = {}
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            if text:
                if text not in known:
                    known[text] = _centred(text, size)
                shapes.append(known[text])
                offsets.append((j, i))
                colours.append("w" if shade[i, j] < 0.5 else "k")
    numbers = PathCollection(shapes, offsets=offsets, offset_transform=axis.transData, facecolors=colours, linewidths=0)
    # Shapes are in points, whatever the scale of the axes.
    numbers.set_transform(Affine2D().scale(1 / 72) + axis.figure.dpi_scale_trans)
    # Inside their cells, so that the layout need not measure them.
    numbers.set_in_layout(False)
    axis.add_collection(numbers, autolim=False)


def _centred(text: str, size: float) -> Shape:
    """The shape of digits in one or several lines, in points, around the origin."""
    lines = text.split("\n")
    shapes = []
    for number, line in enumerate(lines):
        shape = TextPath((0, 0), line, size=size)
        # Control points: where exactly their curves end is known after a hundred times as long.
        across = shape.vertices[shape.codes != Shape.CLOSEPOLY, 0]
        height = (len(lines) - 1) / 2 - number
        # By the height of digits rather than their own, so that lines stand level whatever is in them.
        up = size * (LINE_HEIGHT * height - DIGIT_HEIGHT / 2)
        shapes.append(Affine2D().translate(-(across.min() + across.max()) / 2, up).transform_path(shape))
    return Shape.make_compound_path(*shapes)


def class_ticks(axis: Axes, class_names: Sequence[str], rotate: bool) -> None:
    """Class names along the x axis."""
    axis.set_xticks(range(len(class_names)), class_names)
    axis.tick_params(axis="x", labelsize=8, labelrotation=35 if rotate else 0)


def light_grid(axis: Axes) -> None:
    """A grid that stays behind the data."""
    axis.grid(color="#E5E5E5", linewidth=0.6)
    axis.set_axisbelow(True)
