"""One forward per micro-batch that reads everything the credit of a response may depend on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from comppo.computation.reader import ComputationReader, Heads, emitting_positions
from comppo.computation.router import ROUTER_STATISTICS
from comppo.computation.scoring import Score, score_plainly
from comppo.computation.summaries import (
    ATTENTION_STATISTICS,
    DEFAULT_STATISTIC,
    TOKEN_STATISTICS,
    AttentionStatistic,
    check_statistic,
    name_of,
)
from comppo.computation.support import DEFAULT_LAYERS, Layers, readable_layers
from comppo.errors import ConfigError, EvidenceError

STATISTICS: tuple[str, ...] = (*ATTENTION_STATISTICS, *ROUTER_STATISTICS, *TOKEN_STATISTICS)
"""Names that `read_computation` knows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Computation:
    """What the model computed while it emitted each response token: detached, float32, 0 at padding.

    Index t was read at the position that emits token t.
    """

    statistic: Float[Tensor, "rows tokens"]
    """The chosen statistic; those of attention and of routers are averaged over each layer's heads, then layers."""
    routing: Float[Tensor, "rows tokens layers heads"]
    """The statistic in each layer and head; the default statistic where it is not one of attention."""
    routed: Float[Tensor, "rows tokens layers summary"]
    """What attention reads of earlier positions, as `ComputationReader.routed`; no columns unless asked for."""
    sink_mass: Float[Tensor, "rows tokens"]
    """Attention on the sinks, mean over heads and layers, in [0, 1]."""
    visible_keys: Float[Tensor, "rows tokens"]
    """Keys the position may attend to, sinks included, mean over layers."""
    hidden: Float[Tensor, "rows tokens width"]
    """Hidden states of the chosen layers, concatenated."""
    logps: Float[Tensor, "rows tokens"]
    """Log-probabilities of the emitted tokens, nats."""
    entropies: Float[Tensor, "rows tokens"]
    """Entropies of the output distribution, nats."""
    mask: Bool[Tensor, "rows tokens"]
    """True where there is a token, false at padding."""
    layers: tuple[int, ...]
    """`layer_idx` of the layers in `routing` and `routed`, in their order."""


Statistic = str | AttentionStatistic | Callable[[Computation], Tensor]
"""A name from `STATISTICS`, a function of attention rows, or one of the computation (its `statistic` being the default)
to (rows, tokens).

A function that looks at `logps` knows the token that is emitted: it may weigh credit, but a gate or a critic made from
it is no longer a statement about the state before that token."""


def of_attention(statistic: Statistic) -> TypeGuard[str | AttentionStatistic]:
    """Whether a statistic is one of attention rows."""
    return isinstance(statistic, AttentionStatistic) or (
        isinstance(statistic, str) and statistic in ATTENTION_STATISTICS
    )


def of_routers(statistic: Statistic) -> TypeGuard[str]:
    """Whether a statistic is one of the routers of mixture-of-experts layers."""
    return isinstance(statistic, str) and statistic in ROUTER_STATISTICS


