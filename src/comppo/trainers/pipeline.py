"""Evidence -> gate -> transport -> whitening, once, for every engine.

An engine (TRL, verl) brings tensors: what was sampled, how it was rewarded, what was read of the computation, and the
critic's values. It gets back one advantage per token and the critic's targets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.computation import Computation
from comppo.errors import ConfigError
from comppo.evidence.rewards import leave_one_out_mean, place_rewards
from comppo.evidence.rollout import last_trainable
from comppo.transport import (
    CONTROLS,
    OPERATORS,
    GateConfig,
    build_operator,
    gate_from_statistic,
)
from comppo.transport.broadcast import BASELINES, SCALES
from comppo.types import Credit, Evidence, accumulation_dtype
from comppo.update.whiten import masked_whiten

CRITICS = ("tac", "standard", "none")
CRITIC_OPERATORS = ("gae", "comp_gae")
GROUP_OPERATORS = ("group_relative", "redistribute", "prefix_tree")

REDISTRIBUTION_WEIGHTS: dict[str, Callable[[Computation], Tensor] | None] = {
    "uniform": None,
    "improbability": lambda computation: 1.0 - computation.logps.exp(),
    "surprisal": lambda computation: -computation.logps,
    "entropy": lambda computation: computation.entropies,
    "statistic": lambda computation: computation.statistic.clamp(min=0.0),
}
"""Detached, non-negative statistics of the emitted token by which a residual can be spread."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """The collective operations that credit needs; the defaults are one process."""

    count: int = 1
    rank: int = 0
    all_reduce: Callable[[Tensor], Tensor] = _identity
    """Sums a small tensor over processes."""
    gather: Callable[[Tensor], Tensor] = _identity
    """Concatenates (rows, ...) tensors over processes in rank order, padding tokens with 0."""

    def local(self, tensor: Tensor, tokens: int | None = None) -> Tensor:
        """This process's rows of a gathered tensor, cut to its own number of tokens."""
        rows = tensor.shape[0] // self.count
        mine = tensor[self.rank * rows : (self.rank + 1) * rows]
        return mine if tokens is None else mine[:, :tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Settings of the credit pipeline."""

    operator: str = "comp_gae"
    """Name in the transport registry."""
    gamma: float = 1.0
    """Discount per token, in [0, 1]."""
    lam: float = 1.0
    """Lambda of the policy's advantages, in [0, 1]."""
    critic_lam: float | None = None
    """Lambda of the critic's targets; None means `lam`."""
    length_adaptive_alpha: float | None = None
    """If given, lambda = 1 - 1 / (alpha * length), per response."""
    whiten_advantages: bool | None = None
    """None: yes for operators with a critic, no for group operators."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Bounds and slope of the gate."""
    gate_bootstrap: bool = False
    """Whether the bootstrap value is gated."""
    gate_trace: bool = True
    """Whether the trace is gated."""
    gate_control: str | None = None
    """Name of a control that replaces the gates, or None."""
    baseline: str = "group_mean"
    """Baseline of the group operators."""
    scale: str = "group"
    """Scale of the group operators' residual: group, batch or none."""
    redistribution: str = "improbability"
    """Statistic by which `redistribute` and `prefix_tree` spread a residual."""
    negative_redistribution: str | None = None
    """The same for negative residuals; None means `redistribution`."""
    prefix_prior: float = 1.0
    """Prior mass of the prefix tree."""
    seed: int = 0
    """Seed of the shuffled control."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "critic_lam"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} must lie in [0, 1], got {name}={value!r}.")
        if self.operator not in OPERATORS:
            raise ConfigError(f"operator={self.operator!r} is unknown: choose one of {', '.join(sorted(OPERATORS))}.")
        for name in ("redistribution", "negative_redistribution"):
            value = getattr(self, name)
            if value not in REDISTRIBUTION_WEIGHTS and not (value is None and name == "negative_redistribution"):
                known = ", ".join(sorted(REDISTRIBUTION_WEIGHTS))
                raise ConfigError(f"{name}={value!r} is unknown: choose one of {known}.")
        for name, choices in (("baseline", BASELINES), ("scale", SCALES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(choices)}.")
        if not self.prefix_prior > 0.0:
            raise ConfigError(f"prefix_prior must be above 0, got {self.prefix_prior!r}.")
        if self.length_adaptive_alpha is not None and not self.length_adaptive_alpha > 0.0:
            raise ConfigError(
                f"length_adaptive_alpha must be above 0, got {self.length_adaptive_alpha!r}; VAPO uses 0.05."
            )
        if not (self.gate_bootstrap or self.gate_trace) and self.operator == "comp_gae":
            raise ConfigError(
                "gate_bootstrap=False and gate_trace=False leave nothing to gate: set one, or operator='gae'."
            )

    @property
    def has_critic(self) -> bool:
        """Whether the operator uses values."""
        return self.operator in CRITIC_OPERATORS

    @property
    def reads_computation(self) -> bool:
        """Whether anything of the behaviour policy's computation is needed."""
        return self.operator != "group_relative"

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.has_critic if self.whiten_advantages is None else self.whiten_advantages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One generation batch of one process."""

    completion_ids: Int[Tensor, "rows tokens"]
    mask: Bool[Tensor, "rows tokens"]
    """Trainable tokens; empty rows are allowed."""
    response_rewards: Float[Tensor, " rows"]
    """Weighted sum of the reward functions, 0 where unscorable."""
    scorable: Bool[Tensor, " rows"]
    num_generations: int
    index: int
    """Number of this generation in the run; seeds the shuffled control."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """What the pipeline decided for one rollout."""

    advantages: Float[Tensor, "rows tokens"]
    """Ready for the clipped objective: whitened where configured, 0 at masked slots, detached."""
    credit: Credit
    """Before whitening, reward units."""
    gates: Float[Tensor, "rows tokens"] | None
    values: Float[Tensor, "rows tokens"] | None
    metrics: dict[str, float]


def baselines(rollout: Rollout, *, default: float, processes: Processes) -> Float[Tensor, " rows"]:
    """Where a critic starts from: the leave-one-out mean of the group, or `default` where there is no other response.

    Args:
        rollout: this process's rows.
        default: value without a group, reward units.
        processes: the group may be spread over processes.

    Returns:
        (rows,), reward units.
    """
    rewards = leave_one_out_mean(
        processes.gather(rollout.response_rewards),
        rollout.num_generations,
        scorable=processes.gather(rollout.scorable),
        default=default,
    )
    return processes.local(rewards)


def compute_gates(
    rollout: Rollout, computation: Computation | None, config: PipelineConfig, processes: Processes
) -> Float[Tensor, "rows tokens"] | None:
    """The retention gates of one rollout, after the control if there is one; None where the operator has no gate."""
    if config.operator != "comp_gae" or computation is None:
        return None
    gates = gate_from_statistic(
        computation.statistic,
        rollout.mask,
        config.gate,
        visible_keys=computation.visible_keys,
        reduce=processes.all_reduce,
    )
    if config.gate_control is None:
        return gates
    # On the gathered batch, so that one process and several draw and average the same. Where bounds depend on a
    # response's length, what is moved is the place between them: pooled gates would change how much short and long
    # responses keep, and not only where.
    everywhere, mask = processes.gather(gates), processes.gather(rollout.mask)
    lengths = mask.sum(1).to(everywhere.dtype)
    low, high = (
        config.gate.coefficients(bound, lengths)[:, None] for bound in (config.gate.minimum, config.gate.maximum)
    )
    width = (high - low).clamp(min=torch.finfo(everywhere.dtype).tiny)
    place = torch.where(mask, ((everywhere - low) / width).clamp(0.0, 1.0), 1.0)
    generator = torch.Generator(gates.device).manual_seed(config.seed * 1_000_003 + rollout.index)
    moved = CONTROLS[config.gate_control](place, mask, generator=generator)
    controlled = torch.where(mask, low + (high - low) * moved, 1.0)
    return processes.local(controlled, gates.shape[1])


def assign_credit(
    rollout: Rollout,
    computation: Computation | None,
    values: Float[Tensor, "rows tokens"] | None,
    config: PipelineConfig,
    processes: Processes,
) -> Assignment:
    """One advantage per token for one rollout.

    Args:
        rollout: what was sampled and how it was rewarded.
        computation: what was read of the behaviour policy; None where `config.reads_computation` is false.
        values: the critic's values before it saw this rollout, reward units; None for group operators and no critic.
        config: operator, gate and whitening.
        processes: collective operations.

    Returns:
        Advantages, critic targets, gates and metrics that are equal on every process.
    """
    with torch.no_grad():
        mask = rollout.mask & rollout.scorable[:, None]
        rollout = replace(rollout, mask=mask)
        gates = compute_gates(rollout, computation, config, processes)
        if config.has_critic:
            values = torch.zeros_like(mask, dtype=torch.float32) if values is None else values
            credit = _critic_credit(rollout, gates, values, config)
        else:
            credit = _group_credit(rollout, computation, config, processes)
        advantages = credit.advantages
        if config.whitens:
            advantages = masked_whiten(advantages, mask, all_reduce=processes.all_reduce)
        advantages = advantages.masked_fill(~mask, 0.0)
        return Assignment(
            advantages=advantages.float().detach(),
            credit=credit,
            gates=gates,
            values=values,
            metrics=_metrics(rollout, computation, credit, gates, values, processes),
        )


def _critic_credit(rollout: Rollout, gates: Tensor | None, values: Tensor, config: PipelineConfig) -> Credit:
    parameters: dict[str, Any] = {
        "gamma": config.gamma,
        "lam": config.lam,
        "length_alpha": config.length_adaptive_alpha,
        "critic_lam": config.critic_lam,
    }
    if gates is not None:
        parameters |= {"gate_bootstrap": config.gate_bootstrap, "gate_trace": config.gate_trace}
    evidence = Evidence(
        rewards=place_rewards(rollout.response_rewards, rollout.mask),
        mask=rollout.mask,
        values=values,
        gates=gates,
    )
    return build_operator(config.operator, **parameters)(evidence)


def _group_credit(
    rollout: Rollout, computation: Computation | None, config: PipelineConfig, processes: Processes
) -> Credit:
    """Group operators compare the responses of a group, which may be spread over processes: gather, then keep mine."""
    tokens = rollout.mask.shape[1]
    mask = processes.gather(rollout.mask)
    parameters: dict[str, Any] = {"baseline": config.baseline, "scale": config.scale}
    evidence: dict[str, Any] = {}
    if config.operator == "prefix_tree":
        parameters = {"prior": config.prefix_prior}
        evidence["completion_ids"] = processes.gather(rollout.completion_ids)
    if config.operator != "group_relative":
        for name, kind in (
            ("weights", config.redistribution),
            ("negative_weights", config.negative_redistribution or config.redistribution),
        ):
            weigh = REDISTRIBUTION_WEIGHTS[kind]
            if weigh is not None and computation is not None:
                evidence[name] = processes.gather(weigh(computation))
            else:
                evidence[name] = torch.ones_like(mask, dtype=torch.float32)
    rewards = processes.gather(rollout.response_rewards)
    credit = build_operator(config.operator, **parameters)(
        Evidence(
            rewards=place_rewards(rewards, mask),
            mask=mask,
            response_rewards=rewards,
            scorable=processes.gather(rollout.scorable),
            num_generations=rollout.num_generations,
            **evidence,
        )
    )
    return Credit(
        advantages=processes.local(credit.advantages, tokens), returns=processes.local(credit.returns, tokens)
    )


def _retention(gates: Float[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"]) -> Float[Tensor, " rows"]:
    """What the first token keeps of a reward at the end: the product of the gates in between, the last one left out."""
    wide = torch.where(mask, gates.to(accumulation_dtype(gates)), 1.0)
    at_end = last_trainable(mask).clamp(min=0)[:, None]
    return wide.scatter(1, at_end, 1.0).prod(1)


def _metrics(
    rollout: Rollout,
    computation: Computation | None,
    credit: Credit,
    gates: Tensor | None,
    values: Tensor | None,
    processes: Processes,
) -> dict[str, float]:
    """Means over all trained tokens of all processes; each process gets the same numbers."""
    mask = rollout.mask
    named = {"advantage": credit.advantages}
    if computation is not None:
        named |= {"statistic": computation.statistic, "sink_mass": computation.sink_mass}
    if gates is not None:
        named["gate"] = gates
    if values is not None:
        named["value"] = values
    wide = accumulation_dtype(credit.advantages)
    sums = []
    for tensor in named.values():
        kept = torch.where(mask, tensor.to(wide), 0.0)
        sums += [kept.sum(), kept.square().sum()]
    trained = mask.any(1)
    retention = _retention(gates, mask) if gates is not None else torch.zeros_like(trained, dtype=wide)
    sums += [
        mask.sum().double(),
        (retention * trained).sum(),
        trained.sum().double(),
        (~rollout.scorable).sum().double(),
    ]
    totals = processes.all_reduce(torch.stack(sums)).tolist()
    *moments, tokens, kept_at_start, responses, unscorable = totals
    tokens, responses = max(tokens, 1.0), max(responses, 1.0)
    metrics = {"comppo/unscorable": unscorable}
    for place, name in enumerate(named):
        mean, square = moments[2 * place] / tokens, moments[2 * place + 1] / tokens
        metrics[f"comppo/{name}_mean"] = mean
        metrics[f"comppo/{name}_std"] = max(square - mean * mean, 0.0) ** 0.5
    if gates is not None:
        metrics["comppo/retention"] = kept_at_start / responses
    return metrics
