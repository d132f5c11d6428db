"""`CompPOConfig`: TRL's `GRPOConfig` plus what decides which tokens get credit."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from comppo.computation import (
    DEFAULT_LAYERS,
    DEFAULT_STATISTIC,
    DIFFUSE_STATISTICS,
    LAYER_NAMES,
    ROUTER_STATISTICS,
    STATISTICS,
    TOKEN_STATISTICS,
)
from comppo.computation.reading import Statistic, of_attention
from comppo.computation.user_statistics import load_statistic
from comppo.critic import CriticConfig
from comppo.errors import ConfigError
from comppo.trainers.pipeline import CRITIC_OPERATORS, CRITICS, REDISTRIBUTION_WEIGHTS, PipelineConfig
from comppo.transport import CONTROLS, OPERATORS, GateConfig

SUPPORTED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
"""TRL's loss types in which one advantage per token has the meaning that it has for one per response."""

CRITIC_LEARNING_RATES = {"tac": 3e-3, "standard": 1e-4, "none": 3e-3}
"""A small head learns at a rate that would destroy a Transformer."""
CRITIC_SCHEDULES = ("constant", "linear", "cosine", "polynomial")
"""Transformers' schedules that need nothing but the number of steps."""
GATE_FIELDS = {name: f"gate_{name}" for name in ("minimum", "reference", "maximum", "unit", "sharpness", "residualize")}
CRITIC_FIELDS = {
    name: f"critic_{name}"
    for name in (
        "hidden_size",
        "projection_size",
        "max_parameter_share",
        "features",
        "learning_rate",
        "weight_decay",
        "epochs",
        "gradient_clip",
    )
} | {"reward_min": "reward_minimum", "reward_max": "reward_maximum"}
"""How the fields of the parts are called here."""


@contextmanager
def _in_our_names(fields: dict[str, str]) -> Iterator[None]:
    """Let an error of a part name the fields that the user set."""
    try:
        yield
    except ConfigError as error:
        names = "|".join(sorted(fields, key=len, reverse=True))
        raise ConfigError(re.sub(rf"\b({names})\b(?=\W)", lambda found: fields[found[0]], str(error))) from None


def _names(given: Any) -> str:
    return ", ".join(sorted(given))