@torch.no_grad()
def read_computation(
    model: nn.Module,
    input_ids: Int[Tensor, "rows positions"],
    attention_mask: Shaped[Tensor, "rows positions"],
    completion_length: int,
    *,
    statistic: Statistic = DEFAULT_STATISTIC,
    layers: Layers = DEFAULT_LAYERS,
    heads: Heads = None,
    router_layers: Layers | None = None,
    sink_tokens: int = 1,
    hidden_layers: Sequence[int] = (-1,),
    routed_width: int = 0,
    temperature: float = 1.0,
    micro_batch_size: int | None = None,
    score: Score | None = None,
) -> Computation:
    """Read what `model` computes for responses that were already sampled, with one forward per micro-batch.

    The model runs in evaluation mode, as it did when it sampled, and gets its mode back. No attention matrix is made.

    Args:
        model: a causal language model of Transformers, wrapped by PEFT or DDP or not.
        input_ids: prompt and response; the response is the last `completion_length` columns.
        attention_mask: 1 or true where a token is real. Padding may stand on either side, not between real tokens.
        completion_length: C, at least 1 and less than the number of columns.
        statistic: a name from `STATISTICS`, an `AttentionStatistic`, or a callable of `Computation`.
        layers: a third, "all" or `layer_idx` numbers; () reads no attention and needs a statistic without it. With a
            statistic of routers, names mean what can be read: `routing` is empty, as for (), where the
            model has no readable attention.
        heads: None (all), "mean" or head numbers.
        router_layers: where a statistic of routers is read, as `layers` of `ComputationReader` says; None takes
            `layers`. Other statistics ignore it.
        sink_tokens: leading keys of each row that are left out as attention sink.
        hidden_layers: as in `ComputationReader`.
        routed_width: columns of `routed`; 0, which costs nothing, for none.
        temperature: that of sampling; divides the logits of the plain forward. `score` looks after its own.
        micro_batch_size: rows per forward; None takes all rows at once.
        score: `(model, input_ids, attention_mask, completion_length) -> (logps, entropies)`, which runs the model
            itself, once for each row it is given; None runs a plain forward.

    Returns:
        Everything with C tokens per row, aligned on the response.

    Raises:
        ConfigError: a setting is unknown or out of range.
        EvidenceError: the tensors do not fit, padding stands between tokens, a response has no prompt, or `score` ran
            the model for other rows than it was given.
        UnreadableModelError: a chosen layer cannot be read, or a statistic of routers finds none.
    """
    _check(input_ids, attention_mask, completion_length, temperature, micro_batch_size)
    if isinstance(statistic, str):
        check_statistic(statistic, STATISTICS)
    elif not isinstance(statistic, AttentionStatistic) and not callable(statistic):
        raise ConfigError(f"statistic={statistic!r}: pass one of {', '.join(STATISTICS)}, or a callable.")
    shown = statistic if of_attention(statistic) else DEFAULT_STATISTIC
    positions, routers = emitting_positions(completion_length), None
    if of_routers(statistic):
        # A reader of its own: routers and attention may be read in different layers.
        routers = _router_reader(model, statistic, layers if router_layers is None else router_layers, positions)
        if isinstance(layers, str) and not routed_width and not readable_layers(model):
            layers = ()
    reader = ComputationReader(
        model,
        statistics=(shown,),
        layers=layers,
        heads=heads,
        sink_tokens=sink_tokens,
        positions=positions,
        hidden_layers=hidden_layers,
        routed_width=routed_width,
    )
    if not reader.layers and (of_attention(statistic) or routed_width):
        what = f"routed_width={routed_width!r}" if routed_width else f"statistic={name_of(shown)!r}"
        raise ConfigError(f"{what} needs attention, but layers=() reads none: pass layers.")
    run = partial(score_plainly, temperature=temperature) if score is None else score
    scores = []
    with evaluation_mode(model), reader, routers or nullcontext():
        for start in range(0, input_ids.shape[0], micro_batch_size or input_ids.shape[0]):
            part = slice(start, start + (micro_batch_size or input_ids.shape[0]))
            scores.append(run(model, input_ids[part], attention_mask[part], completion_length))
    real = attention_mask.bool()
    read = _assemble(reader, shown, routed_width, scores, real, completion_length)
    return _with_statistic(read, statistic, reader, routers, real)


def _router_reader(model: nn.Module, statistic: str, layers: Layers, positions: slice) -> ComputationReader:
    if not len(layers):
        raise ConfigError(f"statistic={statistic!r} needs routers, but layers=() reads none: pass router_layers.")
    return ComputationReader(model, statistics=(statistic,), layers=layers, positions=positions)


