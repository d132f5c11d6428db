"""The inspect page: responses with their credit, token by token, as one file that a browser opens by itself.

What the page shows comes as plain numbers in an `Inspection`. Standard library only; Jinja2 is imported when a page is
written. `comppo.inspect` makes inspections from tensors, models and runs.
"""

import base64
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from comppo.errors import ConfigError, MissingExtraError
from comppo.report.runfiles import write_atomically
from comppo.report.visible import Piece, harmless, pieces

LEVELS = 12
"""Steps of each colour scale, beside none."""
SCRIPTS = ("numbers", "text", "detail", "controls")
"""Files of the page's script, in order."""
Series = Sequence[float | None]
"""One number per token of a response; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Something that tokens are coloured by."""

    key: str
    label: str
    sentence: str
    """What it is, for the legend."""
    scale: str = "sequential"
    """"diverging" around 0, "sequential", or "falling": sequential with the strongest colour at the least number."""


ADVANTAGE = Quantity(
    key="advantage",
    label="Advantage",
    sentence="How much the update pushes this token: up where it is above 0, down where it is below.",
    scale="diverging",
)
GATE = Quantity(
    key="gate",
    label="Gate",
    sentence="Share of later credit that this token lets through to itself and to the tokens before it, from 0 to 1.",
)
OF_OPERATORS = (ADVANTAGE, GATE)
"""Each operator has its own."""
OF_RESPONSES = {
    quantity.key: quantity
    for quantity in (
        Quantity(
            key="statistic",
            label="Statistic",
            sentence="What was read of the model's computation at the position that emits this token; the gate is made "
            "from it.",
        ),
        Quantity(
            key="value",
            label="Value V",
            sentence="The reward that is expected just before this token is sampled, in reward units.",
        ),
        Quantity(
            key="logp",
            label="Log-probability",
            sentence="Natural logarithm of the probability that the model gave this token; a strong colour is a "
            "surprise.",
            scale="falling",
        ),
        Quantity(
            key="sink_mass",
            label="Sink mass",
            sentence="Share of attention that rests on the first key of the sequence, mean over heads and layers.",
        ),
        Quantity(
            key="entropy",
            label="Output entropy",
            sentence="Entropy of the distribution from which this token was drawn, in nats: 0 where there was no "
            "choice.",
        ),
    )
}
"""Those that belong to a response whatever the operator, by key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """A rule that gives credit."""

    label: str
    sentence: str = ""
    """What it does, for the legend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCredit:
    """What one operator gave to one response: one number per token in each series.

    With `decays`, A[t] = deltas[t] + decays[t] A[t+1]. With `weights`, K[t, u] = n_u w_t / (w_0 + ... + w_u), where n_u
    counts the tokens up to u. With neither the page cannot say where credit comes from.
    """

    advantages: Series
    gates: Series | None = None
    """Unitless, in [0, 1]."""
    deltas: Series | None = None
    """What is carried back, units of the advantages."""
    decays: Series | None = None
    """Unitless, in [0, 1]."""
    weights: Series | None = None
    """Non-negative, any scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response."""

    label: str
    tokens: Sequence[str]
    """The text of each token; lone surrogates stand for bytes that are no UTF-8."""
    credit: Sequence[TokenCredit | None]
    """One per operator, in their order; None where an operator has nothing to say about this response."""
    group: int = 0
    """Samples of one group answer the same prompt and stand side by side."""
    prompt: str | Sequence[str] = ""
    """Running text, or the prompt's tokens."""
    reward: float | None = None
    """Reward units."""
    trained: Sequence[bool] | None = None
    """False where the policy did not choose the token; None means all were chosen."""
    series: Mapping[str, Series] = field(default_factory=dict)
    """By key of a quantity."""
    keys: Sequence[Sequence[tuple[int, float]]] | None = None
    """Per token, the positions that it looks at most and their share of attention, greatest first. Positions count
    from the prompt's first token, so the prompt has to come as tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything that a page shows."""

    title: str
    operators: Sequence[Operator]
    samples: Sequence[Sample]
    notes: Sequence[str] = ()
    """Paragraphs under the title, plain text."""
    quantities: Sequence[Quantity] = ()
    """Further quantities, beside those of this module; their numbers stand in `Sample.series`."""


