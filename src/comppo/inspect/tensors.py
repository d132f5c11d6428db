"""Tensors that a user has, checked and turned into what the inspect page shows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError
from comppo.inspect.operators import OperatorCredit
from comppo.inspect.token_text import token_texts
from comppo.report.inspect_page import write_page
from comppo.report.inspection import Inspection, Operator, Quantity, Sample, TokenCredit

Texts = Sequence[Sequence[str]] | Tensor
"""Token texts of each row, or token ids (rows, tokens)."""
TopKeys = Sequence[Sequence[Sequence[tuple[int, float]]]]
"""Per row and token: positions, counted from the prompt's first token, and their share of attention."""


def report(
    path: str | Path,
    *,
    responses: Texts,
    operators: Mapping[str, Tensor | OperatorCredit],
    tokenizer: Any = None,
    completion_mask: Tensor | None = None,
    mask: Tensor | None = None,
    prompts: Sequence[str] | Sequence[Sequence[str]] | None = None,
    rewards: Tensor | Sequence[float | None] | None = None,
    num_generations: int = 1,
    statistic: Tensor | None = None,
    values: Tensor | None = None,
    logps: Tensor | None = None,
    sink_mass: Tensor | None = None,
    entropies: Tensor | None = None,
    quantities: Mapping[str, Tensor] | None = None,
    top_keys: TopKeys | None = None,
    labels: Sequence[str] | None = None,
    title: str = "Credit per token",
    notes: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML page about a batch of responses; it needs no network and no comppo to be read.

    Example:
        comppo.inspect.report("credit.html", responses=completion_ids, tokenizer=tokenizer,
                              completion_mask=completion_mask, operators={"mine": advantages}, rewards=rewards)

    Args:
        path: a file that does not exist yet, or a folder, in which the page is named by its content. Nothing is
            overwritten.
        responses: token ids (rows, tokens), with a tokenizer; or the text of each token, one list per row.
        operators: advantages (rows, tokens) by the operator's name, in the order in which the page offers them; an
            `OperatorCredit` where more is known, so that the page can show where a token's credit comes from. May be
            empty where other numbers are given.
        tokenizer: of Transformers; for token ids.
        completion_mask: (rows, tokens), true or 1 at tokens, false at padding; None: rows begin with their tokens, and
            have as many as there are texts. All (rows, tokens) tensors are aligned with it.
        mask: (rows, tokens), true where the policy chose the token and it is trained; None means all tokens.
        prompts: text of each row's prompt, or its tokens' texts, one list per row.
        rewards: (rows,), reward units; None or NaN where a response could not be scored.
        num_generations: responses per prompt; those of one prompt stand next to each other.
        statistic: (rows, tokens), what a gate is made from.
        values: (rows, tokens), V(s_t), reward units.
        logps: (rows, tokens), log-probabilities of the tokens, nats.
        sink_mass: (rows, tokens), in [0, 1].
        entropies: (rows, tokens), of the output distribution, nats.
        quantities: further numbers (rows, tokens) by the name that the page gives them.
        top_keys: positions that each token's heads look at; needs `prompts` as tokens.
        labels: a heading per row; None means "Response 1" and so on.
        title: heading of the page, plain text.
        notes: paragraphs under it, plain text.

    Returns:
        The page's path.

    Raises:
        EvidenceError: a shape does not fit; the message names the argument.
        ConfigError: an argument is missing or contradicts another, or the path holds something else.
        MissingExtraError: jinja2 is not installed.
    """
    given = {
        "statistic": statistic,
        "value": values,
        "logp": logps,
        "sink_mass": sink_mass,
        "entropy": entropies,
    }
    arguments = {"value": "values", "logp": "logps", "entropy": "entropies"}
    series = {key: (arguments.get(key, key), tensor) for key, tensor in given.items() if tensor is not None}
    further = dict(quantities or {})
    series |= {f"own {name}": (f"quantities[{name!r}]", tensor) for name, tensor in further.items()}
    inspection = inspect_tensors(
        responses=responses,
        operators=operators,
        tokenizer=tokenizer,
        completion_mask=completion_mask,
        mask=mask,
        prompts=prompts,
        rewards=rewards,
        num_generations=num_generations,
        series=series,
        quantities=[_described(name, tensor) for name, tensor in further.items()],
        top_keys=top_keys,
        labels=labels,
        title=title,
        notes=notes,
    )
    return write_page(path, inspection)


def inspect_tensors(
    *,
    responses: Texts,
    operators: Mapping[str, Tensor | OperatorCredit],
    tokenizer: Any,
    completion_mask: Tensor | None,
    mask: Tensor | None,
    prompts: Sequence[str] | Sequence[Sequence[str]] | None,
    rewards: Tensor | Sequence[float | None] | None,
    num_generations: int,
    series: Mapping[str, tuple[str, Tensor]],
    quantities: Sequence[Quantity],
    top_keys: TopKeys | None,
    labels: Sequence[str] | None,
    title: str,
    notes: Sequence[str],
) -> Inspection:
    """What `report` writes; arguments as there, but for two.

    Args:
        responses: ids or texts.
        operators: by name.
        tokenizer: for ids.
        completion_mask: real tokens.
        mask: trained tokens.
        prompts: per row.
        rewards: per row.
        num_generations: per prompt.
        series: by the key of a quantity, the argument's name for messages and its (rows, tokens) tensor.
        quantities: those that are not built in.
        top_keys: per row.
        labels: per row.
        title: heading.
        notes: paragraphs.

    Returns:
        Plain numbers.

    Raises:
        EvidenceError: a shape does not fit.
        ConfigError: an argument is missing or contradicts another.
    """
    texts, places, width = _rows(responses, tokenizer, completion_mask)
    rows = len(texts)
    _check_counts(rows, num_generations, prompts=prompts, rewards=rewards, labels=labels, top_keys=top_keys)
    credits = {
        name: given if isinstance(given, OperatorCredit) else OperatorCredit(advantages=given)
        for name, given in operators.items()
    }
    tensors = {f"operators[{name!r}].{part}": tensor for name, c in credits.items() for part, tensor in _parts(c)}
    tensors |= dict(series.values())
    if mask is not None:
        tensors["mask"] = mask
    longest = max(len(at) for at in places)
    for name, tensor in tensors.items():
        _check_shape(name, tensor, rows, width, longest)
    outcome = _outcomes(rewards, rows)
    samples = []
    for row in range(rows):
        at = places[row]
        samples.append(
            Sample(
                label=labels[row] if labels is not None else f"Response {row % num_generations + 1}",
                tokens=texts[row],
                group=row // num_generations,
                prompt=prompts[row] if prompts is not None else "",
                reward=outcome[row],
                trained=None if mask is None else [bool(flag) for flag in mask[row].bool()[at].tolist()],
                series={key: _numbers(tensor, row, at) for key, (_, tensor) in series.items()},
                credit=[
                    TokenCredit(**{part: _numbers(tensor, row, at) for part, tensor in _parts(c)})
                    for c in credits.values()
                ],
                keys=top_keys[row] if top_keys is not None else None,
            )
        )
    return Inspection(
        title=title,
        notes=notes,
        operators=[Operator(label=name, sentence=c.about) for name, c in credits.items()],
        samples=samples,
        quantities=quantities,
    )


def _parts(credit: OperatorCredit) -> list[tuple[str, Tensor]]:
    names = ("advantages", "gates", "deltas", "decays", "weights")
    return [(name, getattr(credit, name)) for name in names if getattr(credit, name) is not None]


def _rows(responses: Texts, tokenizer: Any, real: Tensor | None) -> tuple[list[list[str]], list[Tensor], int | None]:
    """Texts of each row, where its tokens stand in the tensors, and the tensors' width where it is known."""
    if not isinstance(responses, Tensor):
        texts = [list(row) for row in responses]
        for index, row in enumerate(responses):
            if isinstance(row, str) or not all(isinstance(token, str) for token in row):
                raise ConfigError(
                    f"responses[{index}] must be a list with the text of each token, got {type(row).__name__}: pass "
                    "token ids as one tensor with `tokenizer`."
                )
        if real is None:
            return texts, [torch.arange(len(row)) for row in texts], None
        _check_shape("completion_mask", real, len(texts), None)
        places = [flags.nonzero().flatten() for flags in real.detach().cpu().bool()]
        for index, (row, at) in enumerate(zip(texts, places, strict=True)):
            if len(row) != len(at):
                raise EvidenceError(
                    f"responses[{index}] has {len(row)} tokens, but completion_mask has {len(at)} in that row: pass "
                    "as many texts as there are real tokens."
                )
        return texts, places, real.shape[1]
    if tokenizer is None:
        raise ConfigError("responses are token ids, but tokenizer is None: pass it, or the text of each token.")
    if responses.ndim != 2 or responses.is_floating_point():
        raise EvidenceError(
            f"responses must be integer token ids (rows, tokens), got {responses.dtype} {tuple(responses.shape)}."
        )
    ids = responses.detach().cpu()
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.detach().cpu()
    _check_shape("completion_mask", real, *ids.shape)
    places = [flags.nonzero().flatten() for flags in real.bool()]
    texts = [token_texts(tokenizer, row[at].tolist()) for row, at in zip(ids, places, strict=True)]
    return texts, places, ids.shape[1]


def _check_shape(name: str, tensor: Any, rows: int, width: int | None, longest: int = 0) -> None:
    """Refuse what is no (rows, width) tensor; without a width, one that has less tokens than the longest response."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} must be a tensor of shape (rows, tokens), got {type(tensor).__name__}.")
    fits = tensor.ndim == 2 and tensor.shape[0] == rows
    if not fits or tensor.shape[1] < longest or (width is not None and tensor.shape[1] != width):
        wanted = f"({rows}, {width})" if width is not None else f"({rows}, {longest} or more)"
        raise EvidenceError(f"{name} has shape {tuple(tensor.shape)}, but responses need {wanted}: pass one per token.")


def _check_counts(rows: int, num_generations: int, **given: Any) -> None:
    if not rows:
        raise EvidenceError("responses have no rows: pass at least one response.")
    if num_generations < 1 or rows % num_generations:
        raise EvidenceError(
            f"num_generations={num_generations} does not divide the {rows} responses: pass whole groups, or 1."
        )
    for name, value in given.items():
        if isinstance(value, str) or (value is not None and len(value) != rows):
            got = "one text" if isinstance(value, str) else f"{len(value)} entries"
            raise EvidenceError(f"{name} has {got}, but there are {rows} responses: pass one per response.")


def _numbers(tensor: Tensor, row: int, at: Tensor) -> list[float | None]:
    values = tensor[row].detach().cpu().double()[at]
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _outcomes(rewards: Tensor | Sequence[float | None] | None, rows: int) -> list[float | None]:
    if rewards is None:
        return [None] * rows
    listed = rewards.detach().cpu().double().tolist() if isinstance(rewards, Tensor) else list(rewards)
    if any(isinstance(reward, list) for reward in listed):
        raise EvidenceError("rewards must be one number per response: sum rewards of tokens first.")
    return [None if reward is None or reward != reward else float(reward) for reward in listed]


def _described(name: str, tensor: Any) -> Quantity:
    if not name:
        raise ConfigError("quantities: '' is no name for the page: pass a text that is not empty.")
    two_sided = isinstance(tensor, Tensor) and bool((tensor < 0).any()) and bool((tensor > 0).any())
    return Quantity(
        key=f"own {name}", label=name, sentence="As given.", scale="diverging" if two_sided else "sequential"
    )
