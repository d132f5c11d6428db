"""What both critics share: their inputs, and an output that starts at a baseline and stays in the reachable range."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from comppo.errors import ConfigError, EvidenceError

LEAST_SLOPE = 0.25
"""Of the range, per unit of raw output: how fast a value at least follows, clamped to the range."""

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes and returns the sum; every process calls it equally often."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CriticInputs:
    """What a critic may look at, aligned on the response's tokens.

    Raises:
        EvidenceError: a tensor's shape does not fit `mask`.
    """

    mask: Bool[Tensor, "rows tokens"]
    """True at trainable tokens."""
    baseline: Float[Tensor, " rows"] | None = None
    """Reward units: the group's leave-one-out mean; None means the critic's running mean reward."""
    features: Float[Tensor, "rows tokens features"] | None = None
    """From `build_features`; needed by the transport-aligned critic."""
    input_ids: Int[Tensor, "rows total"] | None = None
    """Prompt and response, needed by the standard critic; the response stands at the end, `total` > `tokens`."""
    attention_mask: Bool[Tensor, "rows total"] | Int[Tensor, "rows total"] | None = None
    """1 at real tokens of `input_ids`."""

    def __post_init__(self) -> None:
        if self.features is not None and self.features.shape[:2] != self.mask.shape:
            raise EvidenceError(
                f"features has shape {tuple(self.features.shape)}, but mask has {tuple(self.mask.shape)}: "
                "build both from one batch."
            )
        for name in ("baseline", "input_ids", "attention_mask"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] != self.mask.shape[0]:
                raise EvidenceError(
                    f"{name} has {tensor.shape[0]} rows, but mask has {self.mask.shape[0]}: pass one per response."
                )
        if (
            self.input_ids is not None
            and self.attention_mask is not None
            and self.input_ids.shape != self.attention_mask.shape
        ):
            raise EvidenceError(
                f"attention_mask has shape {tuple(self.attention_mask.shape)}, but input_ids has "
                f"{tuple(self.input_ids.shape)}: pass equal shapes."
            )

    def rows(self, selection: slice) -> "CriticInputs":
        """The same inputs for some of the responses."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[selection]

        return CriticInputs(
            mask=self.mask[selection],
            baseline=pick(self.baseline),
            features=pick(self.features),
            input_ids=pick(self.input_ids),
            attention_mask=pick(self.attention_mask),
        )


class Critic(nn.Module, ABC):
    """A value function whose predictions never leave the range of rewards that can be reached.

    With `u` the raw output, `V = b + (hi - b) tanh(relu(u)) - (b - lo) tanh(relu(-u))`: exactly the baseline `b` at
    u = 0, between `lo` and `hi` always. A side with less room than a quarter of the range gets that slope, clamped
    with a straight-through gradient: the lone failure of a group, whose baseline is `hi`, can still be learned from.
    `lo` and `hi` are set in the config or learned from `observe_rewards`, and always enclose 0, because a gated return
    can shrink to 0. All of it is saved in the state dict.

    Args:
        reward_min: least reachable return, reward units; None: learn it.
        reward_max: greatest reachable return, reward units; None: learn it.

    Raises:
        ConfigError: `reward_min` is above `reward_max`.
    """

    reward_low: Tensor
    reward_high: Tensor
    mean_reward: Tensor
    rewards_seen: Tensor
    skipped_updates: Tensor

    def __init__(self, reward_min: float | None = None, reward_max: float | None = None) -> None:
        super().__init__()
        if reward_min is not None and reward_max is not None and reward_min > reward_max:
            raise ConfigError(f"need reward_min <= reward_max, got {reward_min!r} and {reward_max!r}.")
        self._learns_low, self._learns_high = reward_min is None, reward_max is None
        self.register_buffer("reward_low", torch.tensor(min(reward_min or 0.0, 0.0), device="cpu"))
        self.register_buffer("reward_high", torch.tensor(max(reward_max or 0.0, 0.0), device="cpu"))
        self.register_buffer("mean_reward", torch.tensor(0.0, device="cpu"))
        self.register_buffer("rewards_seen", torch.tensor(0.0, device="cpu"))
        self.register_buffer("skipped_updates", torch.tensor(0, device="cpu"))

    @abstractmethod
    def forward(self, inputs: CriticInputs) -> Float[Tensor, "rows tokens"]:
        """V(s_t) in reward units, 0 at masked slots."""

    def observe_inputs(self, inputs: CriticInputs, all_reduce: AllReduce | None = None) -> None:
        """Take note of the inputs' scale, over all processes. Called by `fit_critic`; most critics need nothing."""

    @torch.no_grad()
    def observe_rewards(self, rewards: Float[Tensor, " rows"]) -> None:
        """Widen the reachable range and update the running mean reward.

        Args:
            rewards: outcomes in reward units, of *all* processes (gather them first); what is not finite is left out.
        """
        rewards = rewards.detach().to(self.mean_reward)
        rewards = rewards[rewards.isfinite()]
        if not len(rewards):
            return
        if self._learns_low:
            self.reward_low.copy_(torch.minimum(self.reward_low, rewards.min()))
        if self._learns_high:
            self.reward_high.copy_(torch.maximum(self.reward_high, rewards.max()))
        self.rewards_seen += len(rewards)
        self.mean_reward += (rewards - self.mean_reward).sum() / self.rewards_seen

    def bounded(self, raw: Float[Tensor, "rows tokens"], inputs: CriticInputs) -> Float[Tensor, "rows tokens"]:
        """Map the raw output into the reachable range, around the baseline; 0 at masked slots."""
        low, high = self.reward_low.to(raw), self.reward_high.to(raw)
        given = self.mean_reward.expand(raw.shape[0]) if inputs.baseline is None else inputs.baseline
        baseline = given.detach().to(raw)[:, None]
        # Before any reward was observed, a baseline made of rewards is all that is known of the range
        unseen = self.rewards_seen == 0
        low = torch.where(unseen & self._learns_low, torch.minimum(low, baseline), low)
        high = torch.where(unseen & self._learns_high, torch.maximum(high, baseline), high)
        baseline = baseline.clamp(low, high)
        raw = torch.where(inputs.mask, raw, 0.0)
        # Both relu branches have slope 0 at u = 0, where a zero-initialised critic would never learn: take the middle.
        width = (high - low).expand_as(raw)
        slope = torch.where(raw > 0, high - baseline, torch.where(raw < 0, baseline - low, width / 2))
        # A baseline on the edge of the range (all the others right, or wrong) leaves one side no room. What cannot move
        # the value must still be able to move u: the value is clamped, its gradient is not.
        free = baseline + torch.maximum(slope, LEAST_SLOPE * width) * raw.tanh()
        values = free.detach().clamp(low, high) + (free - free.detach())
        return torch.where(inputs.mask, values, 0.0)
