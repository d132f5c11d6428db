"""Fitting a critic to returns: full-batch steps that do not depend on micro-batches or on the number of processes."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from comppo.critic.bounded import AllReduce, Critic, CriticInputs
from comppo.critic.head import CriticConfig
from comppo.errors import ConfigError, EvidenceError
from comppo.types import accumulation_dtype

ADAM_EPSILON = 1e-5
"""As PPO implementations have it. With 1e-8 a parameter whose gradient is rounding noise moves by the full rate, and
runs on one process and on several drift apart."""
_BUCKET = 1 << 24
"""Gradient entries summed in one reduction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What one call of `fit_critic` did; the same in every process."""

    loss_before: float
    """Half the mean squared error over all trainable tokens before the fit, squared reward units."""
    loss_after: float
    """The same afterwards."""
    explained_variance: float
    """Share of the returns' variance that the values explained *before* this fit, so on outcomes not yet seen."""
    grad_norm: float
    """Largest gradient norm before clipping; 0 where no step was made."""
    steps: int
    """Optimiser steps made."""
    skipped: int
    """Optimiser steps left out."""
    skip_reason: str | None
    """Why, where steps were left out."""


def critic_optimizer(critic: nn.Module, config: CriticConfig) -> torch.optim.AdamW:
    """AdamW over the critic's trainable parameters, with the config's learning rate and weight decay."""
    parameters = [p for p in critic.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, eps=ADAM_EPSILON)


