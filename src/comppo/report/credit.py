"""Responses with their credit per token, chosen and scaled for the page. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from comppo.report.data import Response, Run, Series
from comppo.report.visible import Piece, flat, pieces

SHOWN_TOKENS = 600
"""Tokens of one response that the page shows; the rest is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One box."""

    pieces: list[Piece]
    sign: str
    """"pos", "neg", "zero" or "off" (not trained)."""
    strength: str
    """Share of the colour scale, in [0, 1]."""
    gate: str | None
    """Height of the bar, in [0, 1]."""
    hint: str
    ends_line: bool
    row: tuple[str, ...]
    """Cells of the table of numbers, the token itself aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One response of one run."""

    label: str
    arm: int
    """Index of the run."""
    reward: str
    note: str
    prompt: list[Piece]
    tokens: list[TokenView]
    hidden: int
    """Tokens beyond `SHOWN_TOKENS`."""
    columns: tuple[str, ...]
    bounds: tuple[str, str] | None
    """Gate at the foot and at the top of a bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The same kind of response, from each run that saved some."""

    title: str
    panels: list[Panel]
    prompt: list[Piece] | None
    """Where all panels answer the same prompt."""


def signed(value: float) -> str:
    """Three digits after the point, with a real minus sign."""
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def colour_scale(responses: Sequence[Response]) -> float:
    """|advantage| at which the colour is full: the 98th percentile, rounded up to two digits, so that outliers do not
    bleach the rest; 1 where all are zero."""
    sizes = sorted(
        abs(value)
        for response in responses
        for value, trained in zip(response.advantages, response.trained, strict=True)
        if trained and value is not None
    )
    if not sizes or sizes[-1] == 0:
        return 1.0
    top = sizes[min(len(sizes) - 1, math.ceil(0.98 * len(sizes)) - 1)] or sizes[-1]
    unit = 10.0 ** (math.floor(math.log10(top)) - 1)
    return math.ceil(top / unit - 1e-9) * unit


def choose(runs: Sequence[Run]) -> list[tuple[str, list[tuple[int, Response]]]]:
    """A response of the best and one of the worst reward, of each run that saved any; the same prompt where possible.

    The first run with gates leads; without any, the first that saved responses.
    """
    saved = [(index, run) for index, run in enumerate(runs) if any(response.tokens for response in run.responses)]
    if not saved:
        return []
    saved.sort(key=lambda item: not any(response.gates for response in item[1].responses))
    kinds = [("Highest reward", True)]
    if any(len({r.reward for r in run.responses if r.reward is not None}) > 1 for _, run in saved):
        kinds.append(("Lowest reward", False))
    else:
        kinds = [("One response", True)]
    chosen = []
    for title, highest in kinds:
        group: list[tuple[int, Response]] = []
        candidates = {index: _candidates(run, highest) for index, run in saved}
        for index, _ in saved:
            if found := _pick(candidates, index, group[0][1].prompt if group else None):
                group.append((index, found))
        if group:
            chosen.append((title, group))
    return chosen


def _candidates(run: Run, highest: bool) -> list[Response]:
    usable = [response for response in run.responses if response.tokens]
    scored = [response.reward for response in usable if response.reward is not None]
    if not scored:
        return usable if highest else []
    if not highest and min(scored) == max(scored):  # shown as its highest already
        return []
    wanted = max(scored) if highest else min(scored)
    return [response for response in usable if response.reward == wanted]


def _pick(candidates: dict[int, list[Response]], index: int, prompt: str | None) -> Response | None:
    own = candidates[index]
    if not own:
        return None
    elsewhere = [{r.prompt for r in others} for other, others in candidates.items() if other != index]
    middle = sorted(len(response.tokens) for response in own)[len(own) // 2]

    def rank(response: Response) -> tuple[bool, bool, int, int]:
        partnered = response.prompt == prompt if prompt is not None else any(response.prompt in p for p in elsewhere)
        silent = not any(response.advantages)
        return (silent, not partnered, abs(len(response.tokens) - middle), own.index(response))

    return min(own, key=rank)


def build(runs: Sequence[Run]) -> tuple[list[Example], float]:
    """The examples of a report and the |advantage| at which their colour is full."""
    chosen = choose(runs)
    scale = colour_scale([response for _, group in chosen for _, response in group])
    examples = []
    for title, group in chosen:
        panels = [_panel(runs[index], index, response, scale) for index, response in group]
        same = len({response.prompt for _, response in group}) == 1
        examples.append(Example(title=title, panels=panels, prompt=panels[0].prompt if same else None))
    return examples, scale


def _panel(run: Run, arm: int, response: Response, scale: float) -> Panel:
    bounds = _gate_bounds(run) if response.gates else None
    names = {"gates": "Gate", "values": "Value", "statistic": "Statistic", "logps": "Probability"}
    columns = {key: name for key, name in names.items() if getattr(response, key) is not None}
    return Panel(
        label=run.label,
        arm=arm,
        reward="not scored" if response.reward is None else f"reward {response.reward:g}",
        note=_note(response),
        prompt=pieces(response.prompt, layout=True),
        tokens=[
            _token(response, index, scale, bounds, columns) for index in range(min(len(response.tokens), SHOWN_TOKENS))
        ],
        hidden=max(0, len(response.tokens) - SHOWN_TOKENS),
        columns=("Advantage", *columns.values()),
        bounds=(f"{bounds[0]:.4g}", f"{bounds[1]:.4g}") if bounds else None,
    )


def _note(response: Response) -> str:
    known = [v for v, trained in zip(response.advantages, response.trained, strict=True) if trained and v is not None]
    if not known:
        return f"{len(response.tokens)} tokens, none trained"
    if max(known) - min(known) <= 1e-6 * max(1.0, abs(known[0])):
        return f"{len(response.tokens)} tokens, each with the advantage {signed(known[0])}"
    return f"{len(response.tokens)} tokens, advantages from {signed(min(known))} to {signed(max(known))}"


def _gate_bounds(run: Run) -> tuple[float, float]:
    if run.gates:
        return run.gates.span
    seen = [gate for response in run.responses for gate in response.gates or () if gate is not None]
    return (min(seen), max(seen)) if seen else (0.0, 1.0)


def _height(gate: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return min(1.0, max(0.0, (gate - low) / (high - low))) if high > low else 1.0


def _token(
    response: Response, index: int, scale: float, bounds: tuple[float, float] | None, columns: dict[str, str]
) -> TokenView:
    text, advantage, trained = response.tokens[index], response.advantages[index], response.trained[index]
    cells = ["\N{EM DASH}" if advantage is None else signed(advantage)]
    cells += [_cell(key, getattr(response, key), index) for key in columns]
    gate = response.gates[index] if response.gates else None
    spoken = [f"{name.lower()} {cell}" for name, cell in zip(("Advantage", *columns.values()), cells, strict=True)]
    if not trained:
        sign = "off"
        spoken.insert(0, "not trained")
    else:
        sign = "zero" if not advantage else "pos" if advantage > 0 else "neg"
    return TokenView(
        pieces=pieces(text),
        sign=sign,
        strength=f"{min(1.0, abs(advantage or 0.0) / scale):.3f}",
        gate=f"{_height(gate, bounds):.3f}" if bounds and gate is not None else None,
        hint=" · ".join([f"{index}", flat(text), *spoken]),
        ends_line=text.endswith("\n"),
        row=tuple(cells),
    )


def _cell(key: str, series: Series, index: int) -> str:
    value = series[index]
    if value is None:
        return "\N{EM DASH}"
    if key == "logps":
        return f"{math.exp(min(value, 0.0)):.3f}"
    return f"{value:.4f}" if key == "gates" else signed(value) if key == "statistic" else f"{value:.3f}"
