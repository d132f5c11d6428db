"""The operators that an audit compares, with the settings that training has by default."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comppo.audit.responses import Batch
from comppo.computation import DEFAULT_STATISTIC, DIFFUSE_STATISTICS, Computation
from comppo.critic import (
    Critic,
    CriticConfig,
    CriticInputs,
    TransportAlignedCritic,
    build_features,
    critic_optimizer,
    feature_widths,
    fit_critic,
)
from comppo.errors import ConfigError
from comppo.evidence.rewards import leave_one_out_mean, place_rewards
from comppo.transport import CONTROLS, GateConfig, build_operator, gate_from_statistic
from comppo.types import Credit, Evidence

OPERATORS: dict[str, str] = {
    "grpo": "one number per response: reward minus group mean, over the group's deviation",
    "gae": "critic, lambda 1, no gate",
    "comppo": "critic, lambda 1, gated trace",
    "comppo_shuffled": "the same with its gates in random order within each response",
    "comppo_inverted": "the same with its gates in reverse rank within each response",
    "redistribute": "GRPO's number, spread by 1 - p of the emitted tokens",
    "prefix_tree": "values of prefixes that the group shares; the rest spread by 1 - p, failures by surprisal",
    "sharpening": "no reward at all: output entropy minus surprisal",
    "oracle": "half of the continuations, judged by the other half",
    "reversed": "the oracle's credit, last token first",
    "shuffled": "the oracle's credit in random order within each response",
}
"""What `--operators` knows."""
GATE_CONTROLS: dict[str, str | None] = {
    "gae": None,
    "comppo": None,
    "comppo_shuffled": "shuffled",
    "comppo_inverted": "inverted",
}
"""Operators with a critic, and the control that replaces their gates."""
WHITENED = (*GATE_CONTROLS, "prefix_tree")
"""Whose advantages are whitened in training."""
OF_CONTINUATIONS = ("oracle", "reversed", "shuffled")
ALWAYS = "sharpening"
ROUNDS = 10
"""Fits of a critic, each with new targets."""
EPOCHS = 8
"""Full-batch steps per fit, as in training."""


def check_operators(names: tuple[str, ...]) -> tuple[str, ...]:
    """The operators in the order given, each once, with `ALWAYS` among them.

    Args:
        names: keys of `OPERATORS`.

    Returns:
        The same without repetition; "sharpening" is a row of every audit.

    Raises:
        ConfigError: an unknown name, or none.
    """
    for name in names:
        if name not in OPERATORS:
            raise ConfigError(f"operators: {name!r} is unknown: choose from {', '.join(OPERATORS)}.")
    if not names:
        raise ConfigError(f"operators is empty: choose from {', '.join(OPERATORS)}.")
    return tuple(dict.fromkeys((*names, ALWAYS)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollouts:
    """A batch with what was read of the computation that made it."""

    batch: Batch
    computation: Computation
    seed: int
    """Of the shuffled gates."""

    def gates(self, control: str | None) -> Float[Tensor, "rows tokens"]:
        """Retention gates as training makes them, after the control."""
        sharpness = -1.0 if DEFAULT_STATISTIC in DIFFUSE_STATISTICS else 1.0
        mask = self.batch.mask & self.batch.scorable[:, None]
        gates = gate_from_statistic(
            self.computation.statistic,
            mask,
            GateConfig(sharpness=sharpness),
            visible_keys=self.computation.visible_keys,
        )
        if control is None:
            return gates
        return CONTROLS[control](gates, mask, generator=torch.Generator().manual_seed(self.seed))

    def evidence(self, rewards: Tensor, **parts: Tensor) -> Evidence:
        """The evidence of these responses, with other rewards maybe."""
        known = torch.where(self.batch.scorable, rewards, 0.0)
        return Evidence(
            rewards=place_rewards(known, self.batch.mask),
            mask=self.batch.mask,
            response_rewards=known,
            scorable=self.batch.scorable,
            num_generations=self.batch.group_size,
            **parts,
        )

    def critic_inputs(self, config: CriticConfig, rewards: Tensor, max_length: int) -> CriticInputs:
        """What a critic looks at: everything but the group's mean follows from the computation alone."""
        baseline = leave_one_out_mean(
            torch.where(self.batch.scorable, rewards, 0.0),
            self.batch.group_size,
            scorable=self.batch.scorable,
            default=0.0,
        )
        features = build_features(
            config.features,
            mask=self.batch.mask,
            logps=self.computation.logps,
            entropies=self.computation.entropies,
            hidden=self.computation.hidden,
            routing=self.computation.routing,
            statistic=self.computation.statistic,
            group_mean=baseline,
            max_length=max_length,
        )
        return CriticInputs(mask=self.batch.mask, baseline=baseline, features=features)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedCritic:
    """A critic fitted on responses of its own to one operator's targets."""

    critic: Critic
    config: CriticConfig
    max_length: int

    def values(self, rollouts: Rollouts, rewards: Tensor) -> Float[Tensor, "rows tokens"]:
        """Values of responses that it was not fitted on."""
        with torch.no_grad():
            values: Tensor = self.critic(rollouts.critic_inputs(self.config, rewards, self.max_length))
            return values


