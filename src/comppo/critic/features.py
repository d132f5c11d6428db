"""What a critic may know about the state of each response token: detached, causal, indifferent to padding.

State `s_t` is what is known before `y_t` is emitted. Hidden state, routing, statistic and output entropy at index t are
read at the emitting position, so they are known; the log-probability of `y_t` is not, and only those of earlier
trainable tokens enter. Masked tokens are skipped: "previous", "so far" and the position count trainable tokens only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError

SURPRISING_NATS = 0.3
"""A token this improbable (p < .74) counts as a decision rather than as copying."""
_MOST_NATS = 20.0
"""Ceiling of one token's surprisal, so that a probability of 0 stays a number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateSources:
    """The tensors that features are built from; None where the caller has none."""

    mask: Bool[Tensor, "rows tokens"]
    """True at trainable tokens."""
    max_length: int
    """Greatest response length in tokens."""
    logps: Float[Tensor, "rows tokens"] | None = None
    """Log-probability of the emitted token under the behaviour policy, nats."""
    entropies: Float[Tensor, "rows tokens"] | None = None
    """Entropy of the output distribution that `y_t` is drawn from, nats."""
    hidden: Float[Tensor, "rows tokens width"] | None = None
    """Hidden state at the emitting position, any scale."""
    routing: Float[Tensor, "rows tokens *channels"] | None = None
    """Statistic of every layer and head, any further axes."""
    statistic: Float[Tensor, "rows tokens"] | None = None
    """The scalar statistic per token."""
    group_mean: Float[Tensor, " rows"] | None = None
    """Leave-one-out mean reward of the group; None where there is no group."""


def build_features(
    names: Sequence[str],
    *,
    mask: Bool[Tensor, "rows tokens"],
    logps: Float[Tensor, "rows tokens"] | None = None,
    entropies: Float[Tensor, "rows tokens"] | None = None,
    hidden: Float[Tensor, "rows tokens width"] | None = None,
    routing: Float[Tensor, "rows tokens *channels"] | None = None,
    statistic: Float[Tensor, "rows tokens"] | None = None,
    group_mean: Float[Tensor, " rows"] | None = None,
    max_length: int,
) -> Float[Tensor, "rows tokens features"]:
    """State features of each response token, in the order of `names`.

    Args:
        names: keys of `FEATURES`.
        mask: true at trainable tokens; whatever stands elsewhere in the other tensors (NaN too) is ignored.
        logps: log-probability of each emitted token under the behaviour policy, nats.
        entropies: entropy of the distribution each token was drawn from, nats.
        hidden: actor's hidden state at the emitting position.
        routing: statistic of every layer and head, with any axes after the tokens.
        statistic: scalar statistic per token.
        group_mean: leave-one-out mean reward per response; None (no group) gives 0.
        max_length: greatest response length in tokens, at least 1.

    Returns:
        float32, without gradient, 0 at masked slots.

    Raises:
        ConfigError: a name is unknown or repeated, a feature's source is missing, or `max_length` is below 1.
        EvidenceError: a source's shape does not fit `mask`.
    """
    check_feature_names(names)
    if max_length < 1:
        raise ConfigError(f"max_length={max_length!r} must be at least 1: pass the greatest response length in tokens.")
    for name, tensor in (
        ("logps", logps), ("entropies", entropies), ("hidden", hidden), ("routing", routing), ("statistic", statistic),
    ):  # fmt: skip
        if tensor is not None and tensor.shape[:2] != mask.shape:
            raise EvidenceError(
                f"{name} has shape {tuple(tensor.shape)}, but mask has {tuple(mask.shape)}: align it on the response."
            )
    if group_mean is not None and group_mean.shape != mask.shape[:1]:
        raise EvidenceError(
            f"group_mean has shape {tuple(group_mean.shape)}, but there are {mask.shape[0]} rows: pass one per row."
        )
    sources = StateSources(
        mask=mask, max_length=max_length, logps=logps, entropies=entropies, hidden=hidden, routing=routing,
        statistic=statistic, group_mean=group_mean,
    )  # fmt: skip
    with torch.no_grad():
        blocks = [FEATURES[name](sources) for name in names]
        return torch.where(mask[..., None], torch.cat(blocks, dim=-1), 0.0)


def check_feature_names(names: Sequence[str]) -> None:
    """Raise ConfigError where a name is unknown or repeated, or there is none."""
    unknown = [name for name in names if name not in FEATURES]
    if unknown or not names or len(set(names)) != len(names):
        what = f"unknown: {', '.join(unknown)}" if unknown else "empty or repeated"
        raise ConfigError(f"features={tuple(names)!r} ({what}). Choose each at most once from: {', '.join(FEATURES)}.")


