"""Run folders, read back and checked, as plain dataclasses. Standard library only.

Everything but `run.json` may be missing: a run that was stopped, or an arm without gates, still has something to show.
What is there must be whole; an error names the file, the key and what to do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from comppo.report.fields import Fields
from comppo.report.runfiles import (
    CREDIT_FILE,
    GATES_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RUN_FILE,
    RecordError,
    numbered_metrics,
    read_json,
)
from comppo.report.visible import harmless

LABEL_LENGTH = 24
"""Characters that fit beside a curve; a longer title is shown once, in the table."""
Series = tuple[float | None, ...]
"""One number per token or step; None where it was not a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled response with the credit that training gave each of its tokens."""

    prompt: str
    completion: str
    reward: float | None
    """Reward units; None where no reward function could score it."""
    tokens: tuple[str, ...]
    advantages: Series
    """As the update used them."""
    gates: Series | None = None
    """Share of later credit that each token keeps, unitless, in [0, 1]."""
    values: Series | None = None
    """The critic's V(s_t), reward units."""
    statistic: Series | None = None
    """What the gate was computed from."""
    logps: Series | None = None
    """Log-probability of each token under the policy that sampled it, nats."""
    trained: tuple[bool, ...] = ()
    """False where the policy did not choose the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateHistogram:
    """How the gates of one late batch were distributed."""

    edges: tuple[float, ...]
    """One more than counts, increasing, unitless."""
    counts: tuple[float, ...]
    minimum: float
    """Least gate that occurred."""
    maximum: float
    """Greatest gate that occurred."""
    lower_bound: float | None = None
    """Least gate that the settings allow, where it is one number for all responses."""
    upper_bound: float | None = None
    """Greatest gate that the settings allow."""
    reference: float | None = None
    """The fixed coefficient that the mean was calibrated to."""
    mean: float | None = None

    @property
    def span(self) -> tuple[float, float]:
        """The bounds where they are known, otherwise what occurred."""
        low, high = self.lower_bound, self.upper_bound
        return (self.minimum if low is None else low, self.maximum if high is None else high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a finished run reports about itself."""

    accuracy_before: float | None
    """Mean reward of greedy answers to held-out questions before training: an accuracy where rewards are 0 or 1."""
    accuracy_after: float | None
    eval_count: int | None
    """Held-out questions."""
    responses: int | None
    """Sampled for training."""
    tokens: int | None
    """Generated for training."""
    time_s: float | None
    peak_memory_mb: float | None
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One arm of a comparison, as it was recorded."""

    folder: Path
    name: str
    title: str
    label: str
    """Short and unique among the runs of one report."""
    seed: int | None
    started: str
    command: str
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[dict[str, Any], ...] = ()
    responses: tuple[Response, ...] = ()
    gates: GateHistogram | None = None
    result: Result | None = None

    def series(self, *names: str) -> list[tuple[int, float]]:
        """(step, number) pairs of the first of `names` that was recorded, as such or under "comppo/"."""
        for name in names:
            points = [
                (row["step"], float(value))
                for row in self.metrics
                for key, value in row.items()
                if (key in (name, f"comppo/{name}")) and value is not None
            ]
            if points:
                return sorted(dict(points).items())  # a step that was logged twice counts as last logged
        return []


def wilson_interval(accuracy: float, count: int) -> tuple[float, float]:
    """95% interval of a binomial proportion, after Wilson 1927.

    Args:
        accuracy: observed share of successes, in [0, 1].
        count: trials, at least 1.

    Returns:
        Lower and upper end, in [0, 1].
    """
    z = 1.959963984540054
    centre = (accuracy + z * z / (2 * count)) / (1 + z * z / count)
    spread = z * math.sqrt(accuracy * (1 - accuracy) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    # Exact 0 and 1 leave rounding errors of either sign.
    return (0.0 if accuracy == 0 else max(0.0, centre - spread), 1.0 if accuracy == 1 else min(1.0, centre + spread))


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, in the order given, with labels that tell them apart.

    Args:
        folders: run folders as `comppo.study.record` writes them; at least one, each once.

    Returns:
        One run per folder, in the same order.

    Raises:
        RecordError: no folder was given, one was given twice, or one does not hold a valid run.
    """
    if not folders:
        raise RecordError("folders is empty: pass at least one folder that a comppo run has written.")
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (real := Path(folder).resolve()) in seen:
            raise RecordError(f"{folder} and {seen[real]} are the same folder: pass each run once.")
        seen[real] = Path(folder)
    runs = [_load_run(Path(folder)) for folder in folders]
    return [replace(run, label=label) for run, label in zip(runs, _labels(runs), strict=True)]


