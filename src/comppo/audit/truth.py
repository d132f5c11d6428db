"""True advantages from the values of prefixes, with their own standard errors and reliability."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.errors import EvidenceError

PRIOR = 1.0
"""Observations that the mean variance of all states counts for in the variance of one state. Without it, a state whose
few continuations were all right would have a standard error of 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrueAdvantages:
    """Monte-Carlo advantages of the tokens of some responses; float64, 0 where `mask` is false.

    Where not every state is valued, the credit of a segment (from one valued state to the next) is known, and is spread
    evenly over its tokens: the sum over a segment is its credit, and that over a response is outcome - V_0.
    """

    advantages: Float[Tensor, "rows tokens"]
    """Reward units."""
    standard_errors: Float[Tensor, "rows tokens"]
    """Of `advantages`, from the spread of the continuations, reward units."""
    first_half: Float[Tensor, "rows tokens"]
    """The same from the first half of the continuations."""
    second_half: Float[Tensor, "rows tokens"]
    """And from the second."""
    segments: Int[Tensor, "rows tokens"]
    """Number of each token's segment within its response; -1 where `mask` is false."""
    mask: Bool[Tensor, "rows tokens"]
    """False at padding and in responses of which a state was not valued."""
    values: Float[Tensor, "rows states"]
    """V of each valued state, reward units; NaN where there is none."""
    value_errors: Float[Tensor, "rows states"]
    """Standard errors of `values`."""


def true_advantages(
    positions: Int[Tensor, "rows states"],
    rewards: Float[Tensor, "rows states continuations"],
    outcomes: Float[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
) -> TrueAdvantages:
    """A_t = V(s_{t+1}) - V(s_t), and outcome - V(s_t) at the end, where V is the mean over continuations.

    The variance of a state's rewards is drawn towards the mean variance of all states with the weight of `PRIOR`
    observations. Errors of values are independent; those of neighbouring advantages share a value and are not.

    Args:
        positions: response tokens before each valued state, rising from 0; -1 where a response has no further state.
        rewards: of the continuations of each state, reward units; NaN where unscorable or not sampled.
        outcomes: reward of each response itself; NaN: unscorable, and the response is left out.
        lengths: tokens of each response, at least 1.

    Returns:
        Advantages of max(lengths) tokens per row.

    Raises:
        EvidenceError: shapes differ, fewer than four continuations, or a response is not valued at its start.
    """
    if rewards.shape[:2] != positions.shape or outcomes.shape != positions.shape[:1] or lengths.shape != outcomes.shape:
        raise EvidenceError(
            f"positions {tuple(positions.shape)}, rewards {tuple(rewards.shape)}, outcomes {tuple(outcomes.shape)} and "
            f"lengths {tuple(lengths.shape)} do not fit: see PrefixRewards."
        )
    if rewards.shape[2] < 4:
        raise EvidenceError(f"there are {rewards.shape[2]} continuations per state: two halves need at least 4.")
    if not bool((positions[:, 0] == 0).all()):
        raise EvidenceError("positions must start with 0 in every row: the prompt is a state too.")
    rewards, outcomes = rewards.double(), outcomes.double()
    half = rewards.shape[2] // 2
    values, errors = rewards.nanmean(2), _value_errors(rewards)
    halves = rewards[..., :half].nanmean(2), rewards[..., half:].nanmean(2)
    layout = _Layout.of(positions, lengths, (values + halves[0] + halves[1]).isnan(), outcomes)
    ends = torch.zeros_like(outcomes)
    return TrueAdvantages(
        advantages=layout.spread(layout.differences(values, outcomes)),
        standard_errors=layout.spread((errors.square() + layout.next_state(errors.square(), ends)).sqrt()),
        first_half=layout.spread(layout.differences(halves[0], outcomes)),
        second_half=layout.spread(layout.differences(halves[1], outcomes)),
        segments=torch.where(layout.mask, layout.segments, -1),
        mask=layout.mask,
        values=values,
        value_errors=errors,
    )


def _value_errors(rewards: Tensor) -> Tensor:
    """Standard error of each state's mean reward; NaN where there is none."""
    count = (~rewards.isnan()).sum(2)
    deviations = (rewards - rewards.nanmean(2, keepdim=True)).square().nansum(2)
    degrees = (count - 1).clamp(min=0)
    pooled = deviations.sum() / degrees.sum().clamp(min=1)
    variance = (deviations + PRIOR * pooled) / (degrees + PRIOR)
    return torch.where(count > 0, (variance / count.clamp(min=1)).sqrt(), torch.nan)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where states and tokens stand."""

    last: Bool[Tensor, "rows states"]
    segments: Int[Tensor, "rows tokens"]
    sizes: Float[Tensor, "rows states"]
    mask: Bool[Tensor, "rows tokens"]

    @classmethod
    def of(cls, positions: Tensor, lengths: Tensor, unknown: Tensor, outcomes: Tensor) -> "_Layout":
        token = torch.arange(int(lengths.max()), device=positions.device)
        exists = positions >= 0
        segments = ((positions[:, None, :] <= token[None, :, None]) & exists[:, None, :]).sum(2) - 1
        inside = token < lengths[:, None]
        complete = ~(unknown & exists).any(1) & ~outcomes.isnan()
        sizes = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
        sizes.scatter_add_(1, segments, inside.double())
        state = torch.arange(positions.shape[1], device=positions.device)
        last = state == exists.sum(1, keepdim=True) - 1
        return cls(last, segments, sizes, inside & complete[:, None])

    def next_state(self, states: Tensor, at_end: Tensor) -> Tensor:
        """What stands at the following state; `at_end` after the last one."""
        following = torch.cat((states[:, 1:], states[:, :1]), 1)
        return torch.where(self.last, at_end[:, None], following)

    def differences(self, values: Tensor, outcomes: Tensor) -> Tensor:
        return self.next_state(values, outcomes) - values

    def spread(self, states: Tensor) -> Tensor:
        """An even share of each segment's number for each of its tokens; 0 outside the mask."""
        share = (states / self.sizes.clamp(min=1)).gather(1, self.segments)
        return torch.where(self.mask, share, 0.0)