def _assemble(
    reader: ComputationReader,
    shown: str | AttentionStatistic,
    routed_width: int,
    scores: list[tuple[Tensor, Tensor]],
    real: Tensor,
    completion_length: int,
) -> Computation:
    """Put the pieces together, with zeros at padding; `statistic` is the mean of `shown`."""
    mask = real[:, -completion_length:]
    logps, entropies = (torch.cat(parts) for parts in zip(*scores, strict=True))
    for name, values in (("logps", logps), ("entropies", entropies)):
        if values.shape != mask.shape:
            raise EvidenceError(f"score gave {name} of shape {tuple(values.shape)}: return {tuple(mask.shape)} in all.")
    if reader.layers:
        routing, visible = reader.statistic(shown), reader.visible_keys().mean(-1)
        summary, sink_mass = reader.summary(shown), reader.summary("sink_mass")
    else:
        routing = logps.new_zeros(*mask.shape, 0, 0, dtype=torch.float32)
        summary = sink_mass = torch.zeros_like(logps, dtype=torch.float32)
        visible = real.cumsum(-1)[:, -completion_length - 1 : -1].float()
    routed = reader.routed() if routed_width else routing.new_zeros(*routing.shape[:3], 0)
    hidden = reader.hidden() if reader.hidden_layers else logps.new_zeros(*mask.shape, 0, dtype=torch.float32)
    _check_rows(routing, mask)
    _check_rows(hidden, mask)
    clean = partial(_clean, mask=mask)
    return Computation(
        statistic=clean(summary),
        routing=clean(routing),
        routed=clean(routed),
        sink_mass=clean(sink_mass),
        visible_keys=clean(visible),
        hidden=clean(hidden),
        logps=clean(logps),
        entropies=clean(entropies),
        mask=mask,
        layers=reader.layers,
    )


def _clean(values: Tensor, mask: Tensor) -> Tensor:
    """Detached, float32, 0 at padding."""
    values = values.detach().float()
    return torch.where(mask.view(*mask.shape, *(1,) * (values.ndim - 2)), values, 0.0)


def _check_rows(values: Tensor, mask: Tensor) -> None:
    if values.shape[0] != mask.shape[0]:
        raise EvidenceError(
            f"{values.shape[0]} rows went through the model, but {mask.shape[0]} were to be read: score must run "
            "the model once for each row it is given."
        )


def _with_statistic(
    read: Computation,
    statistic: Statistic,
    reader: ComputationReader,
    routers: ComputationReader | None,
    real: Tensor,
) -> Computation:
    """`read` with the statistic that was asked for."""
    values: object = read.statistic
    if of_routers(statistic) and routers is not None:
        summary = routers.summary(statistic)
        _check_rows(summary, read.mask)
        values = summary
    elif statistic == "output_entropy":
        values = read.entropies
    elif statistic == "hidden_change":
        # The change is that from the position before the emitting one, which must be a token as well.
        tokens = read.mask.shape[1]
        before = torch.nn.functional.pad(real, (1, 0))[:, -tokens - 2 : -2]
        values = torch.where(before, reader.hidden_change(), 0.0)
    elif callable(statistic):
        values = statistic(read)
    if not isinstance(values, Tensor) or values.shape != read.mask.shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"the statistic's callable gave {got}: return a tensor of shape {tuple(read.mask.shape)}.")
    values = _clean(values, read.mask)
    if not isinstance(statistic, str) and not bool(values.isfinite().all()):
        raise ConfigError("the statistic's callable gave values that are not finite at response tokens.")
    return replace(read, statistic=values)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's previous mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(
    input_ids: Tensor, attention_mask: Tensor, completion_length: int, temperature: float, micro_batch_size: int | None
) -> None:
    if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape or not input_ids.shape[0]:
        raise EvidenceError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}: pass two equal "
            "shapes (rows, prompt + completion) with at least one row."
        )
    if not 1 <= completion_length < input_ids.shape[1]:
        raise EvidenceError(
            f"completion_length={completion_length} does not fit {input_ids.shape[1]} columns: at least one token and "
            "one prompt position are needed."
        )
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature!r}: pass a positive number; greedy sampling has no distribution.")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size={micro_batch_size!r}: pass a positive number of rows, or None.")
    real = attention_mask.bool()
    starts = (real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]).sum(-1)
    if bool((starts > 1).any()):
        raise EvidenceError(
            f"rows {torch.nonzero(starts > 1).flatten().tolist()} have padding between tokens: pad prompts on the left "
            "and responses on the right."
        )
    promptless = real[:, -completion_length:].any(-1) & ~real[:, -completion_length - 1]
    if bool(promptless.any()):
        raise EvidenceError(
            f"rows {torch.nonzero(promptless).flatten().tolist()} have a response without a prompt token right before "
            "it, so no position emits its first token: begin each prompt with at least a BOS token."
        )