def _labels(runs: list[Run]) -> list[str]:
    labels = []
    for run in runs:
        label = harmless(run.title if len(run.title) <= LABEL_LENGTH else run.name)
        labels.append(label if len(label) <= LABEL_LENGTH else f"{label[: LABEL_LENGTH - 1]}…")
    for suffix in (lambda run, _: f"seed {run.seed}", lambda _, index: f"run {index + 1}"):
        crowded = {label for label in labels if labels.count(label) > 1}
        labels = [
            f"{label}, {suffix(run, index)}" if label in crowded else label
            for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        ]
    return labels


def _load_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder: pass folders that a comppo run has written.")
    about = Fields(folder / RUN_FILE, read_json(folder / RUN_FILE))
    name = about.text("name")
    title = about.text("title", default=name) or name
    return Run(
        folder=folder,
        name=name,
        title=title,
        label=title,
        seed=about.integer("seed"),
        started=about.text("started", default=""),
        command=about.text("command", default=""),
        config=about.mapping("config"),
        versions=about.mapping("versions"),
        metrics=_load_metrics(folder / METRICS_FILE),
        responses=_load_responses(folder / CREDIT_FILE),
        gates=_load_gates(folder / GATES_FILE),
        result=_load_result(folder / RESULT_FILE),
    )


def _load_metrics(path: Path) -> tuple[dict[str, Any], ...]:
    rows = []
    for line, row in numbered_metrics(path):
        record = Fields(path, row, where=f", line {line}")
        if record.integer("step") is None:
            raise record.wrong("step", "an integer")
        for key in row:
            record.number(key)
        rows.append(row)
    return tuple(rows)


def _load_responses(path: Path) -> tuple[Response, ...]:
    if not path.exists():
        return ()
    content = read_json(path)
    if not isinstance(content, list):
        raise RecordError(
            f"{path} holds {type(content).__name__}: it must be a list of responses. Run again to record it."
        )
    return tuple(_load_response(Fields(path, item, where=f", response {index}")) for index, item in enumerate(content))


def _load_response(record: Fields) -> Response:
    tokens = record.value("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise record.wrong("tokens", "a list of texts")
    size = len(tokens)
    trained = record.value("trained", default=[True] * size)
    if not isinstance(trained, list) or len(trained) != size or not all(isinstance(flag, bool) for flag in trained):
        raise record.wrong("trained", f"a list of {size} true or false, one per token")
    advantages = record.numbers("advantages", size)
    if advantages is None:
        raise record.wrong("advantages", f"a list of {size} numbers, one per token")
    return Response(
        prompt=record.text("prompt"),
        completion=record.text("completion", default="".join(tokens)),
        reward=record.number("reward"),
        tokens=tuple(tokens),
        advantages=advantages,
        gates=record.numbers("gates", size),
        values=record.numbers("values", size),
        statistic=record.numbers("statistic", size),
        logps=record.numbers("logps", size),
        trained=tuple(trained),
    )


def _load_gates(path: Path) -> GateHistogram | None:
    if not path.exists():
        return None
    record = Fields(path, read_json(path))
    counts = record.value("counts")
    if not isinstance(counts, list) or not counts:
        raise record.wrong("counts", "a list of at least one number")
    numbers = record.numbers("counts", len(counts)) or ()
    edges = record.numbers("edges", len(counts) + 1) or ()
    lower, upper = record.number("minimum"), record.number("maximum")
    counted = tuple(count for count in numbers if count is not None and count >= 0)
    if len(counted) != len(counts):
        raise record.wrong("counts", "non-negative numbers")
    marks = tuple(edge for edge in edges if edge is not None)
    if len(marks) != len(counts) + 1 or any(low >= high for low, high in pairwise(marks)):
        raise record.wrong("edges", f"{len(counts) + 1} increasing numbers, one more than counts")
    if lower is None or upper is None or lower > upper:
        raise record.wrong("minimum", "a number that is at most 'maximum'")
    return GateHistogram(
        edges=marks,
        counts=counted,
        minimum=lower,
        maximum=upper,
        lower_bound=record.number("lower_bound"),
        upper_bound=record.number("upper_bound"),
        reference=record.number("reference"),
        mean=record.number("mean"),
    )


def _load_result(path: Path) -> Result | None:
    if not path.exists():
        return None
    record = Fields(path, read_json(path))
    count = record.integer("eval_count")
    if count is not None and count < 0:
        raise record.wrong("eval_count", "a number of questions, 0 or more")
    return Result(
        accuracy_before=record.number("accuracy_before"),
        accuracy_after=record.number("accuracy_after"),
        eval_count=count,
        responses=record.integer("responses"),
        tokens=record.integer("tokens"),
        time_s=record.number("time_s"),
        peak_memory_mb=record.number("peak_memory_mb"),
        status=record.text("status", default="finished"),
    )
