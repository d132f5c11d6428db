"""A matplotlib figure as one SVG element that takes its colours and its font from the page around it.

Text and grid are drawn in placeholder colours that become CSS (`currentColor`, `var(--rule)`), so one drawing reads
on a light and on a dark page. The same input gives the same bytes.
"""

import re
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

INK = "#010203"
RULE = "#040506"
_CSS = {INK: "currentColor", RULE: "var(--rule, #8a8a8a)"}

STYLE = {
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9.5,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "text.color": INK,
    "text.parse_math": False,  # a label may hold a dollar sign
    "xtick.color": RULE,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.color": RULE,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 9,
}


def new_axes(width: float = 4.4, height: float = 2.9) -> tuple[Any, Any]:
    """A figure without global state, and its one pair of axes. Inches; call within `matplotlib.rc_context(STYLE)`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(length=3)
    return figure, axes


def to_svg(figure: Any, *, name: str, title: str, description: str, hints: Mapping[str, str] | None = None) -> str:
    """Draw `figure` as an `<svg>` element for inlining in HTML.

    Args:
        figure: a matplotlib figure that was made under `STYLE`.
        name: unique within the page, letters and dashes; prefixes every id of the drawing.
        title: accessible name.
        description: what a reader would see, in words.
        hints: text shown on hover, by the gid of the artist.

    Returns:
        One `<svg>` element. Colours and fonts are the page's, and equal input draws equal text.
    """
    import io
    import warnings

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's fonts draw the text
        FigureCanvasSVG(figure).print_svg(buffer)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)  # names matplotlib's site, and the time
    for gid, hint in (hints or {}).items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(hint)}</title>', 1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    for placeholder, css in _CSS.items():
        text = text.replace(placeholder, css)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)  # the family is the page's
    view = re.search(r'viewBox="[^"]*"', text)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-labelledby="{name}-title {name}-description" {view.group() if view else ""}>'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-description">{escape(description)}</desc>'
    )
    return opening + text[text.index(">") + 1 :].strip()
