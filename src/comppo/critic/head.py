"""The transport-aligned critic: a small head on what the actor has already computed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comppo.critic.bounded import AllReduce, Critic, CriticInputs
from comppo.critic.features import check_feature_names
from comppo.errors import ConfigError, EvidenceError
from comppo.types import accumulation_dtype

_MOST_DEVIATIONS = 10.0
"""Standardised features are cut here: one outlier must not dominate a small head."""
_LARGE_ACTOR = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """Size, features and fitting of a critic."""

    features: tuple[str, ...] = ("hidden", "routing", "surprisal", "entropy", "position", "group_mean")
    """Keys of `comppo.critic.features.FEATURES`; the standard critic uses none."""
    hidden_size: int = 32
    """Units of the head's hidden layer."""
    projection_size: int = 16
    """Features with more columns than this are first projected to it, so that the head stays small."""
    learning_rate: float = 3e-3
    """Of AdamW."""
    weight_decay: float = 1e-2
    """Of AdamW, unitless; hidden-state features overfit a few hundred outcomes without it."""
    epochs: int = 8
    """Optimiser steps per batch, each on the full batch."""
    gradient_clip: float = 1.0
    """Greatest gradient norm."""
    reward_min: float | None = None
    """Least reachable return, reward units; None: learn it from the rewards seen. 0 is always reachable."""
    reward_max: float | None = None
    """Greatest reachable return, reward units; None: learn it from the rewards seen."""
    max_parameter_share: float | None = None
    """Greatest size relative to the actor, unitless; None: .01 for actors from 1e9 parameters, .05 below."""
    seed: int = 0
    """Of the initial weights; must be the same in every process."""

    def __post_init__(self) -> None:
        check_feature_names(self.features)
        for name in ("hidden_size", "projection_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"need {name} >= 1, got {name}={getattr(self, name)!r}.")
        for name in ("learning_rate", "gradient_clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"need {name} > 0, got {name}={getattr(self, name)!r}.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"need weight_decay >= 0, got weight_decay={self.weight_decay!r}.")
        if self.reward_min is not None and self.reward_max is not None and self.reward_min > self.reward_max:
            raise ConfigError(f"need reward_min <= reward_max, got {self.reward_min!r} and {self.reward_max!r}.")
        if self.max_parameter_share is not None and not self.max_parameter_share > 0:
            raise ConfigError(f"need max_parameter_share > 0, got {self.max_parameter_share!r}. None is automatic.")


class TransportAlignedCritic(Critic):
    """Values from cached features of the actor's own computation: no Transformer pass of its own.

    Features are standardised by running moments, wide ones projected, and one hidden layer follows. The last layer
    starts at zero, so that the critic starts as exactly the baseline. Building it leaves every global random number
    generator as it was.

    Args:
        config: sizes and seed.
        widths: columns of each feature, from `feature_widths`, in the order of `config.features`.

    Raises:
        ConfigError: `widths` does not fit `config.features`.
    """

    feature_mean: Tensor
    feature_variance: Tensor
    features_seen: Tensor

    def __init__(self, config: CriticConfig, widths: Mapping[str, int]) -> None:
        super().__init__(config.reward_min, config.reward_max)
        if tuple(widths) != config.features:
            raise ConfigError(
                f"widths names {tuple(widths)}, but config.features is {config.features}: "
                "build it with feature_widths(config.features, ...)."
            )
        self.config = config
        self.widths = dict(widths)
        total = sum(self.widths.values())
        self.register_buffer("feature_mean", torch.zeros(total, device="cpu"))
        self.register_buffer("feature_variance", torch.ones(total, device="cpu"))
        self.register_buffer("features_seen", torch.tensor(0.0, device="cpu"))
        # The CPU generator alone: torch.manual_seed would also reseed every accelerator.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(config.seed)
            small = config.projection_size
            self.projections = nn.ModuleDict(
                {name: nn.Linear(width, small, bias=False) for name, width in self.widths.items() if width > small}
            )
            joined = sum(min(width, small) for width in self.widths.values())
            self.layer = nn.Linear(joined, config.hidden_size)
            self.value = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, inputs: CriticInputs) -> Float[Tensor, "rows tokens"]:
        """V(s_t) for every response token.

        Args:
            inputs: with `features`; whatever stands at masked slots (NaN too) is ignored.

        Returns:
            Reward units, 0 at masked slots, dtype of the head's parameters.

        Raises:
            EvidenceError: `features` is missing or has another number of columns than the head.
        """
        features = self._features(inputs).to(self.value.weight)
        deviation = (features - self.feature_mean) * torch.rsqrt(self.feature_variance + 1e-8)
        deviation = torch.where(inputs.mask[..., None], deviation.clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS), 0.0)
        blocks = []
        for name, block in zip(self.widths, deviation.split(list(self.widths.values()), dim=-1), strict=True):
            blocks.append(self.projections[name](block) if name in self.projections else block)
        activations = nn.functional.silu(self.layer(torch.cat(blocks, dim=-1)))
        return self.bounded(self.value(activations).squeeze(-1), inputs)

    @torch.no_grad()
    def observe_inputs(self, inputs: CriticInputs, all_reduce: AllReduce | None = None) -> None:
        """Update the running moments of the features, over the trainable tokens of all processes.

        Early batches count equally; later ones never less than a tenth, because the policy drifts.

        Args:
            inputs: with `features`.
            all_reduce: sums a tensor over processes; called exactly twice.
        """
        reduce = all_reduce or (lambda tensor: tensor)
        features = torch.where(inputs.mask[..., None], self._features(inputs), 0.0)
        wide = accumulation_dtype(features)
        sums = features.sum(dim=(0, 1), dtype=wide)
        sums = reduce(torch.cat([sums, inputs.mask.sum().to(sums)[None]]))
        count = sums[-1]
        mean = sums[:-1] / count.clamp(min=1)
        deviations = torch.where(inputs.mask[..., None], features - mean.to(features.dtype), 0.0)
        variance = reduce(deviations.square_().sum(dim=(0, 1), dtype=wide)) / count.clamp(min=1)
        if count == 0 or not bool((mean.isfinite() & variance.isfinite()).all()):
            return
        share = count / torch.minimum(count + self.features_seen, 10 * count)
        shift = mean - self.feature_mean
        spread = (1 - share) * self.feature_variance + share * variance + share * (1 - share) * shift.square()
        self.feature_variance.copy_(spread)  # the first batch has share 1 and replaces the initial moments
        self.feature_mean += share * shift
        self.features_seen += count

    def _features(self, inputs: CriticInputs) -> Tensor:
        total = sum(self.widths.values())
        if inputs.features is None or inputs.features.shape[-1] != total:
            got = "None" if inputs.features is None else f"shape {tuple(inputs.features.shape)}"
            raise EvidenceError(
                f"inputs.features is {got}, but the critic was built for {total} columns: {self.widths}."
            )
        return inputs.features.detach()


