"""What was measured on held-out questions, and how a page words it: accuracy, or mean reward. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass

from comppo.report.chart import MINUS
from comppo.report.data import Run, wilson_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One way to word the held-out numbers of a page; all its runs share it."""

    title: str
    axis: str
    """Name of the drawing's axis, with its unit."""
    heading: str
    """What stands under the title at the head of a column."""
    caption: str
    meaning: str
    is_share: bool
    """Whether the numbers are shares in [0, 1]: shown in per cent, with Wilson's interval."""

    @property
    def factor(self) -> float:
        """From a recorded number to the axis."""
        return 100.0 if self.is_share else 1.0

    def spoken(self, value: float) -> str:
        """The number as text, with its unit where it has one."""
        return f"{value:.1%}" if self.is_share else f"{value:.4g}".replace("-", MINUS)

    def interval(self, value: float, count: int | None) -> tuple[float, float] | None:
        """95% interval of `value` in its own units, or None where none can be told from the number alone."""
        return wilson_interval(value, count) if self.is_share and count else None

    def with_interval(self, value: float, count: int | None) -> str:
        """The number and, where there is one, its interval."""
        if (bounds := self.interval(value, count)) is None:
            return self.spoken(value)
        return f"{self.spoken(value)} [{self.spoken(bounds[0])}, {self.spoken(bounds[1])}]"


ACCURACY = Measure(
    title="Held-out accuracy",
    axis="held-out accuracy (%)",
    heading="greedy, before → after, 95% interval",
    caption=(
        "Greedy answers to held-out questions, with the 95% Wilson interval of that many questions. The interval says "
        "how well this model was measured, not how far another seed would land."
    ),
    meaning=(
        "Share of questions kept out of training that the model answers correctly when it always takes its most likely "
        "token."
    ),
    is_share=True,
)
MEAN_REWARD = Measure(
    title="Held-out mean reward",
    axis="held-out mean reward (reward units)",
    heading="greedy, before → after",
    caption=(
        "Mean reward of greedy answers to held-out questions. These rewards leave [0, 1], so they are no shares and "
        "have no interval here: their spread was not recorded."
    ),
    meaning=(
        "Mean reward of the answers to questions kept out of training when the model always takes its most likely "
        "token, in reward units."
    ),
    is_share=False,
)


def accuracy_before(run: Run) -> float | None:
    """As the result says; a resumed run measured it in its first part, as step 0 of the metrics."""
    if run.result and run.result.accuracy_before is not None:
        return run.result.accuracy_before
    return dict(run.series("eval_accuracy")).get(0)


def accuracy_points(run: Run) -> list[tuple[int, float]]:
    """Held-out numbers by step, with those before and after training where the log lacks them."""
    points = dict(run.series("eval_accuracy"))
    last = max((row["step"] for row in run.metrics), default=1)
    if run.result and run.result.accuracy_before is not None:
        points.setdefault(0, run.result.accuracy_before)
    if run.result and run.result.accuracy_after is not None:
        points.setdefault(max(last, 1), run.result.accuracy_after)
    return sorted(points.items())


def measure_of(runs: Sequence[Run]) -> Measure:
    """Accuracy where every held-out number of all `runs` lies in [0, 1], else mean reward."""
    values = [value for run in runs for _, value in accuracy_points(run)]
    results = [run.result for run in runs if run.result]
    ends = [end for result in results for end in (result.accuracy_before, result.accuracy_after) if end is not None]
    return ACCURACY if all(0 <= value <= 1 for value in (*values, *ends)) else MEAN_REWARD
