"""GAE: the special case of Comp-GAE in which every gate is 1."""

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.transport._checks import needed
from comppo.transport.comp_gae import CompGAE, Lam, comp_gae
from comppo.types import Credit, Evidence


def gae(
    rewards: Float[Tensor, "rows tokens"],
    values: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    gamma: float,
    lam: Lam,
    bootstrap_values: Float[Tensor, " rows"] | None = None,
    critic_lam: Lam | None = None,
) -> Credit:
    """Generalised advantage estimation: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Args:
        rewards: reward per token, reward units.
        values: V(s_t), reward units.
        mask: true where the policy chose the token; other slots are transparent.
        gamma: discount per token, unitless, in [0, 1].
        lam: trace decay, unitless, in [0, 1]; one number, or one per row.
        bootstrap_values: V(s_T) of responses that were cut off, reward units; None means 0.
        critic_lam: lambda of the critic's target; None means `lam`.

    Returns:
        Credit in the widest dtype of rewards and values, detached; 0 at masked slots.

    Raises:
        ConfigError: gamma, lam or critic_lam outside [0, 1].
        EvidenceError: shapes differ, or rewards or values are not finite at unmasked tokens.

    Source:
        Schulman et al., arXiv:1506.02438, eq. 16; separate lambdas for policy and critic: VAPO, arXiv:2504.05118.
    """
    return comp_gae(
        rewards,
        values,
        torch.ones_like(values),
        mask,
        gamma=gamma,
        lam=lam,
        bootstrap_values=bootstrap_values,
        critic_lam=critic_lam,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GAE:
    """`gae` as an operator. Needs values; gates in the evidence are not looked at.

    Raises:
        ConfigError: a setting is out of range.
    """

    gamma: float = 1.0
    """Discount per token, unitless, in [0, 1]."""
    lam: float = 0.95
    """Trace decay of the policy's advantages, unitless, in [0, 1]."""
    length_alpha: float | None = None
    """If given, lambda is `length_adaptive_lam(mask, length_alpha)` and `lam` is not used."""
    critic_lam: float | None = None
    """Trace decay of the critic's target; None means the policy's."""

    needs = frozenset({"values"})

    def __post_init__(self) -> None:
        self._gated()

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages and critic targets; 0 in rows that are not scorable.

        Args:
            evidence: one batch, with the fields in `needs`.

        Returns:
            Credit of shape (rows, tokens), detached; 0 at masked slots.

        Raises:
            EvidenceError: values are missing, or rewards or values are not finite at unmasked tokens.
        """
        return self._gated()(_ungated(evidence))

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """TD errors delta_t, reward units; 0 at masked slots."""
        return self._gated().deltas(_ungated(evidence))

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """K[t, u] = (gamma * lambda) to the number of unmasked tokens in [t, u)."""
        return self._gated().kernel(_ungated(evidence))

    def _gated(self) -> CompGAE:
        return CompGAE(gamma=self.gamma, lam=self.lam, length_alpha=self.length_alpha, critic_lam=self.critic_lam)


def _ungated(evidence: Evidence) -> Evidence:
    return dataclasses.replace(evidence, gates=torch.ones_like(needed(evidence, "values", "GAE")))