def render(inspection: Inspection) -> str:
    """The page as text: no network, one script and one style sheet that a strict content security policy names.

    Args:
        inspection: what to show.

    Returns:
        HTML; the same text for the same inspection.

    Raises:
        ConfigError: there is nothing to show, or a series does not have one number per token.
        MissingExtraError: jinja2 is not installed.
    """
    _check(inspection)
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError("an inspect page needs jinja2: run pip install 'comppo[train]'.")
    import jinja2
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("comppo.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = _asset("inspect.css") + _ramps()
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(f"{name}.js") for name in SCRIPTS) + "})();\n"
    # The only unescaped texts: files of this package, their digests, and JSON without any markup character.
    page: str = environment.get_template("inspect.html.j2").render(
        title=inspection.title,
        notes=list(inspection.notes),
        style=Markup(style),
        script=Markup(script),
        style_digest=Markup(_digest(style)),
        script_digest=Markup(_digest(script)),
        data=Markup(as_script_data(payload(inspection))),
    )
    return page


def write_page(path: str | Path, inspection: Inspection) -> Path:
    """Write the page; nothing is ever overwritten.

    Args:
        path: a file that does not exist yet (or holds this very page), or a folder, in which the page is named by its
            content. Parents are created; a path without a suffix that does not exist is a folder.
        inspection: what to show.

    Returns:
        The page's path.

    Raises:
        ConfigError: the file exists and holds something else, or the inspection cannot be shown.
        MissingExtraError: jinja2 is not installed.
    """
    page, path = render(inspection), Path(path)
    if path.is_dir() or not (path.suffix or os.path.lexists(path)):
        path = path / f"inspect-{hashlib.sha256(page.encode('utf-8')).hexdigest()[:12]}.html"
    if os.path.lexists(path):
        if path.is_file() and path.read_bytes() == page.encode("utf-8"):
            return path
        raise ConfigError(
            f"path={str(path)!r} exists and is not overwritten: choose another name, or give a folder, in which pages "
            "are named by their content."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def as_script_data(content: Any) -> str:
    """JSON that is safe inside a script element: ASCII, without <, > and &, which could end it or begin another."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(inspection: Inspection) -> dict[str, Any]:
    """What the page's script reads; each token text stands in it once."""
    vocabulary: dict[str, int] = {}

    def numbered(tokens: Sequence[str]) -> list[int]:
        return [vocabulary.setdefault(token, len(vocabulary)) for token in tokens]

    samples = [
        {
            "label": harmless(sample.label),
            "group": sample.group,
            "reward": sample.reward,
            "prompt": None if isinstance(sample.prompt, str) else numbered(sample.prompt),
            "text": _plain(pieces(sample.prompt, layout=True))
            if isinstance(sample.prompt, str) and sample.prompt
            else None,
            "tokens": numbered(sample.tokens),
            "trained": None if sample.trained is None or all(sample.trained) else [int(t) for t in sample.trained],
            "series": {key: _rounded(values) for key, values in sample.series.items()},
            "credit": [None if credit is None else _credit(credit) for credit in sample.credit],
            "keys": None if sample.keys is None else [[[p, _round(w)] for p, w in keys] for keys in sample.keys],
        }
        for sample in inspection.samples
    ]
    known = [*OF_OPERATORS, *OF_RESPONSES.values(), *inspection.quantities]
    return {
        "levels": LEVELS,
        "quantities": [
            {"key": q.key, "label": harmless(q.label), "sentence": harmless(q.sentence), "scale": q.scale}
            for q in known
            if _occurs(q.key, inspection)
        ],
        "operators": [{"label": harmless(o.label), "sentence": harmless(o.sentence)} for o in inspection.operators],
        "vocabulary": [[token, _plain(pieces(token))] for token in vocabulary],
        "samples": samples,
    }


def _occurs(key: str, inspection: Inspection) -> bool:
    if key == ADVANTAGE.key:
        return bool(inspection.operators)
    if key == GATE.key:
        return any(c is not None and c.gates is not None for sample in inspection.samples for c in sample.credit)
    return any(key in sample.series for sample in inspection.samples)


def _credit(credit: TokenCredit) -> dict[str, Any]:
    names = ("advantages", "gates", "deltas", "decays", "weights")
    return {name: _rounded(getattr(credit, name)) for name in names if getattr(credit, name) is not None}


def _plain(found: Sequence[Piece]) -> list[list[Any]]:
    return [[piece.text, int(piece.mark)] for piece in found]


def _rounded(values: Series) -> list[float | None]:
    return [_round(value) for value in values]


def _round(value: float | None) -> float | None:
    """Nine digits: products over thousands of tokens keep six."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.9g}")


def _asset(name: str) -> str:
    return resources.files("comppo.report").joinpath("templates", "inspect", name).read_text(encoding="utf-8")


def _ramps() -> str:
    """A class for each step of each scale, so that colouring a token is changing one class."""
    rules = [
        f".{name}{level} {{ background-color: color-mix(in srgb, var(--{colour}) {85 * level / LEVELS:.1f}%, "
        "transparent); }"
        for name, colour in (("p", "above"), ("n", "below"), ("s", "scale"))
        for level in range(1, LEVELS + 1)
    ]
    return "\n".join(rules) + "\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _check(inspection: Inspection) -> None:
    if not any(sample.tokens for sample in inspection.samples):
        raise ConfigError("samples hold no token: pass at least one response that is not empty.")
    if not inspection.operators and not any(sample.series for sample in inspection.samples):
        raise ConfigError("operators and series are empty: pass at least one number per token to colour by.")
    known = {q.key for q in (*OF_OPERATORS, *OF_RESPONSES.values())}
    for quantity in inspection.quantities:
        if quantity.key in known:
            raise ConfigError(f"quantity {quantity.key!r} is there twice, or built in: choose another key.")
        known.add(quantity.key)
    for index, sample in enumerate(inspection.samples):
        if len(sample.credit) != len(inspection.operators):
            raise ConfigError(
                f"samples[{index}].credit has {len(sample.credit)} entries, but there are {len(inspection.operators)} "
                "operators: pass one for each, None where there is nothing."
            )
        for key in sample.series:
            if key not in known or key in (ADVANTAGE.key, GATE.key):
                raise ConfigError(f"samples[{index}].series has {key!r}: describe it in `quantities` first.")
        _check_lengths(index, sample)


def _check_lengths(index: int, sample: Sample) -> None:
    size = len(sample.tokens)
    series: dict[str, Sequence[Any] | None] = {f"series[{key!r}]": values for key, values in sample.series.items()}
    for number, credit in enumerate(sample.credit):
        for name in ("advantages", "gates", "deltas", "decays", "weights") if credit is not None else ():
            series[f"credit[{number}].{name}"] = getattr(credit, name)
    series |= {"trained": sample.trained, "keys": sample.keys}
    for name, values in series.items():
        if values is not None and len(values) != size:
            raise ConfigError(
                f"samples[{index}].{name} has {len(values)} entries for {size} tokens: pass one per token."
            )
    if sample.keys is None:
        return
    if isinstance(sample.prompt, str):
        raise ConfigError(f"samples[{index}].keys count positions from the prompt: pass the prompt as its tokens.")
    ends = len(sample.prompt) + size
    if any(not 0 <= position < ends for keys in sample.keys for position, _ in keys):
        raise ConfigError(f"samples[{index}].keys hold a position outside the {ends} tokens of prompt and response.")
