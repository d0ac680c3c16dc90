"""Pictures in the page's own colours: light and dark, as the reader's system has it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b1d21", "#5d6470", "#d9dce1", "#fdfdfc"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""Of lines and bars, in turn; after Okabe and Ito, told apart with every common form of colour blindness."""
DASHES: Sequence[Any] = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)))
"""Of lines, in turn: they are told apart without colours, too."""

_DARK = {
    INK: "#e6e8eb", MUTED: "#a3abb8", GRID: "#353a43", PAPER: "#16181d",
    **dict(zip(SERIES, ("#4aa8e0", "#ff8b42", "#2fc79b", "#e6a0c8", "#d9b53f", "#8ed0f5"), strict=True)),
}  # fmt: skip
_NAMES = {colour: f"c{i}" for i, colour in enumerate(_DARK)}
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"

_counted = count()


def styles() -> str:
    """Style sheet with the colours by name, for light and dark: ``--c0`` is the ink, ``--c3`` the paper."""
    light = "".join(f"--{_NAMES[colour]}:{colour};" for colour in _DARK)
    dark = "".join(f"--{_NAMES[colour]}:{value};" for colour, value in _DARK.items())
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def variable(colour: str) -> str:
    """A colour of this module as a page writes it.

    Args:
        colour: one of its names, in small letters.
    """
    return f"var(--{_NAMES[colour]},{colour})"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure whose lines and letters have the theme's colours.

    Args:
        width: inches.
        height: inches.

    Returns:
        The figure.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def dress(axes: Any, *, x: str, y: str) -> None:
    """Give axes the theme's colours, and words.

    Args:
        axes: of matplotlib.
        x: label below.
        y: label above the upper left corner, which takes no width.
    """
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_title(y, color=MUTED, fontsize=9, loc="left")
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def svg(figure: Figure, described: str) -> str:
    """Return a figure as an SVG that stands in a page, in colours that follow the page's.

    Args:
        figure: of matplotlib, drawn in colours of this module; what is black becomes the ink.
        described: for who does not see it.
    """
    from html import escape

    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynpipe_ds"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None}, dpi=150)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace("#000000", INK)
    for colour in _NAMES:
        text = re.sub(colour, variable(colour), text, flags=re.IGNORECASE)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to groups
    # Other ids of several pictures on one page may not meet.
    mark = f"f{next(_counted)}-"
    known: set[str] = set()

    def own_id(found: re.Match[str]) -> str:
        """An id of this picture; what matplotlib defines twice, the same both times, has it once."""
        is_new = found[1] not in known
        known.add(found[1])
        return f'id="{mark}{found[1]}"' if is_new else ""

    text = re.sub(r'\bid="([^"]*)"', own_id, text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{mark}", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", rf"font: \1 {_FONT}", text)
    head, _, rest = text.partition(">")
    view = re.search(r'viewBox="([^"]+)"', head)
    assert view is not None, "matplotlib writes one"
    own = f'role="img" aria-label="{escape(described)}" viewBox="{view[1]}" style="fill:{variable(INK)}"'
    return f"<svg {own}>{rest.strip()}"