def feature_widths(
    names: Sequence[str], *, hidden_width: int | None = None, routing_channels: int | None = None
) -> dict[str, int]:
    """Number of columns of each feature, in order: what a critic's head must be built for.

    Args:
        names: keys of `FEATURES`.
        hidden_width: size of the actor's hidden state; needed for "hidden".
        routing_channels: layers times heads (times statistics); needed for "routing".

    Returns:
        Name to number of columns.

    Raises:
        ConfigError: a name is unknown or repeated, or a size is missing.
    """
    check_feature_names(names)
    known = {"hidden": hidden_width, "routing": routing_channels}
    known |= {"statistic": 1, "surprisal": 4, "entropy": 2, "position": 2, "group_mean": 1}
    widths = {}
    for name in names:
        width = known[name]
        if width is None:
            argument = "hidden_width" if name == "hidden" else "routing_channels"
            raise ConfigError(f"feature {name!r} needs {argument}, got None: pass it, or leave the feature out.")
        widths[name] = width
    return widths


def _source(sources: StateSources, name: str, feature: str) -> Tensor:
    """A source in float32 with 0 at masked slots, (rows, tokens, channels)."""
    tensor: Tensor | None = getattr(sources, name)
    if tensor is None:
        raise ConfigError(f"feature {feature!r} needs {name}, got None: pass it, or leave the feature out.")
    tensor = tensor.detach().float()
    tensor = tensor[..., None] if tensor.ndim == 2 else tensor.flatten(start_dim=2)
    return torch.where(sources.mask[..., None], tensor, 0.0)


def _previous(values: Tensor, mask: Tensor) -> Tensor:
    """Values at the last trainable token before each slot, 0 where there is none; (rows, tokens, channels)."""
    positions = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1)
    latest = torch.cat([positions.new_full((mask.shape[0], 1), -1), positions[:, :-1]], dim=1).cummax(dim=1).values
    gathered = values.gather(1, latest.clamp(min=0)[..., None].expand_as(values))
    return torch.where((latest >= 0)[..., None], gathered, 0.0)


def _tokens_before(mask: Tensor) -> Tensor:
    """Number of trainable tokens before each slot, float32 (rows, tokens)."""
    return (mask.long().cumsum(dim=1) - mask.long()).float()


def _hidden(sources: StateSources) -> Tensor:
    """Scale-free: layer-normalised, without learned parameters."""
    hidden = _source(sources, "hidden", "hidden")
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])


def _surprisal(sources: StateSources) -> Tensor:
    """Of the tokens emitted so far: the last one's surprisal, its mean and maximum, log1p of how many surprised."""
    surprisal = -_source(sources, "logps", "surprisal").clamp(-_MOST_NATS, 0.0)
    surprising = (surprisal > SURPRISING_NATS).float()
    emitted = sources.mask.float().cumsum(dim=1)[..., None].clamp(min=1)
    mean = surprisal.cumsum(dim=1) / emitted
    maximum = surprisal.cummax(dim=1).values
    # Each running figure includes its own token, so one shift over trainable tokens makes all four causal.
    return _previous(torch.cat([surprisal, mean, maximum, surprising.cumsum(dim=1).log1p()], dim=-1), sources.mask)


def _entropy(sources: StateSources) -> Tensor:
    entropies = _source(sources, "entropies", "entropy")
    return torch.cat([entropies, _previous(entropies, sources.mask)], dim=-1)


def _position(sources: StateSources) -> Tensor:
    before = _tokens_before(sources.mask)
    return torch.stack([before / sources.max_length, before.log1p()], dim=-1)


def _group_mean(sources: StateSources) -> Tensor:
    rows, tokens = sources.mask.shape
    if sources.group_mean is None:
        return torch.zeros(rows, tokens, 1, device=sources.mask.device)
    return sources.group_mean.detach().float()[:, None, None].expand(rows, tokens, 1)


FEATURES: dict[str, Callable[[StateSources], Tensor]] = {
    "hidden": _hidden,
    "routing": lambda sources: _source(sources, "routing", "routing"),
    "statistic": lambda sources: _source(sources, "statistic", "statistic"),
    "surprisal": _surprisal,
    "entropy": _entropy,
    "position": _position,
    "group_mean": _group_mean,
}
"""Feature name to the function that builds its columns."""
