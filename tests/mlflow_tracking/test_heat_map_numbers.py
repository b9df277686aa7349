"""Numbers on heat maps: drawn together, each in the middle of its cell."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from mlflow_tracking.figures.base import annotate, new_figure, save_png

SHADE = np.array([[0.1, 0.9], [0.2, 0.8]])


def drawn(texts: list[list[str]]) -> bytes:
    figure = new_figure(3.0, 3.0, "title", "label")
    axis = figure.subplots()
    axis.imshow(SHADE)
    annotate(axis, SHADE, texts, 8)
    target = BytesIO()
    save_png(figure, target)
    return target.getvalue()


def test_each_number_has_its_cell_and_a_colour_that_can_be_read_there() -> None:
    axis = new_figure(3.0, 3.0, "title", "label").subplots()
    annotate(axis, SHADE, [["1", "20"], ["", "1"]], 8)
    (numbers,) = axis.collections
    assert np.asarray(numbers.get_offsets()).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert [tuple(c) for c in numbers.get_facecolor()] == [to_rgba(c) for c in "wkk"]
    assert len(numbers.get_paths()) == 3


@pytest.mark.parametrize("text", ["8", "100", "12\n34%", "0.53"])
def test_a_number_is_in_the_middle(text: str) -> None:
    """Within half a point of font size 8, which is a pixel."""
    axis = new_figure(3.0, 3.0, "title", "label").subplots()
    annotate(axis, SHADE[:1, :1], [[text]], 8)
    box = axis.collections[0].get_paths()[0].get_extents()
    assert abs(box.x0 + box.x1) / 2 < 0.5
    assert abs(box.y0 + box.y1) / 2 < 0.5
    # As high as its lines.
    assert box.height == pytest.approx(8 * (0.73 + 1.2 * text.count("\n")), abs=0.6)


def test_a_map_without_numbers_can_be_drawn() -> None:
    empty = drawn([["", ""], ["", ""]])
    assert empty != drawn([["1", "2"], ["3", "4"]])
