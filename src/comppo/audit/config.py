"""Everything that decides an audit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comppo.audit.continuations import ContinuationConfig
from comppo.audit.operators import OPERATORS, check_operators
from comppo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditConfig:
    """Everything that decides an audit."""

    model: str = "bundled"
    """Hub name, folder or "bundled"."""
    task: str = "chain"
    """As in `comppo train`."""
    task_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task."""
    responses: int = 64
    """Audited responses; a multiple of `group_size`, at least two groups."""
    group_size: int = 8
    """Responses per prompt, at least 2."""
    continuations: int = 32
    """Per valued state; even, at least 4."""
    every: int = 4
    """A state is valued before every so many tokens."""
    operators: tuple[str, ...] = tuple(OPERATORS)
    """Keys of `audit.operators.OPERATORS`; sharpening is always among them."""
    critic_responses: int = 512
    """Responses, to other prompts, that critics are fitted on; rounded down to whole groups."""
    lam: float = 1.0
    """Lambda of the operators with a critic, in [0, 1]."""
    max_new_tokens: int | None = None
    """Greatest length of a response; None: the task's, or 256."""
    temperature: float = 1.0
    """Of sampling."""
    budget_minutes: float | None = None
    """Of the continuations; the rest comes on top."""
    shuffles: int = 8
    """Random orders of the rewards that drift is averaged over; 0 for none."""
    gradients: bool = True
    """Whether policy gradients are compared."""
    proxies: bool = True
    """Whether statistics are tested as proxies of importance."""
    bootstrap: int = 2000
    """Resamples of the prompts."""
    seed: int = 0
    """Of prompts, sampling, critics and resamples."""

    def __post_init__(self) -> None:
        check_operators(self.operators)
        if self.group_size < 2 or self.responses < 2 * self.group_size or self.responses % self.group_size:
            raise ConfigError(
                f"responses={self.responses!r} must be a multiple of group_size={self.group_size!r} (at least 2), and "
                "at least two groups."
            )
        if self.critic_responses < self.group_size:
            raise ConfigError(
                f"critic_responses={self.critic_responses!r} must be at least group_size={self.group_size!r}."
            )
        if not 0.0 <= self.lam <= 1.0:
            raise ConfigError(f"lam must lie in [0, 1], got {self.lam!r}.")
        for name in ("shuffles", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}.")
        self.continuation_config(256)

    def continuation_config(self, max_new_tokens: int) -> ContinuationConfig:
        """The continuations' part of these settings."""
        return ContinuationConfig(
            continuations=self.continuations,
            every=self.every,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            budget_minutes=self.budget_minutes,
        )
