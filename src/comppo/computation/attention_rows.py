"""What is known of attention rows once they are reduced, and the conventions that every reduction shares."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

MASKED = -1e30  # a finite score whose exponential is exactly 0: with -inf, 0 * inf would make NaN
LOWEST_MAXIMUM = -1e29  # above MASKED: tells a row without keys from one with keys
INVISIBLE = -1e4  # an additive mask at or below this hides the key; half precision's lowest value is -65504
INVISIBLE_SCORE = -9e3  # the same for a score to which such a mask was added already

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) -> bool, all of them 0-dimensional indices into the tensors of the call: FlexAttention's."""
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, row, head, query, key) -> score, 0-dimensional, as FlexAttention's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionStatistics:
    """Reductions of each attention row; float32 (float64 for float64 inputs); 0 where a row has no key to speak of,
    NaN where a visible key's score is no number.

    Fields that begin with `rest_` leave the sink keys out and renormalise over the others. A learned sink logit
    (`s_aux`) is never part of a distribution: it counts in `sink_mass` alone.
    """

    collision: Float[Tensor, "rows heads tokens"]
    """sum p^2, unitless, in [1 / visible_keys, 1]."""
    maximum: Float[Tensor, "rows heads tokens"]
    """Greatest p, unitless."""
    visible_keys: Float[Tensor, "rows heads tokens"]
    """Keys the query may attend to, sinks included."""
    sink_mass: Float[Tensor, "rows heads tokens"]
    """Probability on the sink keys and on the learned sink, unitless; 0 without sinks."""
    rest_collision: Float[Tensor, "rows heads tokens"]
    rest_maximum: Float[Tensor, "rows heads tokens"]
    rest_visible_keys: Float[Tensor, "rows heads tokens"]
    entropy: Float[Tensor, "rows heads tokens"] | None = None
    """-sum p log p, nats, in [0, log visible_keys]; None where it was not asked for, as the next four."""
    rest_entropy: Float[Tensor, "rows heads tokens"] | None = None
    distance: Float[Tensor, "rows heads tokens"] | None = None
    """sum p_j (i - j), keys between the query and where it looks, in tokens."""
    rest_distance: Float[Tensor, "rows heads tokens"] | None = None
    rest_features: Float[Tensor, "rows heads tokens width"] | None = None
    """sum p_j features_j: what the row reads of its keys' features."""


def joined(parts: list[AttentionStatistics], axis: int) -> AttentionStatistics:
    """Statistics of several parts as one, along an axis counted from the left: 0 rows, 2 tokens."""
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(AttentionStatistics) if getattr(parts[0], f.name) is not None]
    return AttentionStatistics(**{name: torch.cat([getattr(part, name) for part in parts], axis) for name in names})
