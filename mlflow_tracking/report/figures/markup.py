"""From `Figure` to what a page can hold: SVG, or PNG where SVG would be big."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import threading
from collections.abc import Iterator
from html import escape

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mlflow_tracking.figures.base import DPI

MAX_SVG = 400_000
"""Characters beyond which a figure becomes a PNG file."""

_METHOD = "method:"
_DRAWING = threading.Lock()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Draw and convert inside of it: matplotlib's settings belong to the process and are put back afterwards."""
    settings = mpl.rc_context(
        {
            # Text stays text: it can be found, read aloud and is smaller than outlines.
            "svg.fonttype": "none",
            # Equal figures give equal files.
            "svg.hashsalt": "fedsir",
            # Names of data sets and methods may contain dollar signs.
            "text.parse_math": False,
        }
    )
    with _DRAWING, settings:
        yield


def of_method(artist: Artist, method: str) -> None:
    """Let the page hide the artist with its method."""
    artist.set_gid(f"{_METHOD}{method}")


def as_markup(figure: Figure, name: str, description: str) -> str:
    """HTML of a figure: inline SVG whose ids begin with `name`, or an image of the same description."""
    svg = _svg(figure, name, description)
    return svg if len(svg) <= MAX_SVG else _png(figure, description)


def _svg(figure: Figure, name: str, description: str) -> str:
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", dpi=DPI, metadata=metadata)  # dpi: of dots that are drawn as pixels
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    width, height = (round(size * 72) for size in figure.get_size_inches())
    # Attributes of the root but the view box: the page decides on the size.
    text = re.sub(
        r"<svg [^>]*>",
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'aria-label="{escape(description)}">',
        text,
        count=1,
    )
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(rf'id="{_METHOD}([^"]*)"', r'data-method="\1"', text)
    # All figures share one page, so ids carry the figure's name; those that nothing refers to go.
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in referred else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r"\n\s*", "\n", text)


def _png(figure: Figure, description: str) -> str:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    width, height = (round(size * 72) for size in figure.get_size_inches())
    return f'<img alt="{escape(description)}" width="{width}" height="{height}" src="data:image/png;base64,{encoded}">'
