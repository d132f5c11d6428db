"""Redistribution: a response's residual spread over its tokens in proportion to a statistic, sum preserved."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.transport._checks import (
    needed,
    outcomes,
    require_choice,
    require_finite,
    require_shapes,
    require_weights,
    trained,
)
from comppo.transport.broadcast import (
    BASELINES,
    SCALES,
    Baseline,
    Scale,
    group_residuals,
    outcome_targets,
    terminal_residuals,
)
from comppo.types import Credit, Evidence


@torch.no_grad()
def redistribute(
    residuals: Float[Tensor, " rows"],
    weights: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    negative_weights: Float[Tensor, "rows tokens"] | None = None,
) -> Float[Tensor, "rows tokens"]:
    """A_t = residual * n * w_t / sum(w) over the row's n unmasked tokens.

    The sum over the row is that of the broadcast, n * residual, and w = 1 is the broadcast. So are rows whose weights
    sum to 0. The scale of a row's weights does not matter.

    Args:
        residuals: what each response has to give, reward units.
        weights: non-negative share of each token, any scale, such as 1 - p or the surprisal of the emitted token.
        mask: true where the policy chose the token; whatever stands elsewhere is ignored.
        negative_weights: shares of negative residuals; None means `weights`.

    Returns:
        Advantages in reward units with the dtype of the residuals, detached; 0 at masked slots.

    Raises:
        EvidenceError: shapes differ, a residual is not finite, or a weight that is used is negative or not finite.

    Source:
        Ours; the spread of a return over steps is studied by RUDDER (arXiv:1806.07857).
    """
    require_shapes(mask, rows={"residuals": residuals}, weights=weights, negative_weights=negative_weights)
    residuals = residuals.detach()
    require_finite("residuals", residuals, mask.any(1))
    shares = token_shares(residuals, weights, mask, negative_weights)
    lengths = mask.sum(1, keepdim=True)
    return torch.where(mask, residuals[:, None] * (lengths * shares), 0).to(residuals.dtype)


def token_shares(residuals: Tensor, weights: Tensor | None, mask: Tensor, negative_weights: Tensor | None) -> Tensor:
    """Share of each token in its row's residual: sums to 1 over the row's unmasked tokens, 0 at masked slots."""
    chosen = signed_weights(residuals, weights, mask, negative_weights)
    totals = chosen.sum(1, keepdim=True)
    chosen = torch.where(totals > 0, chosen / totals, mask.to(chosen.dtype) / mask.sum(1, keepdim=True).clamp(min=1))
    return torch.where(mask, chosen, 0)


def signed_weights(residuals: Tensor, weights: Tensor | None, mask: Tensor, negative_weights: Tensor | None) -> Tensor:
    """Checked weights for the sign of each row's residual, largest 1 (or all 0), at least float32; 0 where masked."""
    for name, given in (("weights", weights), ("negative_weights", negative_weights)):
        if given is not None:
            require_weights(name, given, mask)
    positive = torch.ones_like(mask, dtype=residuals.dtype) if weights is None else weights.detach()
    negative = positive if negative_weights is None else negative_weights.detach()
    chosen = torch.where((residuals < 0)[:, None], negative, positive)
    chosen = torch.where(mask, chosen, 0).to(torch.promote_types(torch.float32, chosen.dtype))
    if not chosen.shape[1]:
        return chosen
    largest = chosen.amax(1, keepdim=True)  # so that very large or small weights have a representable sum
    return chosen / torch.where(largest > 0, largest, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribute:
    """`redistribute` of the group-relative residuals, as an operator. Needs weights.

    Raises:
        ConfigError: baseline or scale is unknown.
    """

    baseline: Baseline = "group_mean"
    """What is subtracted: "group_mean", "leave_one_out" or "none"."""
    scale: Scale = "group"
    """What divides: the standard deviation of the "group" or the "batch", or "none"."""

    needs = frozenset({"weights"})

    def __post_init__(self) -> None:
        require_choice("baseline", self.baseline, BASELINES)
        require_choice("scale", self.scale, SCALES)

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages, and as critic targets the outcome at every unmasked token; 0 in rows that are not scorable.

        Args:
            evidence: one batch, with the fields in `needs`.

        Returns:
            Credit of shape (rows, tokens), detached; 0 at masked slots.

        Raises:
            ConfigError: one response per prompt with a baseline or scale of its group.
            EvidenceError: weights are missing, negative or not finite, or the outcome of a scorable row is not finite.
        """
        rewards = outcomes(evidence)
        advantages = redistribute(
            self._residuals(evidence),
            needed(evidence, "weights", "Redistribute"),
            trained(evidence),
            negative_weights=evidence.negative_weights,
        )
        return Credit(advantages=advantages, returns=outcome_targets(rewards, evidence.mask, evidence.scorable))

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """The residual of the outcome, at the row's last unmasked token."""
        return terminal_residuals(evidence, self.baseline, self.scale)

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """K[t, u] = n_u * w_t / W_u for unmasked t <= u, where n_u and W_u count and sum the tokens up to u.

        What arrives at u is spread over the tokens up to u by the rule of `redistribute`, so w = 1 is the broadcast's
        kernel. The weights are those for the sign of the row's residual.
        """
        weights = needed(evidence, "weights", "Redistribute")
        mask = trained(evidence)
        with torch.no_grad():
            chosen = signed_weights(self._residuals(evidence), weights, mask, evidence.negative_weights)
            totals = chosen.cumsum(1)[:, None, :]
            counts = mask.cumsum(1)[:, None, :]
            spread = torch.where(totals > 0, counts * chosen[:, :, None] / totals, 1)
            return torch.where((mask[:, :, None] & mask[:, None, :]).triu(), spread, 0)

    def _residuals(self, evidence: Evidence) -> Tensor:
        return group_residuals(
            outcomes(evidence),
            num_generations=evidence.num_generations,
            baseline=self.baseline,
            scale=self.scale,
            scorable=evidence.scorable,
        )
