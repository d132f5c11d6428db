"""Group-relative credit: one number per response, given to each of its tokens (GRPO, Dr. GRPO, RLOO)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import ConfigError
from comppo.transport._checks import (
    outcomes,
    require_choice,
    require_finite,
    require_groups,
    require_shapes,
    trained,
)
from comppo.transport.kernel import transport_kernel
from comppo.types import Credit, Evidence

Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
BASELINES = ("group_mean", "leave_one_out", "none")
SCALES = ("group", "batch", "none")

# Added to the standard deviation, as TRL 1.16 does: equal numbers are promised.
EPSILON = 1e-4


@torch.no_grad()
def group_residuals(
    response_rewards: Float[Tensor, " rows"],
    *,
    num_generations: int,
    baseline: Baseline = "group_mean",
    scale: Scale = "group",
    scorable: Bool[Tensor, " rows"] | None = None,
) -> Float[Tensor, " rows"]:
    """Outcome of each response minus its group's baseline, over a standard deviation.

    Args:
        response_rewards: outcome of each response, reward units; the responses to one prompt stand together.
        num_generations: responses per prompt.
        baseline: "group_mean" (GRPO), "leave_one_out" (the mean of the others, RLOO) or "none".
        scale: divide by the standard deviation (n - 1) of the group or of the batch plus 1e-4, or by nothing.
        scorable: false where no reward function could score the response: it counts nowhere and gets 0. None means
            all rows whose reward is not NaN, which is how TRL marks them.

    Returns:
        Residuals with the dtype of the rewards, detached: reward units, unitless if scaled. 0 where the baseline or the
        standard deviation is undefined because fewer than two responses could be scored.

    Raises:
        ConfigError: an unknown baseline or scale, or one response per prompt with a baseline or scale of its group.
        EvidenceError: shapes do not fit, or the reward of a scorable row is not finite.

    Source:
        GRPO: arXiv:2402.03300; without scale: arXiv:2503.20783; RLOO: arXiv:2402.14740.
    """
    _check_settings(num_generations, baseline, scale)
    rows = response_rewards.shape[0]
    require_groups(rows, num_generations)
    rewards = response_rewards.detach()
    scored = ~rewards.isnan() if scorable is None else scorable
    require_shapes(scored[:, None], rows={"response_rewards": response_rewards})
    require_finite("response_rewards", rewards, scored)
    rewards = torch.where(scored, rewards, torch.nan).view(-1, num_generations)
    residuals = rewards - _baselines(rewards, baseline)
    if scale == "group":
        residuals = residuals / (_deviation(rewards, dim=1) + EPSILON)
    elif scale == "batch":
        residuals = residuals / (_deviation(rewards.reshape(1, -1), dim=1) + EPSILON)
    return residuals.nan_to_num(nan=0.0).view(rows)


def _baselines(rewards: Tensor, baseline: str) -> Tensor:
    if baseline == "group_mean":
        return rewards.nanmean(dim=1, keepdim=True)
    if baseline == "none":
        return torch.zeros_like(rewards)
    others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1  # 0 / 0 is NaN: alone in its group, a row has no baseline
    return (rewards.nansum(dim=1, keepdim=True) - rewards) / others


def _deviation(rewards: Tensor, dim: int) -> Tensor:
    """Standard deviation (n - 1) of what is not NaN; NaN for fewer than two, 0 for a batch of a single row."""
    if rewards.numel() == 1:
        return torch.zeros_like(rewards)
    count = (~rewards.isnan()).sum(dim=dim, keepdim=True).to(rewards.dtype)
    squares = (rewards - rewards.nanmean(dim=dim, keepdim=True)).square()
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    return (squares.nanmean(dim=dim, keepdim=True) * correction).sqrt()


def _check_settings(num_generations: int, baseline: str, scale: str) -> None:
    require_choice("baseline", baseline, BASELINES)
    require_choice("scale", scale, SCALES)
    if num_generations == 1 and baseline != "none":
        raise ConfigError(
            f"baseline={baseline!r} needs several responses per prompt, got num_generations=1: sample more, use an "
            'operator with a critic ("gae", "comp_gae"), or set baseline="none".'
        )
    if num_generations == 1 and scale == "group":
        raise ConfigError(
            'scale="group" needs several responses per prompt, got num_generations=1: set scale="batch" or "none".'
        )


@torch.no_grad()
def group_relative(
    response_rewards: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    num_generations: int,
    baseline: Baseline = "group_mean",
    scale: Scale = "group",
    scorable: Bool[Tensor, " rows"] | None = None,
) -> Credit:
    """Give every token of a response the residual of its outcome.

    GRPO is group_mean with the group's scale, Dr. GRPO group_mean without, RLOO leave_one_out without.

    Args:
        response_rewards: outcome of each response, reward units.
        mask: true where the policy chose the token.
        num_generations: responses per prompt.
        baseline: see `group_residuals`.
        scale: see `group_residuals`.
        scorable: see `group_residuals`.

    Returns:
        Advantages: the residual at every unmasked token. Returns: the outcome itself, the Monte Carlo target without
        discount. Both 0 at masked slots and in rows that are not scorable.

    Raises:
        ConfigError: see `group_residuals`.
        EvidenceError: see `group_residuals`.

    Source:
        GRPO: arXiv:2402.03300, outcome supervision; as in TRL 1.16.
    """
    require_shapes(mask, rows={"response_rewards": response_rewards, "scorable": scorable})
    residuals = group_residuals(
        response_rewards, num_generations=num_generations, baseline=baseline, scale=scale, scorable=scorable
    )
    return Credit(
        advantages=torch.where(mask, residuals[:, None], 0),
        returns=outcome_targets(response_rewards, mask, scorable),
    )


def outcome_targets(response_rewards: Tensor, mask: Tensor, scorable: Tensor | None) -> Tensor:
    """The outcome at every unmasked token of a scorable row, else 0; shape (rows, tokens)."""
    rewards = response_rewards.detach()
    scored = ~rewards.isnan() if scorable is None else scorable
    return torch.where(mask & scored[:, None], rewards[:, None], 0)


def last_token(mask: Tensor) -> Tensor:
    """True at the last unmasked token of each row, shape (rows, tokens)."""
    seen = mask.cumsum(1)
    return mask & (seen == seen[:, -1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRelative:
    """`group_relative` as an operator. Needs no optional evidence but groups.

    Raises:
        ConfigError: baseline or scale is unknown.
    """

    baseline: Baseline = "group_mean"
    """What is subtracted: "group_mean", "leave_one_out" or "none"."""
    scale: Scale = "group"
    """What divides: the standard deviation of the "group" or the "batch", or "none"."""

    needs = frozenset[str]()

    def __post_init__(self) -> None:
        require_choice("baseline", self.baseline, BASELINES)
        require_choice("scale", self.scale, SCALES)

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages and critic targets; 0 in rows that are not scorable.

        Args:
            evidence: one batch, with the fields in `needs`.

        Returns:
            Credit of shape (rows, tokens), detached; 0 at masked slots.

        Raises:
            ConfigError: one response per prompt with a baseline or scale of its group.
            EvidenceError: the outcome of a scorable row is not finite.
        """
        return group_relative(
            outcomes(evidence),
            evidence.mask,
            num_generations=evidence.num_generations,
            baseline=self.baseline,
            scale=self.scale,
            scorable=evidence.scorable,
        )

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """The residual of the outcome, at the row's last unmasked token."""
        return terminal_residuals(evidence, self.baseline, self.scale)

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """K[t, u] = 1 for unmasked t <= u: nothing is lost on the way back."""
        return transport_kernel(torch.ones_like(evidence.rewards), trained(evidence))


def terminal_residuals(evidence: Evidence, baseline: Baseline, scale: Scale) -> Tensor:
    """`group_residuals` of `evidence`, at the last unmasked token of each row, shape (rows, tokens)."""
    residuals = group_residuals(
        outcomes(evidence),
        num_generations=evidence.num_generations,
        baseline=baseline,
        scale=scale,
        scorable=evidence.scorable,
    )
    return torch.where(last_token(evidence.mask), residuals[:, None], 0)
