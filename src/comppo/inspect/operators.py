"""What an operator gave to each token, with how it carried it, so that a page can say where credit comes from."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comppo.transport import GAE, CompGAE, GroupRelative, PrefixTree, Redistribute, length_adaptive_lam
from comppo.transport.redistribute import signed_weights
from comppo.types import Evidence, TransportOperator


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorCredit:
    """Credit of one operator for a batch; all (rows, tokens), whatever stands at masked tokens is ignored.

    With `decays`, A[t] = deltas[t] + decays[t] A[t+1] over unmasked tokens. With `weights`, K[t, u] = n_u w_t / W_u,
    where n_u and W_u count and sum the unmasked tokens up to u (`Redistribute.kernel`).
    """

    advantages: Float[Tensor, "rows tokens"]
    about: str = ""
    """A sentence for the legend."""
    gates: Float[Tensor, "rows tokens"] | None = None
    """Unitless, in [0, 1]."""
    deltas: Float[Tensor, "rows tokens"] | None = None
    """What is carried, units of the advantages."""
    decays: Float[Tensor, "rows tokens"] | None = None
    """Unitless, in [0, 1]."""
    weights: Float[Tensor, "rows tokens"] | None = None
    """Non-negative, any scale."""


def operator_credit(operator: TransportOperator, evidence: Evidence, *, about: str = "") -> OperatorCredit:
    """Run an operator, and say how it carries.

    Args:
        operator: one of comppo's, or your own; of the latter only the advantages are known.
        evidence: one batch, with what the operator needs.
        about: a sentence for the legend.

    Returns:
        Its advantages in reward units. For comppo's operators `deltas` and either `decays` or `weights` as well, so
        that K @ deltas gives the advantages without a (tokens, tokens) matrix.

    Raises:
        EvidenceError: as the operator raises it.
    """
    parts: dict[str, Any] = {}
    if isinstance(operator, CompGAE | GAE):
        lam: Any = operator.lam
        if operator.length_alpha is not None:
            lam = length_adaptive_lam(_trained(evidence), operator.length_alpha)[:, None]
        parts["decays"] = torch.ones_like(evidence.rewards) * operator.gamma * lam
        if isinstance(operator, CompGAE) and evidence.gates is not None:
            parts["gates"] = evidence.gates
            if operator.gate_trace:
                parts["decays"] = parts["decays"] * evidence.gates
    elif isinstance(operator, GroupRelative):
        parts["decays"] = torch.ones_like(evidence.rewards)
    elif isinstance(operator, PrefixTree):
        parts["decays"] = torch.zeros_like(evidence.rewards)
    elif isinstance(operator, Redistribute):
        residuals = operator.deltas(evidence).sum(1)
        parts["weights"] = signed_weights(residuals, evidence.weights, _trained(evidence), evidence.negative_weights)
    if parts:
        parts["deltas"] = operator.deltas(evidence)
    return OperatorCredit(advantages=operator(evidence).advantages, about=about, **parts)


def _trained(evidence: Evidence) -> Tensor:
    """Unmasked tokens of scorable rows."""
    return evidence.mask if evidence.scorable is None else evidence.mask & evidence.scorable[:, None]