def fit_operator_critic(name: str, rollouts: Rollouts, *, lam: float, max_length: int, seed: int) -> FittedCritic:
    """Fit a transport-aligned critic to the targets of the operator `name`, which follow its own values.

    Args:
        name: a key of `GATE_CONTROLS`.
        rollouts: responses to other prompts than the audited ones.
        lam: lambda of the operator.
        max_length: greatest response length, tokens.
        seed: of the initial weights.

    Returns:
        The critic.
    """
    config, rewards = CriticConfig(seed=seed), rollouts.batch.rewards
    widths = feature_widths(
        config.features,
        hidden_width=rollouts.computation.hidden.shape[-1],
        routing_channels=rollouts.computation.routing.shape[2:].numel(),
    )
    critic = TransportAlignedCritic(config, widths)
    critic.observe_rewards(rewards[rollouts.batch.scorable])
    optimizer = critic_optimizer(critic, config)
    fitted = FittedCritic(critic=critic, config=config, max_length=max_length)
    inputs = rollouts.critic_inputs(config, rewards, max_length)
    for _ in range(ROUNDS):
        with torch.no_grad():
            values = critic(inputs)
        returns = critic_credit(name, rollouts, rewards, values, lam=lam).returns
        fit_critic(critic, optimizer, inputs, returns, epochs=EPOCHS, gradient_clip=config.gradient_clip)
    return fitted


def critic_credit(name: str, rollouts: Rollouts, rewards: Tensor, values: Tensor, *, lam: float) -> Credit:
    """Advantages and targets of an operator with a critic: the gate stands on the trace alone, as in training."""
    if name == "gae":
        return build_operator("gae", lam=lam)(rollouts.evidence(rewards, values=values))
    operator = build_operator("comp_gae", lam=lam, gate_bootstrap=False)
    return operator(rollouts.evidence(rewards, values=values, gates=rollouts.gates(GATE_CONTROLS[name])))


def group_credit(name: str, rollouts: Rollouts, rewards: Tensor) -> Float[Tensor, "rows tokens"]:
    """Advantages of an operator without a critic."""
    return _GROUP[name](rollouts, rewards)


def _grpo(rollouts: Rollouts, rewards: Tensor) -> Tensor:
    return build_operator("group_relative")(rollouts.evidence(rewards)).advantages


def _redistribute(rollouts: Rollouts, rewards: Tensor) -> Tensor:
    weights = 1.0 - rollouts.computation.logps.exp()
    return build_operator("redistribute")(rollouts.evidence(rewards, weights=weights)).advantages


def _prefix_tree(rollouts: Rollouts, rewards: Tensor) -> Tensor:
    logps = rollouts.computation.logps
    evidence = rollouts.evidence(
        rewards, weights=1.0 - logps.exp(), negative_weights=-logps, completion_ids=rollouts.batch.completion_ids
    )
    return build_operator("prefix_tree")(evidence).advantages


def _sharpening(rollouts: Rollouts, rewards: Tensor) -> Tensor:
    computation = rollouts.computation
    return torch.where(rollouts.batch.mask, computation.entropies + computation.logps, 0.0)


_GROUP: dict[str, Callable[[Rollouts, Tensor], Tensor]] = {
    "grpo": _grpo,
    "redistribute": _redistribute,
    "prefix_tree": _prefix_tree,
    "sharpening": _sharpening,
}
