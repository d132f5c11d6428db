"""Prefix-tree values by hand and against a dictionary of prefixes; totals of the advantages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import PrefixTree, prefix_values, redistribute
from comppo.transport.reference import prefix_values_loop
from comppo.types import Evidence

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def test_three_responses_by_hand():
    """Responses ab (1), ac (0), bb (0), prior 1.

    First row: the others have mean 0, so V_0 = 0; ac shares a: (0 + 0)/2; nobody shares ab: 0.
    Second row: the others have mean 1/2: V_0 = (1 + 1/2)/3; ab shares a: (1 + 1/2)/2; nobody shares ac: 1/2.
    Third row: mean 1/2, V_0 = 1/2, nobody shares b.
    """
    ids = torch.tensor([[0, 1], [0, 2], [1, 1]])
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    values = prefix_values(ids, torch.ones(3, 2, dtype=torch.bool), rewards, num_generations=3)
    expected = torch.tensor([[0, 0, 0], [0.5, 0.75, 0.5], [0.5, 0.5, 0.5]], dtype=F64)
    torch.testing.assert_close(values, expected, **EXACT)
    evidence = Evidence(
        rewards=torch.zeros(3, 2, dtype=F64),
        mask=torch.ones(3, 2, dtype=torch.bool),
        completion_ids=ids,
        response_rewards=rewards,
        num_generations=3,
    )
    # Leaf remainders 1, -1/2, -1/2, spread evenly over two tokens.
    expected = torch.tensor([[0.5, 0.5], [0.25 - 0.25, -0.25 - 0.25], [-0.25, -0.25]], dtype=F64)
    torch.testing.assert_close(PrefixTree()(evidence).advantages, expected, **EXACT)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(0, 12), prior=st.floats(0.1, 5), unscored=st.floats(0, 1))
@pytest.mark.parametrize("num_generations", [2, 5])
def test_matches_a_dictionary_of_prefixes(make_rollout, seed, tokens, prior, unscored, num_generations):
    rollout = make_rollout(seed, 2 * num_generations, tokens, keep=0.8)
    generator = torch.Generator().manual_seed(seed)
    lost = torch.rand(2 * num_generations, generator=generator) < unscored
    rewards = torch.where(lost, math.nan, rollout.bootstrap_values)
    shape = {"num_generations": num_generations, "prior": prior}
    expected = prefix_values_loop(rollout.ids, rollout.mask, rewards, **shape)
    got = prefix_values(rollout.ids, rollout.mask, rewards, **shape)
    torch.testing.assert_close(got, expected, **EXACT)
    junk = torch.where(rollout.mask, rollout.ids, 7 + torch.arange(tokens))
    got = prefix_values(junk, rollout.mask, rewards.nan_to_num(nan=5.0), scorable=~lost, **shape)
    torch.testing.assert_close(got, expected, **EXACT)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 20))
def test_totals_are_outcome_minus_first_value(make_rollout, seed, tokens):
    rollout = make_rollout(seed, 8, tokens, keep=0.8)
    evidence = Evidence(
        rewards=rollout.rewards,
        mask=rollout.mask,
        completion_ids=rollout.ids,
        response_rewards=rollout.bootstrap_values,
        weights=rollout.weights,
        negative_weights=1 - rollout.weights,
        num_generations=4,
    )
    credit = PrefixTree(prior=0.5)(evidence)
    values = prefix_values(rollout.ids, rollout.mask, rollout.bootstrap_values, num_generations=4, prior=0.5)
    lengths = rollout.mask.sum(1)
    total = torch.where(lengths > 0, rollout.bootstrap_values - values[:, 0], 0)
    torch.testing.assert_close(credit.advantages.sum(1), total, **EXACT)
    left = rollout.bootstrap_values - values[:, -1]
    spread = redistribute(left, rollout.weights, rollout.mask, negative_weights=1 - rollout.weights)
    want = torch.where(rollout.mask, values.diff(dim=1), 0) + spread / lengths.clamp(min=1)[:, None]
    torch.testing.assert_close(credit.advantages, want, **EXACT)
    assert torch.equal(credit.returns, torch.where(rollout.mask, rollout.bootstrap_values[:, None], 0))


def test_a_response_never_sees_its_own_outcome(make_rollout):
    rollout = make_rollout(0, 4, 10, keep=2.0)
    rewards = rollout.bootstrap_values
    before = prefix_values(rollout.ids, rollout.mask, rewards, num_generations=4)
    changed = rewards.clone()
    changed[2] += 10
    after = prefix_values(rollout.ids, rollout.mask, changed, num_generations=4)
    assert torch.equal(after[2], before[2]) and not torch.equal(after[1], before[1])


def test_rows_without_a_scored_other_get_no_credit():
    evidence = Evidence(
        rewards=torch.zeros(4, 3),
        mask=torch.ones(4, 3, dtype=torch.bool),
        completion_ids=torch.zeros(4, 3, dtype=torch.long),
        response_rewards=torch.tensor([1.0, math.nan, 1.0, 0.0]),
        scorable=torch.tensor([True, False, True, True]),
        num_generations=2,
    )
    credit = PrefixTree()(evidence)
    assert not bool(credit.advantages[:2].any()) and bool(credit.advantages[2:].any())
    assert not bool(credit.returns[1].any())


def test_errors():
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="prefix_tree needs several responses per prompt, got num_generations=1"):
        prefix_values(ids, mask, torch.zeros(2), num_generations=1)
    for prior in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="prior must be finite and above 0"):
            PrefixTree(prior=prior)
    with pytest.raises(EvidenceError, match="response_rewards holds inf"):
        prefix_values(ids, mask, torch.tensor([math.inf, 0.0]), num_generations=2)