def parameter_share(critic: nn.Module, actor_parameters: int) -> float:
    """Size of the critic beside the actor.

    Args:
        critic: any module; only parameters with `requires_grad` count.
        actor_parameters: parameter count of the actor, at least 1.

    Returns:
        Trainable parameters of the critic for each parameter of the actor, unitless.

    Raises:
        ConfigError: `actor_parameters` is below 1.
    """
    if actor_parameters < 1:
        raise ConfigError(
            f"actor_parameters={actor_parameters!r} must be at least 1: pass the actor's parameter count."
        )
    return sum(p.numel() for p in critic.parameters() if p.requires_grad) / actor_parameters


def check_parameter_share(
    critic: TransportAlignedCritic, actor_parameters: int, max_share: float | None = None
) -> float:
    """Make sure that the critic is small beside the actor, and return its share.

    Args:
        critic: the head.
        actor_parameters: parameter count of the actor.
        max_share: unitless; None: the config's, or .01 for actors from 1e9 parameters and .05 below.

    Returns:
        `parameter_share(critic, actor_parameters)`.

    Raises:
        ConfigError: the share is above the limit.
    """
    limit = critic.config.max_parameter_share if max_share is None else max_share
    if limit is None:
        limit = 0.01 if actor_parameters >= _LARGE_ACTOR else 0.05
    share = parameter_share(critic, actor_parameters)
    if share > limit:
        raise ConfigError(
            f"the critic has {share:.2%} of the actor's {actor_parameters:,} parameters, more than "
            f"max_parameter_share={limit:.2%}. Lower projection_size={critic.config.projection_size} or "
            f"hidden_size={critic.config.hidden_size}, drop wide features "
            f"(columns: {critic.widths}), or raise the limit."
        )
    return share
