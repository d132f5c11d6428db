"""What every drawing of a report shares: `Chart`, the look of an arm, legend and table.

Colours are those of Okabe and Ito (2008), which readers with any of the common colour-vision deficiencies can tell
apart; arms differ in line style and marker as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ARM_COLOURS = ("#009E73", "#CC79A7", "#0072B2", "#D55E00", "#56B4E9", "#E69F00")
# Blue against orange is left to the credit of tokens, so the first arms are green and purple.
ARM_LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (2, 1.4)), "-.")
ARM_MARKERS = ("o", "s", "^", "D", "v")
TABLE_ROWS = 40
MISSING = "—"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One drawing, what it says in words, and the numbers behind it."""

    title: str
    caption: str
    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def arm_colour(index: int) -> str:
    """Colour of the run at `index`, the same in every drawing and table."""
    return ARM_COLOURS[index % len(ARM_COLOURS)]


def line_style(index: int, **changes: Any) -> dict[str, Any]:
    # Colours and line styles repeat with different periods, so that the seventh arm is not drawn as the first.
    style = {"color": arm_colour(index), "linestyle": ARM_LINES[index % len(ARM_LINES)], "linewidth": 1.9}
    return style | changes


def finish_axes(axes: Any, *, x: str, y: str, arms: int) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.02)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=min(max(arms, 1), 2),
            handlelength=2.4,
            borderaxespad=0.2,
        )


def thinned_table(
    x: str, labels: Sequence[str], curves: Sequence[Sequence[tuple[int, str]]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows of the numbers behind curves, thinned evenly to at most about `TABLE_ROWS`, ends kept."""
    lookup = [dict(curve) for curve in curves]
    steps = sorted({step for curve in lookup for step in curve})
    stride = -(-len(steps) // TABLE_ROWS)
    kept = [step for index, step in enumerate(steps) if index % max(stride, 1) == 0 or index == len(steps) - 1]
    rows = tuple((str(step), *(curve.get(step, MISSING) for curve in lookup)) for step in kept)
    return (x, *labels), rows
