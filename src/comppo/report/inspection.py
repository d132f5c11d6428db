"""What an inspect page shows: responses with their credit, token by token, as plain numbers. Standard library only.

`comppo.inspect` makes inspections from tensors, models and runs; `comppo.report.inspect_page` writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comppo.errors import ConfigError

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


def check_inspection(inspection: Inspection) -> None:
    """ConfigError where there is nothing to show, or a series does not have one number per token."""
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
