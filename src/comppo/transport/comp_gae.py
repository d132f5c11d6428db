"""Comp-GAE: generalised advantage estimation with one retention gate per token."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError
from comppo.transport._block import Block, Scratch, row_blocks
from comppo.transport._checks import (
    needed,
    require_finite,
    require_positive,
    require_shapes,
    require_unit,
    trained,
)
from comppo.transport.kernel import transport_kernel
from comppo.transport.recurrence import carry_back_, working_dtype
from comppo.types import Credit, Evidence

Lam = float | Float[Tensor, " rows"]


@torch.no_grad()
def comp_gae(
    rewards: Float[Tensor, "rows tokens"],
    values: Float[Tensor, "rows tokens"],
    gates: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    gamma: float,
    lam: Lam,
    bootstrap_values: Float[Tensor, " rows"] | None = None,
    critic_lam: Lam | None = None,
    gate_bootstrap: bool = True,
    gate_trace: bool = True,
) -> Credit:
    """Advantages and critic targets where token t keeps the share `gates[t]` of what comes after it.

        delta_t = r_t + gamma * g_t * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * g_t * A_{t+1}
        R_t     = A_t + V_t = r_t + gamma * g_t * ((1 - lam) * V_{t+1} + lam * R_{t+1})

    V_{t+1} is the value at the row's next unmasked token. gates = 1 is GAE; a constant gate c is GAE with the discount
    gamma * c and the same lambda. Masked slots are transparent, and whatever stands there is ignored.

    Args:
        rewards: reward per token, reward units.
        values: V(s_t), reward units.
        gates: share of later credit that token t keeps, unitless, in [0, 1].
        mask: true where the policy chose the token.
        gamma: discount per token, unitless, in [0, 1].
        lam: trace decay, unitless, in [0, 1]; one number, or one per row.
        bootstrap_values: V(s_T) of responses that were cut off, reward units; None means 0.
        critic_lam: lambda of the critic's target; None means `lam`.
        gate_bootstrap: whether the gate multiplies V_{t+1} in delta_t.
        gate_trace: whether the gate multiplies A_{t+1}.

    Returns:
        Credit in the widest dtype of rewards and values, detached; 0 at masked slots.

    Raises:
        ConfigError: gamma, lam or critic_lam outside [0, 1].
        EvidenceError: shapes differ, gates outside [0, 1], or rewards, values or gates not finite at unmasked tokens.

    Source:
        GAE (arXiv:1506.02438, eq. 16); the gates are ours, after the abstract of arXiv:2608.21501.
    """
    require_shapes(mask, rows={"bootstrap_values": bootstrap_values}, rewards=rewards, values=values, gates=gates)
    require_unit("gamma", gamma)
    given = torch.promote_types(rewards.dtype, values.dtype)
    dtype = working_dtype(rewards, values)
    trace = _per_row("lam", lam, mask, dtype)
    critic_trace = None if critic_lam is None else _per_row("critic_lam", critic_lam, mask, dtype)
    advantages = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    returns = torch.empty_like(advantages)
    bootstrap = advantages.new_zeros(mask.shape[0]) if bootstrap_values is None else bootstrap_values.detach().to(dtype)
    gauges: list[tuple[Tensor, Tensor]] = []
    scratch = Scratch()
    for rows in row_blocks(mask):
        block = Block(rows, scratch, rewards, values, gates, mask, bootstrap)
        low, high = torch.aminmax(block.gates)
        gauges.append((low, high))
        targets, credit = returns[rows], advantages[rows]
        _lambda_returns(block, gamma, _pick(trace, rows), gate_bootstrap, gate_trace, work=credit, out=targets)
        block.clear_masked_(torch.sub(targets, block.values, out=credit))
        if critic_trace is not None:
            work = block.take("work")
            _lambda_returns(block, gamma, _pick(critic_trace, rows), gate_bootstrap, gate_trace, work=work, out=targets)
        block.clear_masked_(targets)
    _check_content(gauges, advantages, rewards, values, gates, mask, bootstrap)
    return Credit(advantages=advantages.to(given), returns=returns.to(given))


def _lambda_returns(
    block: Block,
    gamma: float,
    lam: float | Tensor,
    gate_bootstrap: bool,
    gate_trace: bool,
    *,
    work: Tensor,
    out: Tensor,
) -> None:
    """Write R_t for the rows of `block` to `out`, anything at masked slots; uses up `work`."""
    if not (gate_bootstrap and gate_trace):
        credit = block.td_errors(gamma, gate_bootstrap, work=work, spare=out)
        carry_back_(credit, block.decays(gamma * lam, gate_trace, spare=out), torch.zeros_like(block.bootstrap))
        torch.add(credit, block.values, out=out)
        return
    # With U = (1 - lam) * V + lam * R the definition reads R_t = r_t + gamma * g_t * U_{t+1}, and so
    # U_t = (1 - lam) * V_t + lam * r_t + gamma * lam * g_t * U_{t+1}: one scan, in which a masked slot is simply a
    # delta of 0 with a decay of 1, and nobody has to look for the next unmasked value.
    carried = block.clear_masked_(torch.lerp(block.values, block.rewards, lam, out=work))
    carry_back_(carried, block.decays(gamma * lam, gated=True, spare=out), block.bootstrap)
    rewards, gates = block.rewards, block.gates
    torch.addcmul(rewards[:, :-1], gates[:, :-1], carried[:, 1:], value=gamma, out=out[:, :-1])
    torch.addcmul(rewards[:, -1], gates[:, -1], block.bootstrap, value=gamma, out=out[:, -1])


def _per_row(name: str, lam: Lam, mask: Tensor, dtype: torch.dtype) -> float | Tensor:
    """A checked lambda: a number, or a column (rows, 1)."""
    if not isinstance(lam, Tensor):
        require_unit(name, lam)
        return lam
    require_shapes(mask, rows={name: lam})
    if not bool(((lam >= 0) & (lam <= 1)).all()):  # False for NaN too
        raise ConfigError(f"{name} must lie in [0, 1] for every row, got {lam.tolist()}.")
    return lam.detach().to(dtype)[:, None]


def _pick(lam: float | Tensor, rows: slice) -> float | Tensor:
    return lam[rows] if isinstance(lam, Tensor) else lam


def _check_content(
    gauges: list[tuple[Tensor, Tensor]],
    advantages: Tensor,
    rewards: Tensor,
    values: Tensor,
    gates: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
) -> None:
    """One look, one synchronisation: a bad number in the inputs cannot leave both gauges good.

    Masked gates count as 0. A reward, value or bootstrap value that is not finite makes the advantage of its token
    NaN or infinite, and so the sum. Which tensor it was is only worked out then.
    """
    if not gauges:
        return
    low = torch.stack([low for low, _ in gauges]).amin()
    high = torch.stack([high for _, high in gauges]).amax()
    least, greatest, finite = torch.stack((low, high, torch.isfinite(advantages.sum()).to(low.dtype))).tolist()
    if not (least >= 0.0 and greatest <= 1.0):  # also when NaN
        require_finite("gates", gates, mask)
        raise EvidenceError(
            f"gates must lie in [0, 1] at unmasked tokens, got a range of [{least!r}, {greatest!r}]: "
            "use gate_from_statistic, or clamp them."
        )
    if not finite:
        require_finite("rewards", rewards, mask)
        require_finite("values", values, mask)
        require_finite("bootstrap_values", bootstrap, mask.any(1))


@torch.no_grad()
def length_adaptive_lam(mask: Bool[Tensor, "rows tokens"], alpha: float) -> Float[Tensor, " rows"]:
    """lambda = 1 - 1 / (alpha * length), clamped to [0, 1]: long responses keep long traces.

    Args:
        mask: true where the policy chose the token; a row's length is its count.
        alpha: 1 / alpha is the share of the length that the trace forgets, unitless, above 0.

    Returns:
        One lambda per row, float32; empty rows count as one token long.

    Raises:
        ConfigError: alpha is not above 0.

    Source:
        VAPO (arXiv:2504.05118, sec. 4.2), which uses alpha = 0.05 and a critic target with lambda 1.
    """
    require_shapes(mask)
    require_positive("alpha", alpha)
    lengths = mask.sum(1).clamp(min=1).to(torch.float32)
    return (1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompGAE:
    """`comp_gae` as an operator. Needs values and gates.

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
    gate_bootstrap: bool = True
    """Whether the gate multiplies the next value."""
    gate_trace: bool = True
    """Whether the gate multiplies the next advantage."""

    needs = frozenset({"values", "gates"})

    def __post_init__(self) -> None:
        require_unit("gamma", self.gamma)
        require_unit("lam", self.lam)
        if self.critic_lam is not None:
            require_unit("critic_lam", self.critic_lam)
        if self.length_alpha is not None:
            require_positive("length_alpha", self.length_alpha)

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages and critic targets; 0 in rows that are not scorable.

        Args:
            evidence: one batch, with the fields in `needs`.

        Returns:
            Credit of shape (rows, tokens), detached; 0 at masked slots.

        Raises:
            EvidenceError: values or gates are missing or hold numbers that are not allowed.
        """
        return comp_gae(
            evidence.rewards,
            needed(evidence, "values", "CompGAE"),
            needed(evidence, "gates", "CompGAE"),
            trained(evidence),
            gamma=self.gamma,
            lam=self._lam(evidence),
            bootstrap_values=evidence.bootstrap_values,
            critic_lam=self.critic_lam,
            gate_bootstrap=self.gate_bootstrap,
            gate_trace=self.gate_trace,
        )

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """TD errors delta_t, reward units; 0 at masked slots."""
        values, gates = needed(evidence, "values", "CompGAE"), needed(evidence, "gates", "CompGAE")
        dtype = working_dtype(evidence.rewards, values)
        boots = evidence.bootstrap_values
        with torch.no_grad():
            bootstrap = values.new_zeros(values.shape[0], dtype=dtype) if boots is None else boots.detach().to(dtype)
            mask = trained(evidence)
            block = Block(slice(None), Scratch(), evidence.rewards, values, gates, mask, bootstrap)
            return block.td_errors(self.gamma, self.gate_bootstrap, work=block.take("work"), spare=block.take("spare"))

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """K[t, u] = product of gamma * lambda * g_i over the unmasked i in [t, u)."""
        gates = needed(evidence, "gates", "CompGAE").detach()
        gates = (
            gates.to(working_dtype(gates)) if self.gate_trace else torch.ones_like(gates, dtype=working_dtype(gates))
        )
        lam = self._lam(evidence)
        return transport_kernel(
            gates * self.gamma * (lam[:, None] if isinstance(lam, Tensor) else lam), trained(evidence)
        )

    def _lam(self, evidence: Evidence) -> Lam:
        return self.lam if self.length_alpha is None else length_adaptive_lam(trained(evidence), self.length_alpha)
