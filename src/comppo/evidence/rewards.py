"""Placement of rewards on tokens, and the baselines that a group of responses gives."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import EvidenceError
from comppo.evidence.rollout import last_trainable


def place_rewards(
    response_rewards: Float[Tensor, " rows"], mask: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens"]:
    """Put each response's reward on its last trainable token.

    Args:
        response_rewards: reward units; NaN is harmless in rows without a trainable token.
        mask: true at trainable tokens.

    Returns:
        Reward units, 0 elsewhere; rows without a trainable token get nothing.

    Raises:
        EvidenceError: there is not one reward per row.
    """
    if response_rewards.shape != mask.shape[:1]:
        raise EvidenceError(
            f"response_rewards has shape {tuple(response_rewards.shape)}, but mask has {mask.shape[0]} rows: "
            "pass one reward per row."
        )
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(positions == last_trainable(mask)[:, None], response_rewards[:, None], 0.0)


def move_to_trainable(
    token_rewards: Float[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens"]:
    """Move rewards that stand on masked slots to a token that is trained, so that none is lost.

    A reward on a masked slot (tool output, an observation) goes to the nearest earlier trainable token, which led
    to it, or to the first later one if none is earlier. The sum of every row is preserved.

    Args:
        token_rewards: reward units, at any slot; padding must hold 0.
        mask: true at trainable tokens.

    Returns:
        Reward units, 0 at masked slots; a row with no trainable token loses its rewards.

    Raises:
        EvidenceError: the shapes differ.
    """
    if token_rewards.shape != mask.shape:
        raise EvidenceError(
            f"token_rewards has shape {tuple(token_rewards.shape)}, but mask has {tuple(mask.shape)}: "
            "pass equal shapes."
        )
    tokens = mask.shape[1]
    if tokens == 0:
        return token_rewards.clone()
    positions = torch.arange(tokens, device=mask.device)
    earlier = torch.where(mask, positions, -1).cummax(dim=1).values
    first = torch.where(mask, positions, tokens).amin(dim=1, keepdim=True)
    target = torch.where(earlier >= 0, earlier, first)
    # A row without a trainable token sends everything to a slot that is cut off.
    moved = token_rewards.new_zeros(mask.shape[0], tokens + 1).scatter_add(1, target, token_rewards)
    return moved[:, :tokens]


def leave_one_out_mean(
    response_rewards: Float[Tensor, " rows"],
    num_generations: int,
    scorable: Bool[Tensor, " rows"] | None = None,
    *,
    default: float,
) -> Float[Tensor, " rows"]:
    """Mean reward of the *other* scorable responses to the same prompt: a baseline that one's own outcome never moves.

    Args:
        response_rewards: reward units; whatever stands at unscorable rows is ignored.
        num_generations: responses per prompt, next to each other.
        scorable: false where no reward function could score the response; None: false where the reward is NaN.
        default: reward units, where the group has no other scorable response (for example the running mean reward).

    Returns:
        Reward units, for unscorable rows too.

    Raises:
        EvidenceError: `num_generations` does not divide the rows, or `scorable` has another shape.

    Source:
        REINFORCE leave-one-out (Kool, van Hoof, Welling 2019; arXiv:2402.14740).
    """
    rewards, valid = _grouped(response_rewards, num_generations, scorable)
    # Sums over the others, not the group's sum minus one's own: the latter loses digits when one reward is huge.
    others = 1.0 - torch.eye(num_generations, dtype=rewards.dtype, device=rewards.device)
    return _mean_or(rewards @ others, valid @ others, default).reshape(-1)


def group_mean(
    response_rewards: Float[Tensor, " rows"],
    num_generations: int,
    scorable: Bool[Tensor, " rows"] | None = None,
    *,
    default: float,
) -> Float[Tensor, " rows"]:
    """Mean reward of all scorable responses to the same prompt, repeated for each of them.

    Args:
        response_rewards: reward units; whatever stands at unscorable rows is ignored.
        num_generations: responses per prompt, next to each other.
        scorable: false where no reward function could score the response; None: false where the reward is NaN.
        default: reward units, where the group has no scorable response.

    Returns:
        Reward units.

    Raises:
        EvidenceError: `num_generations` does not divide the rows, or `scorable` has another shape.
    """
    rewards, valid = _grouped(response_rewards, num_generations, scorable)
    means = _mean_or(rewards.sum(dim=1), valid.sum(dim=1), default)
    return means.repeat_interleave(num_generations)


def _grouped(rewards: Tensor, num_generations: int, scorable: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards (0 where unscorable) and validity (1 or 0), both (groups, num_generations)."""
    if num_generations < 1 or rewards.shape[0] % num_generations:
        raise EvidenceError(
            f"num_generations={num_generations} does not divide the {rewards.shape[0]} rows: "
            "pass whole groups of responses."
        )
    if scorable is None:
        scorable = ~rewards.isnan()
    elif scorable.shape != rewards.shape:
        raise EvidenceError(
            f"scorable has shape {tuple(scorable.shape)}, but there are {rewards.shape[0]} rows: pass one per row."
        )
    rewards = torch.where(scorable, rewards, 0.0)
    return rewards.view(-1, num_generations), scorable.to(rewards.dtype).view(-1, num_generations)


def _mean_or(sums: Tensor, counts: Tensor, default: float) -> Tensor:
    return torch.where(counts > 0, sums / counts.clamp(min=1), default)
