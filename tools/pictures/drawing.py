"""A drawing of boxes, arrows and texts, written as SVG. It knows nothing of what is drawn.

Pictures have a white background of their own; in dark mode the site inverts them (docs/stylesheets/site.css).
"""

from html import escape
from typing import Literal

Colour = Literal["plain", "edge", "prefill", "decode", "encode", "kv", "idle"]
Anchor = Literal["start", "middle", "end"]

FILLS: dict[Colour, str] = {
    "plain": "#f1f3f8",
    "edge": "#dfe3f5",
    "prefill": "#ffdca8",
    "decode": "#bfe6cf",
    "encode": "#e6d0f2",
    "kv": "#b9dcf5",
    "idle": "#ffffff",
}
LINE = "#39415a"
TEXT = "#1c2233"
SOFT = "#5a6378"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


class Drawing:
    """Collects shapes. Coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", colour: Colour = "plain", size: int = 14
    ) -> None:
        """Draw a box with lines of text in its middle."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{FILLS[colour]}" '
            f'stroke="{LINE}" stroke-width="1.2"/>'
        )
        lines = text.split("\n") if text else []
        first = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * size * 1.25, line, "middle", size, number > 0)

    def text(self, x: float, y: float, text: str, anchor: Anchor = "start", size: int = 14, soft: bool = False) -> None:
        """Draw one line of text with its baseline at `y`."""
        colour = SOFT if soft else TEXT
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
        )

    def heading(self, x: float, y: float, text: str) -> None:
        """Draw a line of bold text."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="15" font-weight="600" fill="{TEXT}">{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Draw a thin line."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{SOFT}" stroke-width="1.2"{dash}/>'
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, text: str = "", *, above: bool = True, both: bool = False
    ) -> None:
        """Draw an arrow, with a text at its middle: above a horizontal one, or below it."""
        start = ' marker-start="url(#tip)"' if both else ""
        self._shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.6" '
            f'marker-end="url(#tip)"{start}/>'
        )
        if text:
            self._label((x1 + x2) / 2, (y1 + y2) / 2 + (-6 if above else 17), text)

    def _label(self, x: float, y: float, text: str) -> None:
        """Draw a text in the middle of lines that it may cross."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="12" fill="{SOFT}" stroke="#ffffff" '
            f'stroke-width="4" paint-order="stroke">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the picture."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="{FONT}" role="img" aria-label="{escape(self._title)}">\n'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(self._shapes) + "\n</svg>\n"
        )
