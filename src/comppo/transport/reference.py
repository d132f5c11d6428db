"""The definitions as plain float64 loops, written without looking at the fast versions. For tests and benchmarks only.

Each row is first compacted: masked tokens are taken out, the loop runs over what is left, and the results are put back.
"""

import torch
from torch import Tensor


def comp_gae_loop(
    rewards: Tensor,
    values: Tensor,
    gates: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | list[float],
    bootstrap_values: Tensor | None = None,
    gate_bootstrap: bool = True,
    gate_trace: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of Comp-GAE, float64, shape (rows, tokens); 0 at masked slots.

    Args:
        rewards: (rows, tokens), reward units.
        values: (rows, tokens), reward units.
        gates: (rows, tokens), unitless.
        mask: (rows, tokens), boolean.
        gamma: discount.
        lam: trace decay, or a list of one per row.
        bootstrap_values: (rows,), reward units; None means 0.
        gate_bootstrap: whether the next value is gated.
        gate_trace: whether the next advantage is gated.

    Returns:
        Advantages and returns.
    """
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for row, kept in enumerate(mask.tolist()):
        slots = [t for t, keep in enumerate(kept) if keep]
        decay = lam[row] if isinstance(lam, list) else lam
        next_value = 0.0 if bootstrap_values is None else float(bootstrap_values[row])
        next_advantage = 0.0
        for t in reversed(slots):
            reward, value, gate = float(rewards[row, t]), float(values[row, t]), float(gates[row, t])
            delta = reward + gamma * (gate if gate_bootstrap else 1.0) * next_value - value
            advantage = delta + gamma * decay * (gate if gate_trace else 1.0) * next_advantage
            advantages[row, t] = advantage
            returns[row, t] = advantage + value
            next_value, next_advantage = value, advantage
    return advantages, returns


def carry_back_loop(deltas: Tensor, decays: Tensor) -> Tensor:
    """A[t] = deltas[t] + decays[t] * A[t+1] in float64, shape (rows, tokens)."""
    credit = torch.zeros(deltas.shape, dtype=torch.float64)
    for row in range(deltas.shape[0]):
        carried = 0.0
        for t in reversed(range(deltas.shape[1])):
            carried = float(deltas[row, t]) + float(decays[row, t]) * carried
            credit[row, t] = carried
    return credit


def prefix_values_loop(
    completion_ids: Tensor, mask: Tensor, response_rewards: Tensor, *, num_generations: int, prior: float
) -> Tensor:
    """Leave-one-out prefix values by a dictionary of prefixes, float64, shape (rows, tokens + 1).

    Args:
        completion_ids: (rows, tokens).
        mask: (rows, tokens), boolean.
        response_rewards: (rows,); NaN where the response could not be scored.
        num_generations: responses per prompt.
        prior: weight of the mean of the others.

    Returns:
        Values; 0 in rows without a scored other.
    """
    rows, tokens = mask.shape
    values = torch.zeros(rows, tokens + 1, dtype=torch.float64)
    outcome = [float(reward) for reward in response_rewards]
    for row in range(rows):
        start = row - row % num_generations
        others = [j for j in range(start, start + num_generations) if j != row and outcome[j] == outcome[j]]
        if not others:
            continue
        tree: dict[tuple[int, ...], list[float]] = {}
        for j in others:
            sequence = [int(i) for i, keep in zip(completion_ids[j], mask[j], strict=True) if keep]
            for length in range(len(sequence) + 1):
                tree.setdefault(tuple(sequence[:length]), []).append(outcome[j])
        mean = sum(tree[()]) / len(tree[()])
        prefix: tuple[int, ...] = ()
        for t in range(tokens + 1):
            found = tree.get(prefix, [])
            values[row, t] = (sum(found) + prior * mean) / (len(found) + prior)
            if t < tokens and mask[row, t]:
                prefix = (*prefix, int(completion_ids[row, t]))
    return values
