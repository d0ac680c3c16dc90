"""A page that needs no other file: one HTML file, dark and light, on a wide and on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dynpipe_ds.reporting.themed import GRID, INK, MUTED, PAPER, SERIES, styles, svg, variable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _MUTED, _GRID, _PAPER = map(variable, (INK, MUTED, GRID, PAPER))
_LINK, _WARNING = variable(SERIES[0]), variable(SERIES[1])
# Whatever is wider than the screen scrolls by itself, never the page.
_STYLE = f"""{styles()}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: {_INK}; background: {_PAPER};
  max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
h1 {{ font-size: clamp(1.35rem, 1rem + 2vw, 1.9rem); line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid {_GRID}; }}
p {{ max-width: 46rem; }} p.lead {{ font-size: 1.1rem; margin: 0 0 1rem; }}
p.note {{ border-left: 4px solid {_WARNING}; padding: .3rem 0 .3rem .8rem; }}
figcaption, p.small {{ color: {_MUTED}; font-size: .88rem; max-width: 46rem; }}
.facts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0;
  padding: 0; }}
.facts div {{ border: 1px solid {_GRID}; border-radius: .5rem; padding: .55rem .8rem; min-width: 0; }}
.facts dt {{ color: {_MUTED}; font-size: .82rem; }}
.facts dd {{ margin: 0; font-size: 1.25rem; font-weight: 600; overflow-wrap: anywhere; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: .6rem 1.8rem; }}
figure {{ margin: 0 0 1rem; min-width: 0; }}
figure h3 {{ font-size: .98rem; margin: .6rem 0 .1rem; }}
.wide {{ overflow-x: auto; max-width: 100%; }}
svg {{ display: block; width: 100%; height: auto; }}
.wide svg {{ min-width: 44rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }}
th, td {{ text-align: right; padding: .3rem .7rem; border-bottom: 1px solid {_GRID}; white-space: nowrap; }}
th {{ color: {_MUTED}; font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
.words {{ text-align: left; }} td.indented {{ padding-left: 1.4rem; }}
tr.best td {{ font-weight: 600; }}
td .bar {{ display: inline-block; width: 7rem; text-align: left; margin-left: .6rem; }}
td .bar i {{ display: inline-block; height: .65em; background: {_LINK}; border-radius: 2px; }}
dl.settings {{ display: grid; grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); gap: .2rem 1rem;
  font-size: .88rem; }}
dl.settings dt {{ color: {_MUTED}; }} dl.settings dd {{ margin: 0; overflow-wrap: anywhere; }}
a {{ color: {_LINK}; }} summary {{ cursor: pointer; color: {_MUTED}; }}
:focus-visible {{ outline: 2px solid {_LINK}; outline-offset: 2px; }}
@media (max-width: 34rem) {{
  dl.settings {{ grid-template-columns: minmax(0, 1fr); }}
  dl.settings dd {{ margin-bottom: .4rem; }}
  th, td {{ padding: .3rem .4rem; }}
  th:first-child, td:first-child {{ white-space: normal; }}
}}
@media print {{ h2 {{ break-after: avoid; }} figure {{ break-inside: avoid; }} }}
"""


class Page:
    """A page that is filled from top to bottom.

    Args:
        title: of the page.
        lead: one sentence for somebody who reads nothing else.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{escape(lead)}</p>')

    def note(self, text: str) -> None:
        """Add something that a reader has to know first.

        Args:
            text: a sentence.
        """
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def facts(self, facts: Mapping[str, str]) -> None:
        """Add figures, large, side by side where there is room.

        Args:
            facts: what by its name.
        """
        cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
        self._parts.append(f'<dl class="facts">{cells}</dl>')

    def heading(self, text: str) -> None:
        """Begin a section.

        Args:
            text: its title.
        """
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, *, small: bool = False) -> None:
        """Add a paragraph.

        Args:
            text: of it.
            small: whether it explains what stands above.
        """
        self._parts.append(f"<p{_kinds('small' if small else '')}>{escape(text)}</p>")

    def table(
        self, rows: Sequence[Sequence[str]], *, bars: tuple[int, Sequence[float | None]] | None = None,
        best: int | None = None, words: Iterable[int] = (),
    ) -> None:
        """Add a table; one that is wider than the screen scrolls by itself.

        Args:
            rows: cells as text, the head first. A first cell that begins with a blank is indented.
            bars: a column, and for every row below the head a share from 0 to 1 that is drawn in it.
            best: a row below the head that stands out.
            words: columns that hold words, not numbers.
        """
        lines, left = [], set(words)
        kinds = (_kinds("words" if column in left else "") for column in range(len(rows[0])))
        head = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in zip(kinds, rows[0], strict=True))
        for i, row in enumerate(rows[1:]):
            cells = []
            for column, cell in enumerate(row):
                shown = escape(cell.strip())
                if bars is not None and bars[0] == column:
                    shown += _bar(bars[1][i])
                indented = "indented" if not column and cell.startswith(" ") else ""
                cells.append(f"<td{_kinds(indented, 'words' if column in left else '')}>{shown}</td>")
            lines.append(f"<tr{_kinds('best' if i == best else '')}>{''.join(cells)}</tr>")
        body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
        # Whoever has no mouse scrolls it by the keyboard, once it is focused.
        self._parts.append(f'<div class="wide" tabindex="0"><table>{body}</table></div>')

    def picture(self, figure: Figure, title: str, *, described: str, caption: str = "") -> None:
        """Add a picture as wide as the page; on a narrow screen it scrolls by itself.

        Args:
            figure: drawn in the colours of the theme.
            title: stands above it.
            described: for who does not see it.
            caption: stands below it.
        """
        inner = f'<div class="wide" tabindex="0">{svg(figure, described)}</div>'
        self._parts.append(_figure(inner, title, caption))

    def charts(self, charts: Sequence[tuple[Figure, str, str, str]]) -> None:
        """Add pictures side by side where there is room, else one below the other.

        Args:
            charts: each a figure, its title, its description and its caption.
        """
        inner = "".join(_figure(svg(figure, described), title, caption) for figure, title, described, caption in charts)
        self._parts.append(f'<div class="charts">{inner}</div>')

    def settings(self, values: Mapping[str, str]) -> None:
        """Add names with their values, which may be long.

        Args:
            values: text by name.
        """
        items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in values.items())
        self._parts.append(f'<dl class="settings">{items}</dl>')

    def render(self) -> str:
        """Return the page as HTML."""
        body = "\n".join(self._parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self._title)}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page.

        Args:
            path: file to write; missing folders are made.

        Returns:
            The path written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.render(), encoding="utf-8")
        return target


def _kinds(*names: str) -> str:
    """The attribute ``class`` of what is of some kinds."""
    found = " ".join(filter(None, names))
    return f' class="{found}"' if found else ""


def _bar(share: float | None) -> str:
    width = 0 if share is None else round(100 * min(1.0, max(0.0, share)), 1)
    return f'<span class="bar"><i style="width:{width}%"></i></span>'


def _figure(inner: str, title: str, caption: str) -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{inner}{below}</figure>"