@dataclass
class CompPOConfig(GRPOConfig):
    """Every field of TRL's `GRPOConfig`, with the same meaning, and the fields below.

    The defaults are CompPO: attention concentration -> retention gate -> Comp-GAE with a transport-aligned critic. Two
    of them differ from the paper's formula as we understand it: the gate stands on the trace alone (`gate_bootstrap`),
    and `lam` is 1. docs/defaults.md says why, and what our figures do not decide.
    `num_generations=1` is allowed with the operators that use a critic.

    Raises:
        ConfigError: a field is out of range, unknown, or contradicts another; raised before any model is loaded.
    """

    operator: str = field(
        default="comp_gae",
        metadata={
            "help": "Transport operator: comp_gae, gae, group_relative (TRL's own credit), redistribute or prefix_tree."
        },
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per token, in [0, 1]."})
    lam: float = field(
        default=1.0,
        metadata={
            "help": "Lambda of GAE for the policy's advantages, in [0, 1]. Below 1 it forgets the outcome within "
            "1 / (1 - lam) tokens: see docs/defaults.md."
        },
    )
    critic_lam: float | None = field(
        default=None, metadata={"help": "Lambda of the critic's targets, in [0, 1]; the policy's lambda if not given."}
    )
    length_adaptive_alpha: float | None = field(
        default=None,
        metadata={"help": "If given, lambda of a response of n tokens is 1 - 1 / (alpha n) (VAPO); overrides lam."},
    )
    whiten_advantages: bool | None = field(
        default=None,
        metadata={
            "help": "Whiten advantages over all trained tokens of the generation batch, on all processes. If not "
            "given: yes with a critic operator, no with a group operator (which TRL's scale_rewards already scales)."
        },
    )

    gate_statistic: str = field(
        default=DEFAULT_STATISTIC,
        metadata={
            "help": f"Statistic of the computation that drives the gate: {', '.join(STATISTICS)}; or module:attribute "
            "for an AttentionStatistic, or a function of the Computation, of your own."
        },
    )
    gate_layers: str = field(
        default=DEFAULT_LAYERS,
        metadata={"help": "Layers that are read: first, middle, last (third), all, or indices such as 3,4,5."},
    )
    gate_sink_tokens: int = field(default=1, metadata={"help": "First keys left out of the statistic."})
    gate_minimum: float = field(default=0.5, metadata={"help": "Least retention, in gate_unit."})
    gate_reference: float = field(default=4.0, metadata={"help": "Mean retention over the batch, in gate_unit."})
    gate_maximum: float = field(default=math.inf, metadata={"help": "Greatest retention, in gate_unit."})
    gate_unit: str = field(
        default="response_lengths",
        metadata={
            "help": "Unit of the three bounds: credit horizons in response_lengths or tokens, or plain coefficients."
        },
    )
    gate_sharpness: float | None = field(
        default=None,
        metadata={
            "help": "Slope of the gate against the standardised statistic; 0 is a constant gate, below 0 a high "
            "statistic keeps less. If not given, concentrated computation keeps more: -1 for statistics that are high "
            "where it is spread out (effective keys, entropies, distance), else 1."
        },
    )
    gate_residualize: str = field(
        default="position",
        metadata={
            "help": "What is regressed out of the statistic within the batch: position (in the response), log_keys, "
            "log_keys_position (both logs together) or none."
        },
    )
    gate_bootstrap: bool = field(
        default=False,
        metadata={
            "help": "Gate the bootstrap value too, so that the gate discounts. Off by default: see docs/defaults.md."
        },
    )
    gate_trace: bool = field(default=True, metadata={"help": "Gate the trace of later TD errors."})
    gate_control: str | None = field(
        default=None,
        metadata={"help": "Replace the gates by a control: shuffled, position_mean, constant or inverted."},
    )

    baseline: str = field(
        default="group_mean",
        metadata={"help": "Baseline of the group operators: group_mean (GRPO), leave_one_out (RLOO) or none."},
    )
    redistribution: str = field(
        default="improbability",
        metadata={
            "help": "Statistic by which group operators spread a response's residual: improbability (1 - p of the "
            "emitted token), surprisal, entropy, statistic or uniform."
        },
    )
    negative_redistribution: str | None = field(
        default=None, metadata={"help": "The same for negative residuals; redistribution if not given."}
    )
    prefix_prior: float = field(
        default=1.0, metadata={"help": "Responses' worth of prior on the group mean in the prefix tree, above 0."}
    )

    critic: str = field(
        default="tac",
        metadata={"help": "tac (small head on the actor's computation), standard (a second Transformer) or none."},
    )
    critic_features: list[str] = field(
        default_factory=lambda: list(CriticConfig().features),
        metadata={"help": "Inputs of the transport-aligned critic."},
    )
    critic_hidden_layers: list[int] = field(
        default_factory=lambda: [-1], metadata={"help": "Actor layers whose hidden states the critic sees."}
    )
    critic_hidden_size: int = field(default=32, metadata={"help": "Width of the transport-aligned critic."})
    critic_projection_size: int = field(
        default=16, metadata={"help": "Columns that a wide feature (hidden states) is projected to."}
    )
    critic_max_parameter_share: float | None = field(
        default=None,
        metadata={"help": "Greatest size beside the actor; if not given, 0.01 from 1e9 parameters, 0.05 below."},
    )
    critic_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the critic; if not given, 3e-3 for tac and 1e-4 for standard."},
    )
    critic_weight_decay: float = field(default=1e-2, metadata={"help": "Weight decay of the critic."})
    critic_lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Schedule of the critic's learning rate, by Transformers' names."}
    )
    critic_epochs: int = field(default=8, metadata={"help": "Full-batch steps of the critic per generation."})
    critic_gradient_clip: float = field(default=1.0, metadata={"help": "Norm at which critic gradients are clipped."})
    reward_minimum: float | None = field(
        default=None, metadata={"help": "Least reward a response can get; learnt from the rewards seen if not given."}
    )
    reward_maximum: float | None = field(
        default=None, metadata={"help": "Greatest reward a response can get; learnt if not given."}
    )

    probe_rewards: bool = field(
        default=True,
        metadata={"help": "Call each reward function once on two dummy completions before anything expensive."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.gate_layers, int):
            self.gate_layers = str(self.gate_layers)
        elif not isinstance(self.gate_layers, str):  # a list in YAML or Python
            self.gate_layers = ",".join(map(str, self.gate_layers))
        self._check_choices()
        self.gate_statistic_read()
        self.gate_layers_read()
        self.pipeline_config()
        self.critic_config()
        alone = self.num_generations == 1
        if alone:
            self._stand_in_for_one_generation()
        super().__post_init__()
        if alone:
            self.num_generations = 1

    def _check_choices(self) -> None:
        choices = {
            "operator": OPERATORS,
            "critic": CRITICS,
            "redistribution": REDISTRIBUTION_WEIGHTS,
            "critic_lr_scheduler_type": CRITIC_SCHEDULES,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is unknown: choose one of {_names(allowed)}.")
        if self.gate_control is not None and self.gate_control not in CONTROLS:
            raise ConfigError(f"gate_control={self.gate_control!r} is unknown: choose one of {_names(CONTROLS)}.")
        if self.negative_redistribution not in (None, *REDISTRIBUTION_WEIGHTS):
            raise ConfigError(
                f"negative_redistribution={self.negative_redistribution!r} is unknown: choose one of "
                f"{_names(REDISTRIBUTION_WEIGHTS)}."
            )
        if self.loss_type not in SUPPORTED_LOSS_TYPES:
            raise ConfigError(
                f"loss_type={self.loss_type!r} does not take one advantage per token: choose one of "
                f"{', '.join(SUPPORTED_LOSS_TYPES)}. (vespo weights a response by the sign of its single advantage.)"
            )
        if self.gate_sink_tokens < 0:
            raise ConfigError(f"gate_sink_tokens must be at least 0, got {self.gate_sink_tokens!r}.")
        if not self.critic_hidden_layers:
            raise ConfigError("critic_hidden_layers is empty: give at least one layer, -1 being the last.")
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} normalises rewards within groups, "
                "so values in reward units do not exist: use 'sum_then_normalize', or TRL's GRPOTrainer."
            )

    def _stand_in_for_one_generation(self) -> None:
        """Let TRL's checks pass for groups of one: they ask for two because a group baseline needs two.

        The whole generation batch stands in for a group while they run: it divides itself, and every other check stays.
        """
        if self.operator not in CRITIC_OPERATORS:
            raise ConfigError(
                f"num_generations=1 leaves operator={self.operator!r} without a group to compare with: use "
                "operator='comp_gae' or 'gae' (a critic needs no group), or at least 2 generations."
            )
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        # TRL's `world_size` is known only after its own checks; every launcher sets the variable before
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        batch = self.generation_batch_size or self.per_device_train_batch_size * processes * steps
        if batch < 2:
            raise ConfigError(
                f"num_generations=1 needs a generation batch of at least 2 responses to whiten over, got {batch}: "
                "raise per_device_train_batch_size or gradient_accumulation_steps."
            )
        self.num_generations = batch
        self.num_generations_eval = self.num_generations_eval or 1

    def gate_config(self) -> GateConfig:
        """The gate's part of these settings."""
        with _in_our_names(GATE_FIELDS):
            return GateConfig(
                minimum=self.gate_minimum,
                reference=self.gate_reference,
                maximum=self.gate_maximum,
                unit=self.gate_unit,  # type: ignore[arg-type]  # GateConfig checks it
                sharpness=self._sharpness(),
                residualize=self.gate_residualize,  # type: ignore[arg-type]
            )

    def _sharpness(self) -> float:
        if self.gate_sharpness is not None:
            return self.gate_sharpness
        return -1.0 if self.gate_statistic in DIFFUSE_STATISTICS else 1.0

    def critic_config(self) -> CriticConfig:
        """The critic's part of these settings."""
        rate = self.critic_learning_rate
        with _in_our_names(CRITIC_FIELDS):
            return CriticConfig(
                hidden_size=self.critic_hidden_size,
                projection_size=self.critic_projection_size,
                max_parameter_share=self.critic_max_parameter_share,
                features=tuple(self.critic_features),
                learning_rate=CRITIC_LEARNING_RATES[self.critic] if rate is None else rate,
                weight_decay=self.critic_weight_decay,
                epochs=self.critic_epochs,
                gradient_clip=self.critic_gradient_clip,
                reward_min=self.reward_minimum,
                reward_max=self.reward_maximum,
                seed=self.seed,
            )

    def pipeline_config(self) -> PipelineConfig:
        """The credit pipeline's part of these settings."""
        return PipelineConfig(
            operator=self.operator,
            gamma=self.gamma,
            lam=self.lam,
            critic_lam=self.critic_lam,
            length_adaptive_alpha=self.length_adaptive_alpha,
            whiten_advantages=self.whiten_advantages,
            gate=self.gate_config(),
            gate_bootstrap=self.gate_bootstrap,
            gate_trace=self.gate_trace,
            gate_control=self.gate_control,
            baseline=self.baseline,
            # TRL also takes booleans here, and turns them into names only in its own checks
            scale={"True": "group", "False": "none"}.get(str(self.scale_rewards), str(self.scale_rewards)),
            redistribution=self.redistribution,
            negative_redistribution=self.negative_redistribution,
            prefix_prior=self.prefix_prior,
            seed=self.seed,
        )

    def reading(self) -> dict[str, Any]:
        """What these settings read, as arguments of `read_computation`."""
        return {
            "statistic": self.gate_statistic_read() if self._shows_statistic() else "output_entropy",
            "layers": self.gate_layers_read() if self.reads_attention() else (),
            "router_layers": self.gate_layers_read(),
            "sink_tokens": self.gate_sink_tokens,
            "hidden_layers": self.hidden_layers_read(),
        }

    def gate_statistic_read(self) -> Statistic:
        """`gate_statistic` as the reader takes it; the field itself stays text, so that it can be saved."""
        if not isinstance(self.gate_statistic, str):
            raise ConfigError(
                f"gate_statistic={self.gate_statistic!r} cannot be recorded: give a name, or 'module:attribute' for an "
                "object of your own."
            )
        return load_statistic(self.gate_statistic, field="gate_statistic")

    def _critic_sees(self, feature: str) -> bool:
        return self.pipeline_config().has_critic and self.critic == "tac" and feature in self.critic_features

    def _uses_statistic(self) -> bool:
        """Whether credit depends on the statistic."""
        pipeline = self.pipeline_config()
        if pipeline.has_critic:
            return pipeline.operator == "comp_gae" or self._critic_sees("statistic")
        return pipeline.reads_computation and "statistic" in (self.redistribution, self.negative_redistribution)

    def _shows_statistic(self) -> bool:
        """Whether it is worth reading: it is used, or is what the critic's routing is made of, or costs little."""
        routing = self._critic_sees("routing") and of_attention(self.gate_statistic_read())
        return self._uses_statistic() or routing or self.gate_statistic in TOKEN_STATISTICS

    def reads_attention(self) -> bool:
        """Whether these settings need attention at all; without it any architecture will do.

        A function of the computation may look at everything, so it does need attention.
        """
        statistic = self.gate_statistic_read()
        needs = of_attention(statistic) or not isinstance(statistic, str)
        return self._critic_sees("routing") or (needs and self._uses_statistic())

    def reads_routers(self) -> bool:
        """Whether these settings need the routers of mixture-of-experts layers."""
        return self.gate_statistic in ROUTER_STATISTICS and self._uses_statistic()

    def hidden_layers_read(self) -> tuple[int, ...]:
        """Layers whose hidden states are read: none unless the critic, or the statistic, may look at them."""
        statistic = self.gate_statistic_read()
        function = not isinstance(statistic, str) and not of_attention(statistic) and self._uses_statistic()
        wanted = self._critic_sees("hidden") or statistic == "hidden_change" or function
        return tuple(self.critic_hidden_layers) if wanted else ()

    def gate_layers_read(self) -> str | tuple[int, ...]:
        """`gate_layers` as the reader takes it; ConfigError where it is neither a name nor a list of indices."""
        if self.gate_layers in LAYER_NAMES:
            return self.gate_layers
        try:
            return tuple(int(index) for index in self.gate_layers.split(","))
        except ValueError:
            raise ConfigError(
                f"gate_layers={self.gate_layers!r} is not understood: use {', '.join(LAYER_NAMES)}, or indices such as "
                "'3,4,5'."
            ) from None
