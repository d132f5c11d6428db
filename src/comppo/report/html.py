"""One self-contained page from one or more run folders: no script, no network, everything escaped.

Jinja2 and matplotlib are imported when a page is written.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comppo.report import credit, figures
from comppo.report.chart import MISSING, Chart, arm_colour
from comppo.report.data import Run, load_runs
from comppo.report.heldout import Measure, accuracy_before, measure_of
from comppo.report.runfiles import write_atomically
from comppo.report.visible import harmless


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """An accuracy, or a mean reward, as the headline shows it."""

    value: str
    interval: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """One arm in the table at the top."""

    label: str
    title: str
    before: Share
    after: Share
    questions: str
    responses: str
    tokens: str
    time: str
    memory: str
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row of the comparison of settings."""

    key: str
    values: tuple[str, ...]
    differs: bool


def write_report(folders: Sequence[Path], output: Path, *, title: str, notes: list[str]) -> None:
    """Write one HTML page about the runs in `folders`; a page that is there already is replaced, atomically.

    The page needs nothing outside itself and runs no script. The same records give the same bytes.

    Args:
        folders: run folders, in the order in which the page shows them.
        output: the page; its parent folder is created.
        title: heading of the page.
        notes: paragraphs under the heading, plain text.

    Raises:
        RecordError: a folder does not hold a valid run.
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    _need_extras()
    page = render(load_runs(folders), title=title, notes=notes)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)


def _need_extras() -> None:
    import importlib.util

    from comppo.errors import MissingExtraError

    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"a report needs {' and '.join(missing)}: run pip install 'comppo[train]'.")


def render(runs: Sequence[Run], *, title: str, notes: Sequence[str]) -> str:
    """The page about `runs` as text."""
    examples, scale = credit.build(runs)
    measure = measure_of(runs)
    page: str = (
        environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            notes=list(notes),
            headlines=[_headline(run, measure) for run in runs],
            measure=measure,
            caveat=_caveat(runs),
            colours=[arm_colour(index) for index in range(len(runs))],
            labels=[run.label for run in runs],
            curves=_drawn(figures.learning_curves(runs)),
            gates=_drawn(figures.gate_distribution(runs)),
            health=_drawn(figures.health(runs)),
            examples=examples,
            scale=f"{scale:.2g}",
            has_gates=any(panel.bounds for example in examples for panel in example.panels),
            settings=_settings(runs),
        )
    )
    return page


def environment() -> Any:
    """Jinja2 as every page uses it: escaping, strict, and with unusual characters made visible."""
    import jinja2
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return jinja2.Environment(
        loader=jinja2.PackageLoader("comppo.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _drawn(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Charts for the template. Their SVG is the only markup that is not escaped there: `svg.to_svg` has made it, and
    every text in it has been escaped by matplotlib or by `to_svg`."""
    from markupsafe import Markup

    return [
        {
            "title": chart.title,
            "caption": chart.caption,
            "svg": Markup(harmless(chart.svg)),
            "columns": chart.columns,
            "rows": chart.rows,
        }
        for chart in charts
    ]


def _headline(run: Run, measure: Measure) -> Headline:
    result = run.result
    if result is None:
        nothing = Share(value=MISSING, interval="")
        return Headline(
            label=run.label,
            title=run.title,
            before=_share(accuracy_before(run), None, measure),
            after=nothing,
            questions=MISSING,
            responses=MISSING,
            tokens=MISSING,
            time=MISSING,
            memory=MISSING,
            status=f"not finished, last step {run.metrics[-1]['step']}" if run.metrics else "not finished",
        )
    return Headline(
        label=run.label,
        title=run.title,
        before=_share(accuracy_before(run), result.eval_count, measure),
        after=_share(result.accuracy_after, result.eval_count, measure),
        questions=_whole(result.eval_count),
        responses=_whole(result.responses),
        tokens=_whole(result.tokens),
        time=duration(result.time_s),
        memory=MISSING if result.peak_memory_mb is None else f"{result.peak_memory_mb:,.0f} MB",
        status="" if result.status == "finished" else result.status,
    )


def _share(value: float | None, count: int | None, measure: Measure) -> Share:
    if value is None:
        return Share(value=MISSING, interval="")
    bounds = measure.interval(value, count)
    interval = f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}" if bounds else ""
    return Share(value=measure.spoken(value), interval=interval)


def _whole(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def duration(seconds: float | None) -> str:
    """Seconds as a reader would say them: "48.2 s", "12 min 05 s", "3 h 20 min"."""
    if seconds is None:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _caveat(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return (
            "This is one run of one seed: a demonstration of how the method behaves, and no evidence that it is better "
            "or worse than another."
        )
    if len({run.name for run in runs}) == len(runs):
        return (
            "Each arm is one run of one seed. That is a demonstration, and not evidence of a difference between them: "
            "another seed may move either arm by as much as the gap you see."
        )
    return (
        "A handful of runs is a demonstration, and not evidence of a difference: this page shows each run by itself "
        "and tests nothing across seeds. A comparison needs several seeds per arm, chosen before the runs."
    )


def _settings(runs: Sequence[Run]) -> list[Setting]:
    """Every setting and version, one row a key, one column a run; those that differ first."""
    flattened = []
    for run in runs:
        about = {"seed": run.seed, "started": run.started, "command": run.command, "folder": run.folder.name}
        versions = {f"version of {name}": version or "not installed" for name, version in run.versions.items()}
        flattened.append(about | dict(_flatten(run.config)) | versions)
    keys = list(dict.fromkeys(key for settings in flattened for key in settings))
    rows = []
    for key in keys:
        values = tuple(_spoken(settings.get(key, MISSING)) for settings in flattened)
        rows.append(Setting(key=key, values=values, differs=len(set(values)) > 1))
    return sorted(rows, key=lambda row: not row.differs)


def _flatten(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _spoken(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