def explained_variance(
    values: Float[Tensor, "rows tokens"],
    returns: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    all_reduce: AllReduce | None = None,
) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the trainable tokens of all processes.

    Args:
        values: reward units; ignored at masked slots.
        returns: reward units; ignored at masked slots.
        mask: true at trainable tokens.
        all_reduce: sums a small tensor over processes; called exactly twice.

    Returns:
        Unitless, at most 1. 0 where it is undefined: constant returns, no token, or an entry that is not finite.
    """
    reduce = all_reduce or (lambda tensor: tensor)
    wide = accumulation_dtype(returns)
    targets = torch.where(mask, returns, 0.0).to(wide)
    errors = targets - torch.where(mask, values, 0.0).to(wide)
    sums = reduce(torch.stack([targets.sum(), errors.sum(), mask.sum().to(wide), targets.square().sum()]))
    means = sums[:2] / sums[2].clamp(min=1)
    target_spread = torch.where(mask, targets - means[0], 0.0).square().sum()
    error_spread = torch.where(mask, errors - means[1], 0.0).square().sum()
    spreads = reduce(torch.stack([target_spread, error_spread]))
    noise = float(sums[3]) * torch.finfo(returns.dtype).eps ** 2
    if not bool(spreads.isfinite().all()) or float(spreads[0]) <= noise:
        return 0.0
    return 1.0 - float(spreads[1]) / float(spreads[0])


def fit_critic(
    critic: Critic,
    optimizer: torch.optim.Optimizer,
    inputs: CriticInputs,
    returns: Float[Tensor, "rows tokens"],
    *,
    epochs: int,
    gradient_clip: float,
    micro_batch_size: int | None = None,
    all_reduce: AllReduce | None = None,
    max_skips: int = 10,
) -> FitReport:
    """Regress the critic on `returns` with one full-batch optimiser step per epoch.

    The loss is divided by the number of trainable tokens of all processes, and gradients are summed over micro-batches
    and processes before the one clip and step: one micro-batch or many, one process or several, give the same critic up
    to rounding. Every process makes the same reductions, with masked rows or no rows at all, too. The critic must be
    neither sharded nor wrapped for data parallelism, and equal in all processes.

    Where the targets, the loss or the gradient are not finite, the step is left out, the critic keeps its parameters,
    and the rest of the fit is dropped (it would meet the same numbers again).

    Args:
        critic: both critics of this package, or another subclass.
        optimizer: over the critic's parameters, for example from `critic_optimizer`.
        inputs: this process's responses.
        returns: targets, reward units; ignored at masked slots, treated as constant.
        epochs: optimiser steps.
        gradient_clip: greatest gradient norm.
        micro_batch_size: responses per forward pass; None: all.
        all_reduce: sums a tensor over processes; None: this process alone.
        max_skips: consecutive calls with skipped steps after which an error is raised instead.

    Returns:
        Losses, explained variance before the fit, gradient norm and what was skipped, over all processes.

    Raises:
        ConfigError: a number is out of range.
        EvidenceError: `returns` has another shape than the mask, or more than `max_skips` calls in a row were skipped.
    """
    if epochs < 1 or not gradient_clip > 0 or (micro_batch_size is not None and micro_batch_size < 1) or max_skips < 0:
        raise ConfigError(
            "need epochs >= 1, gradient_clip > 0, micro_batch_size >= 1 (or None) and max_skips >= 0, got "
            f"{epochs=}, {gradient_clip=}, {micro_batch_size=}, {max_skips=}."
        )
    if returns.shape != inputs.mask.shape:
        raise EvidenceError(
            f"returns has shape {tuple(returns.shape)}, but mask has {tuple(inputs.mask.shape)}: pass equal shapes."
        )
    batch = _Batch(critic, inputs, returns.detach(), micro_batch_size, all_reduce or (lambda tensor: tensor))
    values = batch.values()
    explained = explained_variance(values, returns, inputs.mask, batch.reduce)
    loss_before = batch.loss(values)
    reason = batch.problem()
    steps, grad_norm = 0, 0.0
    if reason is None:
        critic.observe_inputs(inputs, all_reduce)
    while reason is None and steps < epochs:
        optimizer.zero_grad(set_to_none=True)
        loss = batch.backward()
        norm = float(nn.utils.clip_grad_norm_(critic.parameters(), gradient_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            reason = f"{'gradient' if math.isfinite(loss) else 'loss'} not finite at epoch {steps}"
            break
        optimizer.step()
        steps, grad_norm = steps + 1, max(grad_norm, norm)
    optimizer.zero_grad(set_to_none=True)
    _count_skips(critic, reason, max_skips)
    return FitReport(
        loss_before=loss_before,
        loss_after=batch.loss(batch.values()) if steps else loss_before,
        explained_variance=explained,
        grad_norm=grad_norm,
        steps=steps,
        skipped=epochs - steps,
        skip_reason=reason,
    )


class _Batch:
    """One process's responses and targets, with the reductions over the others."""

    def __init__(
        self, critic: Critic, inputs: CriticInputs, returns: Tensor, size: int | None, reduce: AllReduce
    ) -> None:
        self.critic, self.inputs, self.returns, self.reduce = critic, inputs, returns, reduce
        self.wide = accumulation_dtype(returns)
        rows = returns.shape[0]
        step = size or max(rows, 1)
        self.slices = [slice(start, start + step) for start in range(0, rows, step)]
        bad = (inputs.mask & ~returns.isfinite()).sum()
        counts = reduce(torch.stack([inputs.mask.sum(), bad]).to(self.wide))
        self.tokens, self.bad_targets = float(counts[0]), int(counts[1])

    def problem(self) -> str | None:
        if self.bad_targets:
            return f"{self.bad_targets} of {self.tokens:.0f} returns not finite"
        return None if self.tokens else "no trainable token"

    @torch.no_grad()
    def values(self) -> Tensor:
        parts = [self.critic(self.inputs.rows(rows)) for rows in self.slices]
        return torch.cat(parts) if parts else torch.zeros_like(self.returns)

    def loss(self, values: Tensor) -> float:
        return float(self.reduce(self._summed(values, slice(None)).to(self.wide)[None])) / max(self.tokens, 1.0)

    def backward(self) -> float:
        """Leave the gradient of the global loss in every process, and return that loss."""
        total = torch.zeros((), dtype=self.wide, device=self.returns.device)
        for rows in self.slices:
            part = self._summed(self.critic(self.inputs.rows(rows)), rows) / self.tokens
            part.backward()
            total += part.detach()
        self._sum_gradients()
        return float(self.reduce(total[None]))

    def _summed(self, values: Tensor, rows: slice) -> Tensor:
        error = torch.where(self.inputs.mask[rows], values - self.returns[rows].to(values.dtype), 0.0)
        return 0.5 * error.square().sum()

    def _sum_gradients(self) -> None:
        """Sum over processes in buckets whose number and size depend on the parameters alone."""
        bucket: list[nn.Parameter] = []
        for parameter in (p for p in self.critic.parameters() if p.requires_grad):
            if parameter.grad is None:  # no rows here, but other processes may have some
                parameter.grad = torch.zeros_like(parameter)
            full = sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET
            if bucket and (full or bucket[0].dtype != parameter.dtype):
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(parameter)
        self._sum_bucket(bucket)

    def _sum_bucket(self, parameters: list[nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.reduce(torch.cat([g.reshape(-1) for g in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _count_skips(critic: Critic, reason: str | None, max_skips: int) -> None:
    if reason is None or reason == "no trainable token":
        critic.skipped_updates.zero_()
        return
    critic.skipped_updates += 1
    if int(critic.skipped_updates) > max_skips:
        raise EvidenceError(
            f"the critic skipped {int(critic.skipped_updates)} updates in a row, more than max_skips={max_skips}; the "
            f"last because: {reason}. Look for NaN in rewards, values or features, or lower the learning rate."
        )
