"""Prefix-tree values: what the other responses to the same prompt say about each prefix. No critic is needed."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.errors import ConfigError
from comppo.transport._checks import (
    needed,
    outcomes,
    require_finite,
    require_groups,
    require_positive,
    require_shapes,
    trained,
)
from comppo.transport.broadcast import outcome_targets
from comppo.transport.kernel import transport_kernel
from comppo.transport.redistribute import token_shares
from comppo.types import Credit, Evidence


@torch.no_grad()
def prefix_values(
    completion_ids: Int[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    response_rewards: Float[Tensor, " rows"],
    *,
    num_generations: int,
    prior: float = 1.0,
    scorable: Bool[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows tokens_and_end"]:
    """Leave-one-out value of every prefix of every response.

        V(prefix) = (sum of the outcomes of the others that share it + prior * M) / (their count + prior)

    where M is the mean outcome of all the others in the group. A response never sees its own outcome, so the values are
    valid baselines. Sequences are compared without their masked tokens.

    Args:
        completion_ids: token ids; whatever stands at masked slots is ignored.
        mask: true where the policy chose the token.
        response_rewards: outcome of each response, reward units.
        num_generations: responses per prompt, at least 2.
        prior: how many responses the mean of the others counts for, above 0.
        scorable: false where no reward function could score the response: it counts nowhere. None means all rows whose
            reward is not NaN.

    Returns:
        Shape (rows, tokens + 1), reward units, dtype of the rewards: index t is the value before token t, the last
        index the value after the last token. A masked slot has the value of the prefix so far. 0 in rows that have no
        scorable other.

    Raises:
        ConfigError: num_generations is 1, or prior is not above 0.
        EvidenceError: shapes do not fit, or the reward of a scorable row is not finite.

    Source:
        Ours. Means over responses that share a prefix: Monte Carlo estimates of V as in VinePPO (arXiv:2410.01679),
        but from the group's own responses.
    """
    if num_generations == 1:
        raise ConfigError(
            "prefix_tree needs several responses per prompt, got num_generations=1: sample more, or use an operator "
            'with a critic ("gae", "comp_gae").'
        )
    require_positive("prior", prior)
    require_shapes(
        mask, completion_ids=completion_ids, rows={"response_rewards": response_rewards, "scorable": scorable}
    )
    require_groups(mask.shape[0], num_generations)
    rewards = response_rewards.detach()
    scored = ~rewards.isnan() if scorable is None else scorable
    require_finite("response_rewards", rewards, scored)
    rewards = torch.where(scored, rewards, 0).view(-1, num_generations)
    shared = _shared_lengths(completion_ids, mask, num_generations)
    prefixes = torch.cat((mask.new_zeros(mask.shape[0], 1, dtype=torch.long), mask.cumsum(1)), dim=1)
    return _means(rewards, scored.view(-1, num_generations), shared, prefixes, prior)


def _shared_lengths(completion_ids: Tensor, mask: Tensor, num_generations: int) -> Tensor:
    """How many unmasked tokens rows i and j of a group have in common from the start: (groups, i, j)."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # unmasked tokens first, in their order
    groups = (mask.shape[0] // num_generations, num_generations, mask.shape[1])
    ids, kept = completion_ids.gather(1, order).view(groups), mask.gather(1, order).view(groups)
    columns = []
    for j in range(num_generations):  # one column of pairs at a time: memory stays that of the ids
        same = (ids == ids[:, j : j + 1]) & kept & kept[:, j : j + 1]
        columns.append(same.to(torch.uint8).cumprod(2, dtype=torch.uint8).sum(2))
    return torch.stack(columns, dim=2)


def _means(rewards: Tensor, scored: Tensor, shared: Tensor, prefixes: Tensor, prior: float) -> Tensor:
    """Values of the prefixes with the lengths `prefixes` (rows, tokens + 1)."""
    num_generations = rewards.shape[1]
    dtype = torch.promote_types(torch.float32, rewards.dtype)
    others = ~torch.eye(num_generations, dtype=torch.bool, device=rewards.device) & scored[:, None, :]
    count = others.sum(2)
    mean = torch.where(others, rewards.to(dtype)[:, None, :], 0).sum(2) / count.clamp(min=1)
    lengths = prefixes.view(*rewards.shape, -1)
    weight = torch.full(lengths.shape, prior, dtype=dtype, device=rewards.device)
    total = prior * mean[:, :, None].expand(lengths.shape)
    for j in range(num_generations):
        shares = (lengths <= shared[:, :, j, None]) & others[:, :, j, None]
        weight = weight + shares
        total = total + shares * rewards.to(dtype)[:, j, None, None]
    return (total / weight).view(prefixes.shape).to(rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """Differences of prefix values as advantages, with what is left at the leaf spread over the response.

        A_t = V_{t+1} - V_t + (outcome - V_T) * w_t / sum(w)

    so a row's advantages sum to outcome - V_0. They are true one-step advantages, and the leaf's remainder is spread on
    that scale: its shares sum to 1. `redistribute` starts from the broadcast, where every token gets the whole residual
    and a row sums to n times it; its result for the leaf's remainder, divided by n, is what is added here. Whitening
    removes the difference in overall scale, but not that long responses weigh more under `redistribute`.

    Needs completion_ids; weights and negative_weights (by the sign of the remainder) are used where given, otherwise
    the remainder is spread evenly.

    Raises:
        ConfigError: prior is not above 0.
    """

    prior: float = 1.0
    """How many responses the mean of the others counts for, above 0."""

    needs = frozenset({"completion_ids"})

    def __post_init__(self) -> None:
        require_positive("prior", self.prior)

    def __call__(self, evidence: Evidence) -> Credit:
        """Advantages, and as critic targets the outcome at every unmasked token; 0 in rows that are not scorable.

        The leaf's remainder may be read as a correction of the value path, V'_t = V_t + its shares before t, which ends
        at the outcome: the advantages are the TD errors of V', and V'_t plus the advantages to go is the outcome.

        Args:
            evidence: one batch, with the fields in `needs`.

        Returns:
            Credit of shape (rows, tokens), detached; 0 at masked slots.

        Raises:
            ConfigError: num_generations is 1.
            EvidenceError: completion_ids are missing, weights are negative or not finite, or the outcome of a scorable
                row is not finite.
        """
        rewards = outcomes(evidence)
        targets = outcome_targets(rewards, evidence.mask, evidence.scorable)
        return Credit(advantages=self.deltas(evidence), returns=targets)

    def deltas(self, evidence: Evidence) -> Float[Tensor, "rows tokens"]:
        """TD errors of the corrected value path, reward units; 0 at masked slots: the advantages themselves."""
        rewards, mask = outcomes(evidence), trained(evidence)
        values = prefix_values(
            needed(evidence, "completion_ids", "PrefixTree"),
            evidence.mask,
            rewards,
            num_generations=evidence.num_generations,
            prior=self.prior,
            scorable=evidence.scorable,
        )
        with torch.no_grad():
            mask = mask & self._has_others(evidence, rewards)[:, None]
            left = torch.where(mask.any(1), rewards - values[:, -1], 0)
            shares = token_shares(left, evidence.weights, mask, evidence.negative_weights)
            return torch.where(mask, values.diff(dim=1) + left[:, None] * shares, 0).to(rewards.dtype)

    def kernel(self, evidence: Evidence) -> Float[Tensor, "rows tokens tokens"]:
        """The identity on unmasked tokens: values come from a tree, so nothing has to be carried further."""
        return transport_kernel(torch.zeros_like(evidence.rewards), trained(evidence))

    def _has_others(self, evidence: Evidence, rewards: Tensor) -> Tensor:
        """True for scorable rows with another scorable response in the group: the rest has no baseline."""
        scored = ~rewards.isnan() if evidence.scorable is None else evidence.scorable
        return scored & (scored.view(-1, evidence.num_generations).sum(1) > 1).repeat_interleave(
            evidence.num_generations
        )
