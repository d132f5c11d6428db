"""The drawings of a report: learning curves, gate distribution, health of gate and critic.

matplotlib is imported when something is drawn.
"""

from collections.abc import Sequence
from typing import Any

from comppo.report.chart import ARM_MARKERS, MINUS, Chart, arm_colour, finish_axes, line_style, thinned_table
from comppo.report.data import GateHistogram, Run
from comppo.report.heldout import Measure, accuracy_points, measure_of
from comppo.report.svg import INK, RULE, STYLE, new_axes, to_svg

FEW_POINTS = 12
"""Up to so many held-out evaluations are drawn as bars, more of them as a band."""


def trailing_mean(points: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Mean of each value and those before it, at most `window` of them; the first ones average what there is."""
    means = []
    for index, (step, _) in enumerate(points):
        part = [value for _, value in points[max(0, index + 1 - window) : index + 1]]
        means.append((step, sum(part) / len(part)))
    return means


def learning_curves(runs: Sequence[Run]) -> list[Chart]:
    """Reward per step and held-out accuracy, each only where a run recorded it."""
    return [chart for chart in (_reward_chart(runs), _accuracy_chart(runs)) if chart]


def _reward_chart(runs: Sequence[Run]) -> Chart | None:
    import matplotlib

    curves = [run.series("reward") for run in runs]
    longest = max(map(len, curves), default=0)
    if not longest:
        return None
    window = max(1, longest // 20)
    smooth = [trailing_mean(curve, window) for curve in curves]
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes()
        for index, (run, raw, mean) in enumerate(zip(runs, curves, smooth, strict=True)):
            if not raw:
                continue
            if window > 1:
                axes.plot(*zip(*raw, strict=True), color=arm_colour(index), linewidth=0.8, alpha=0.35)
            axes.plot(*zip(*mean, strict=True), label=run.label, **line_style(index))
        finish_axes(axes, x="training step", y="mean reward (reward units)", arms=len(runs))
        ends = "; ".join(
            f"{run.label} ends at {mean[-1][1]:.3g}" for run, mean in zip(runs, smooth, strict=True) if mean
        )
        smoothing = f"Thick: mean of the last {window} steps; thin: each step." if window > 1 else "One point per step."
        svg = to_svg(figure, name="reward", title="Reward per training step", description=f"{smoothing} {ends}.")
    columns, rows = thinned_table(
        "Step",
        [run.label for run in runs],
        [[(step, f"{value:.3f}") for step, value in mean] for mean in smooth],
    )
    caption = f"Mean reward of the responses sampled for that step. {smoothing}"
    return Chart(title="Reward", caption=caption, svg=svg, columns=columns, rows=rows)


def _accuracy_chart(runs: Sequence[Run]) -> Chart | None:
    import matplotlib

    curves = [accuracy_points(run) for run in runs]
    if not any(curves):
        return None
    measure = measure_of(runs)
    hints: dict[str, str] = {}
    tables: list[list[tuple[int, str]]] = []
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes()
        span = max(step for curve in curves for step, _ in curve) or 1
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
            count = run.result.eval_count if run.result else None
            tables.append([(step, measure.with_interval(value, count)) for step, value in curve])
            if curve:
                shift = span * 0.006 * (index - (len(runs) - 1) / 2)  # bars of two arms side by side
                _draw_accuracy(axes, run.label, index, curve, count, shift, hints, measure)
        finish_axes(axes, x="training step", y=measure.axis, arms=len(runs))
        if measure.is_share:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2), min(high, 102))
        ends = "; ".join(
            f"{run.label} goes from {measure.spoken(curve[0][1])} to {measure.spoken(curve[-1][1])}"
            for run, curve in zip(runs, curves, strict=True)
            if curve
        )
        svg = to_svg(figure, name="accuracy", title=measure.title, description=f"{ends}.", hints=hints)
    columns, rows = thinned_table("Step", [run.label for run in runs], tables)
    return Chart(title=measure.title, caption=measure.caption, svg=svg, columns=columns, rows=rows)


def _draw_accuracy(
    axes: Any,
    label: str,
    index: int,
    curve: Sequence[tuple[int, float]],
    count: int | None,
    shift: float,
    hints: dict[str, str],
    measure: Measure,
) -> None:
    colour = arm_colour(index)
    few = len(curve) <= FEW_POINTS
    steps = [step + (shift if few else 0) for step, _ in curve]
    marker = ARM_MARKERS[index % len(ARM_MARKERS)]
    factor = measure.factor
    heights = [factor * value for _, value in curve]
    axes.plot(steps, heights, label=label, marker=marker, markersize=4, **line_style(index))
    bounds = [found for _, value in curve if (found := measure.interval(value, count))]
    if bounds and few:
        lows, highs = zip(*bounds, strict=True)
        axes.vlines(
            steps, [factor * low for low in lows], [factor * high for high in highs], color=colour, linewidth=1.1
        )
    elif bounds:
        lows, highs = zip(*bounds, strict=True)
        axes.fill_between(
            steps,
            [factor * low for low in lows],
            [factor * high for high in highs],
            color=colour,
            alpha=0.16,
            linewidth=0,
        )
    for number, (at, (step, value)) in enumerate(zip(steps, curve, strict=True)):
        gid = f"tip-{index}-{number}"
        # A larger invisible mark takes the pointer.
        axes.plot([at], [factor * value], marker="o", markersize=11, color=colour, alpha=0.0, gid=gid)
        hints[gid] = f"{label}, step {step}: {measure.with_interval(value, count)}"


def gate_distribution(runs: Sequence[Run]) -> list[Chart]:
    """Histogram of the gates of each run that has one, with its bounds, reference and mean."""
    return [
        _gate_chart(run, index) for index, run in enumerate(runs) if run.gates is not None and sum(run.gates.counts) > 0
    ]


def _gate_chart(run: Run, index: int) -> Chart:
    import matplotlib

    gates = run.gates
    assert gates is not None
    total = sum(gates.counts)
    shares = [100 * count / total for count in gates.counts]
    hints: dict[str, str] = {}
    rows = []
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes()
        for number, share in enumerate(shares):
            low, high = gates.edges[number], gates.edges[number + 1]
            gid = f"bar-{number}"
            hints[gid] = f"gate {low:.4g} to {high:.4g}: {share:.2f} % of tokens ({gates.counts[number]:.0f})"
            rows.append((f"{low:.4g} to {high:.4g}", f"{gates.counts[number]:.0f}", f"{share:.2f} %"))
            gap = 0.08 * (high - low)
            axes.bar(low + gap / 2, share, width=high - low - gap, align="edge", color=arm_colour(index), gid=gid)
        top = max(shares) * 1.22
        axes.set_ylim(0, top)
        axes.set_xlim(*_padded([*gates.edges, *gates.span, *_known(gates.reference)]))
        axes.ticklabel_format(axis="x", useOffset=False)
        _mark_gates(axes, gates, top)
        axes.set_xlabel("gate: share of later credit kept (unitless)")
        axes.set_ylabel("tokens (%)")
        mean = f" Their mean is {gates.mean:.4f}." if gates.mean is not None else ""
        words = f"Gates from {gates.minimum:.4g} to {gates.maximum:.4g}.{mean}"
        svg = to_svg(figure, name=f"gates-{index}", title=f"Gates of {run.label}", description=words, hints=hints)
    reference = f" They were calibrated to the reference {gates.reference:.4g}." if gates.reference is not None else ""
    caption = f"{total:,.0f} response tokens of one late generation. {words}{reference}"
    return Chart(title=run.label, caption=caption, svg=svg, columns=("Gate", "Tokens", "Share"), rows=tuple(rows))


def _mark_gates(axes: Any, gates: GateHistogram, top: float) -> None:
    """Upright lines with their names, the reference one line of text lower than the bounds."""
    middle = sum(gates.span) / 2
    for name, at, style in (
        ("lower bound", gates.lower_bound, "-"),
        ("upper bound", gates.upper_bound, "-"),
        ("reference", gates.reference, (0, (4, 2))),
    ):
        if at is None:
            continue
        lower = name == "reference"
        side = "right" if at > middle else "left"  # the words stand on the side where there is room
        axes.plot([at, at], [0, top * (0.9 if lower else 1)], color=INK, linewidth=1.0, linestyle=style)
        offset = (4, 0) if side == "left" else (-4, 0)
        axes.annotate(
            f"{name} {at:.4g}",
            (at, top * (0.9 if lower else 1)),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=8.5,
        )


def _known(*numbers: float | None) -> list[float]:
    return [number for number in numbers if number is not None]


def _padded(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    room = 0.03 * (high - low) or 0.01
    return low - room, high + room


HEALTH = (
    ("gate_mean", "Gate mean", "gate (unitless)", "Mean gate of each step; the shade is one standard deviation."),
    (
        "retention",
        "Retention",
        "share kept (unitless)",
        "Share of a reward at the end that reaches the first token: the gates of a response multiplied.",
    ),
    (
        "explained_variance",
        "Explained variance",
        "explained variance (unitless)",
        "1: the critic foretells the returns exactly. 0 or less: their mean would do as well.",
    ),
    ("critic_loss", "Critic loss", "critic loss", "What the critic minimises; its scale depends on the reward."),
)


def health(runs: Sequence[Run]) -> list[Chart]:
    """Gate and critic over the steps, each only where a run recorded it."""
    return [chart for row in HEALTH if (chart := _health_chart(runs, *row))]


def _health_chart(runs: Sequence[Run], key: str, title: str, unit: str, caption: str) -> Chart | None:
    import matplotlib

    names = (key, "value_loss", "vf_loss") if key == "critic_loss" else (key,)
    curves = [run.series(*names) for run in runs]
    if not any(curves):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = new_axes(height=2.6)
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
            if not curve:
                continue
            if key == "gate_mean" and (spread := dict(run.series("gate_std"))):
                band = [(step, value, spread[step]) for step, value in curve if step in spread]
                axes.fill_between(
                    [step for step, _, _ in band],
                    [value - std for _, value, std in band],
                    [value + std for _, value, std in band],
                    color=arm_colour(index),
                    alpha=0.2,
                    linewidth=0,
                )
            axes.plot(*zip(*curve, strict=True), label=run.label, **line_style(index, linewidth=1.5))
        if key == "explained_variance":
            axes.axhline(0, color=RULE, linewidth=1.2)
        finish_axes(axes, x="training step", y=unit, arms=len(runs))
        ends = "; ".join(
            f"{run.label} ends at {curve[-1][1]:.4g}" for run, curve in zip(runs, curves, strict=True) if curve
        )
        svg = to_svg(figure, name=key.replace("_", "-"), title=title, description=f"{caption} {ends}.")
    columns, rows = thinned_table(
        "Step",
        [run.label for run, curve in zip(runs, curves, strict=True) if curve],
        [[(step, f"{value:.4f}".replace("-", MINUS)) for step, value in curve] for curve in curves if curve],
    )
    return Chart(title=title, caption=caption, svg=svg, columns=columns, rows=rows)
