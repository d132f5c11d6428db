"""GAE: the recursion on its own terms, and Monte Carlo and TD as its ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.transport import GAE, comp_gae, gae
from comppo.types import Evidence

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("tokens", [1, 2, 63, 1000])
def test_geometric_tail(tokens):
    """Reward 1 at every token, V = 0: A_t = (1 - d^(T-t)) / (1 - d) with d = gamma * lam."""
    ones = torch.ones(1, tokens, dtype=torch.float64)
    decay = 0.99 * 0.95
    left = torch.arange(tokens, 0, -1, dtype=torch.float64)[None]
    credit = gae(ones, ones * 0, ones.bool(), gamma=0.99, lam=0.95)
    torch.testing.assert_close(credit.advantages, (1 - decay**left) / (1 - decay), **EXACT)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 80))
def test_lambda_one_is_monte_carlo_and_zero_is_one_step(make_rollout, seed, tokens):
    rollout = make_rollout(seed, 1, tokens, keep=2.0)
    rewards, values = rollout.rewards, rollout.values
    mask = torch.ones_like(rollout.mask)
    credit = gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap_values=rollout.bootstrap_values)
    to_go = rewards.flip(1).cumsum(1).flip(1) + rollout.bootstrap_values[:, None]
    torch.testing.assert_close(credit.returns, to_go, **EXACT)
    torch.testing.assert_close(credit.advantages, to_go - values, **EXACT)
    credit = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    following = torch.cat((values[:, 1:], torch.zeros(1, 1, dtype=torch.float64)), 1)
    torch.testing.assert_close(credit.advantages, rewards + 0.9 * following - values, **EXACT)


def test_critic_lambda_moves_returns_alone(make_rollout):
    rollout = make_rollout(3, 3, 50)
    inputs = (rollout.rewards, rollout.values, rollout.mask)
    both = gae(*inputs, gamma=1.0, lam=0.9, critic_lam=1.0)
    policy, critic = gae(*inputs, gamma=1.0, lam=0.9), gae(*inputs, gamma=1.0, lam=1.0)
    assert torch.equal(both.advantages, policy.advantages) and torch.equal(both.returns, critic.returns)
    assert not torch.allclose(policy.returns, critic.returns)


def test_operator_ignores_gates_and_reads_lambda_from_the_lengths(make_rollout):
    """alpha 0.05: rows of 40 and 10 tokens have lambda 0.5 and 0."""
    rollout = make_rollout(3, 2, 40)
    mask = torch.arange(40) < torch.tensor([[40], [10]])
    evidence = Evidence(rewards=rollout.rewards, values=rollout.values, mask=mask, gates=rollout.gates)
    got = GAE(length_alpha=0.05, critic_lam=1.0)(evidence)
    ones = torch.ones_like(rollout.values)
    want = comp_gae(
        rollout.rewards, rollout.values, ones, mask, gamma=1.0, lam=torch.tensor([0.5, 0.0]), critic_lam=1.0
    )
    torch.testing.assert_close((got.advantages, got.returns), (want.advantages, want.returns), rtol=1e-6, atol=1e-6)
