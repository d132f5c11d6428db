"""Redistribution: sums kept, broadcast as a special case, weights checked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import EvidenceError
from comppo.transport import Redistribute, group_relative, redistribute
from comppo.types import Evidence

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def test_three_tokens_by_hand():
    """Residual 2 on 3 tokens is 6 in all, split 1 : 2 : 3; a negative one by its own weights, 3 : 1 : 0."""
    residuals = torch.tensor([2.0, -2.0], dtype=F64)
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1]]).bool()
    weights = torch.tensor([[1.0, 50.0, 2.0, 3.0]], dtype=F64).expand(2, 4)
    negative = torch.tensor([[3.0, 50.0, 1.0, 0.0]], dtype=F64).expand(2, 4)
    got = redistribute(residuals, weights, mask, negative_weights=negative)
    assert torch.equal(got, torch.tensor([[1.0, 0, 2, 3], [-4.5, 0, -1.5, 0]], dtype=F64))
    got = redistribute(residuals, weights, mask)
    assert torch.equal(got[1], -got[0])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), tokens=st.integers(0, 70), scale=st.floats(1e-290, 1e290))
def test_sum_kept_whatever_the_scale_of_the_weights(make_rollout, poison, seed, rows, tokens, scale):
    rollout = make_rollout(seed, rows, tokens)
    residuals = rollout.bootstrap_values
    got = redistribute(residuals, poison(rollout.weights * scale, rollout.mask), rollout.mask)
    lengths = rollout.mask.sum(1)
    torch.testing.assert_close(got.sum(1), residuals * lengths, **EXACT)
    assert not bool(got[~rollout.mask].any())
    torch.testing.assert_close(got, redistribute(residuals, rollout.weights, rollout.mask), **EXACT)


@pytest.mark.parametrize("weight", [0.0, 1.0, 7.0])
def test_equal_weights_and_no_weights_are_the_broadcast(make_rollout, weight):
    rollout = make_rollout(1, 4, 30)
    rewards = rollout.bootstrap_values
    evidence = Evidence(
        rewards=rollout.rewards,
        mask=rollout.mask,
        response_rewards=rewards,
        weights=torch.full_like(rollout.rewards, weight),
        num_generations=2,
    )
    for settings_ in ({"baseline": "group_mean", "scale": "group"}, {"baseline": "leave_one_out", "scale": "none"}):
        got = Redistribute(**settings_)(evidence)
        want = group_relative(rewards, rollout.mask, num_generations=2, **settings_)
        torch.testing.assert_close((got.advantages, got.returns), (want.advantages, want.returns), **EXACT)


@pytest.mark.parametrize("name", ["weights", "negative_weights"])
@pytest.mark.parametrize("number", [-1e-9, float("nan"), float("inf")])
def test_weights_that_are_no_shares_are_named(make_rollout, name, number):
    rollout = make_rollout(0, 2, 20)
    good, bad = rollout.weights, rollout.weights.clone()
    bad[tuple(rollout.mask.nonzero()[1])] = number
    given_weights = {"weights": good, "negative_weights": good} | {name: bad}
    with pytest.raises(EvidenceError, match=rf"^{name} holds"):
        redistribute(rollout.bootstrap_values, mask=rollout.mask, **given_weights)


def test_residuals_that_are_not_finite_are_named_and_nothing_is_attached(make_rollout):
    rollout = make_rollout(0, 2, 20)
    with pytest.raises(EvidenceError, match="residuals holds nan"):
        redistribute(rollout.bootstrap_values * float("nan"), rollout.weights, rollout.mask)
    got = redistribute(rollout.bootstrap_values.requires_grad_(), rollout.weights.requires_grad_(), rollout.mask)
    assert not got.requires_grad
