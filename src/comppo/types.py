"""What every layer speaks of: the axis legend, `Evidence` and `Credit`. Needs torch and jaxtyping only.

Axis legend (names in jaxtyping shapes, all over the package):

- `rows` (B): responses; the `num_generations` responses to one prompt stand next to each other.
- `tokens` (T): response positions, padding included. Index t is the token `y_t`, sampled from the position before it.
- `keys`: positions a query can attend to.
- `layers`, `heads`, `features`, `width`: as in the model.

One index for everything: `logps`, `values`, `gates`, statistics and hidden states at index t are all read at the
forward position that emits `y_t`. A `mask` is true where the policy chose the token and it is trained; padding, tool
output and observations are false and transparent: removing them changes nothing elsewhere.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.errors import EvidenceError


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for sums over many tokens; float32 on devices that have no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Everything a transport operator may look at, aligned on the response's tokens.

    Raises:
        EvidenceError: a tensor's shape does not fit `mask`, or `num_generations` does not divide the rows.
    """

    rewards: Float[Tensor, "rows tokens"]
    """Reward units, on the token that earned them. Whatever stands at masked slots is ignored."""
    mask: Bool[Tensor, "rows tokens"]
    """True where the policy chose the token and it is trained."""
    response_rewards: Float[Tensor, " rows"] | None = None
    """Outcome of each response, reward units; None means the sum of `rewards` over `mask`."""
    scorable: Bool[Tensor, " rows"] | None = None
    """False where no reward function could score the response: it gets no credit and counts in no baseline."""
    values: Float[Tensor, "rows tokens"] | None = None
    """V(s_t), reward units."""
    gates: Float[Tensor, "rows tokens"] | None = None
    """Share of later credit that token t keeps, unitless, in [0, 1]."""
    bootstrap_values: Float[Tensor, " rows"] | None = None
    """V(s_T) of responses that were cut off, reward units; 0 where the response ended by itself."""
    completion_ids: Int[Tensor, "rows tokens"] | None = None
    """Token ids, for operators that compare responses."""
    weights: Float[Tensor, "rows tokens"] | None = None
    """Non-negative share of a positive terminal residual, any scale."""
    negative_weights: Float[Tensor, "rows tokens"] | None = None
    """The same for a negative residual; None means `weights`."""
    num_generations: int = 1
    """Responses per prompt."""

    def __post_init__(self) -> None:
        shape = self.mask.shape
        if self.mask.ndim != 2:
            raise EvidenceError(f"mask must be (rows, tokens), got shape {tuple(shape)}.")
        for name in ("rewards", "values", "gates", "completion_ids", "weights", "negative_weights"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise EvidenceError(
                    f"{name} has shape {tuple(tensor.shape)}, but mask has {tuple(shape)}: pass equal shapes."
                )
        for name in ("response_rewards", "scorable", "bootstrap_values"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape[:1]:
                raise EvidenceError(
                    f"{name} has shape {tuple(tensor.shape)}, but there are {shape[0]} rows: pass one per row."
                )
        if self.num_generations < 1 or shape[0] % self.num_generations:
            raise EvidenceError(
                f"num_generations={self.num_generations} does not divide the {shape[0]} rows: "
                "pass whole groups of responses."
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Credit:
    """What a transport operator gives back."""

    advantages: Float[Tensor, "rows tokens"]
    """Reward units (before whitening); 0 at masked slots."""
    returns: Float[Tensor, "rows tokens"]
    """The critic's target under the same operator, reward units; 0 at masked slots."""


@runtime_checkable
class TransportOperator(Protocol):
    """Turns evidence into one advantage per token: causal, linear in the deltas, detached.

    `advantages = kernel @ deltas`, row by row, holds for every operator.
    """

    needs: frozenset[str]
    """Names of the optional `Evidence` fields that must be there."""

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages and critic targets for `evidence`."""

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """What is carried: TD errors, or the terminal residual; 0 at masked slots."""

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """How it is carried: K[b, t, u], share of the delta at u that reaches t; 0 for u < t and at masked slots."""
