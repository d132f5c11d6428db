"""Group-relative credit against statistics worked out response by response."""

import math
import os
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import GroupRelative, group_relative, group_residuals
from comppo.types import Evidence

F64 = torch.float64


def by_hand(rewards, num_generations, baseline, scale):
    """One residual per reward; None marks what could not be scored."""
    scored = [reward for reward in rewards if reward is not None]
    residuals = []
    for row, reward in enumerate(rewards):
        start = row - row % num_generations
        group = rewards[start : start + num_generations]
        others = [group[j] for j in range(num_generations) if start + j != row and group[j] is not None]
        mates = [other for other in group if other is not None]
        if reward is None or (baseline == "leave_one_out" and not others):
            residuals.append(0.0)
            continue
        base = {"none": 0.0, "group_mean": statistics.fmean(mates)}.get(baseline)
        residual = reward - (statistics.fmean(others) if base is None else base)
        pool = {"group": mates, "batch": scored}.get(scale)
        if pool is not None:
            residual = 0.0 if len(pool) < 2 else residual / (statistics.stdev(pool) + 1e-4)
        residuals.append(residual)
    return residuals


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.one_of(st.none(), st.floats(-3, 3).map(lambda x: round(x, 3))), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    )
)
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_matches_statistics_by_hand(groups, baseline, scale):
    rewards = [reward for group in groups for reward in group]
    expected = torch.tensor(by_hand(rewards, 4, baseline, scale), dtype=F64)
    marked = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=F64)
    settings = {"num_generations": 4, "baseline": baseline, "scale": scale}
    torch.testing.assert_close(group_residuals(marked, **settings), expected, rtol=1e-9, atol=1e-9)
    scorable = ~marked.isnan()
    junk = marked.nan_to_num(nan=99.0)
    torch.testing.assert_close(group_residuals(junk, scorable=scorable, **settings), expected, rtol=1e-9, atol=1e-9)


def test_every_token_gets_the_residual_and_masked_slots_nothing():
    """GRPO on rewards 1, 0, 0, 1: mean 1/2, deviation sqrt(1/3). Outcomes are the critic's targets."""
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    credit = group_relative(torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=F64), mask, num_generations=4)
    up = 0.5 / (3**-0.5 + 1e-4)
    expected = torch.tensor([[up, up, 0], [0, -up, -up], [-up, -up, -up], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(credit.advantages, expected, rtol=1e-12, atol=0)
    assert torch.equal(credit.returns, torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=F64))


def test_outcomes_default_to_the_sum_of_unmasked_rewards():
    rewards = torch.tensor([[1.0, 2.0, 9.0], [1.0, 0.0, 0.0]], dtype=F64)
    rewards[0, 2] = math.nan
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    operator = GroupRelative(baseline="leave_one_out", scale="none")
    credit = operator(Evidence(rewards=rewards, mask=mask, num_generations=2))
    assert torch.equal(credit.advantages, torch.tensor([[2, 2, 0], [-2, -2, -2]], dtype=F64))
    assert not group_relative(rewards[:, 0].requires_grad_(), mask, num_generations=2).advantages.requires_grad


def test_one_response_per_prompt_has_no_baseline():
    rewards, mask = torch.ones(3), torch.ones(3, 2, dtype=torch.bool)
    for baseline in ("group_mean", "leave_one_out"):
        with pytest.raises(ConfigError, match=rf"baseline='{baseline}' needs several .*set baseline=\"none\""):
            group_relative(rewards, mask, num_generations=1, baseline=baseline, scale="none")
    with pytest.raises(ConfigError, match='scale="group" needs several'):
        group_relative(rewards, mask, num_generations=1, baseline="none")
    credit = group_relative(rewards, mask, num_generations=1, baseline="none", scale="none")
    assert torch.equal(credit.advantages, torch.ones(3, 2))


def test_errors_name_the_reward_and_the_groups():
    mask = torch.ones(4, 2, dtype=torch.bool)
    with pytest.raises(EvidenceError, match=r"response_rewards holds inf at index \[2\]"):
        group_relative(torch.tensor([0.0, 0.0, math.inf, 0.0]), mask, num_generations=2)
    with pytest.raises(EvidenceError, match="response_rewards holds nan"):
        scorable = torch.ones(4, dtype=torch.bool)
        group_relative(torch.tensor([0.0, 0.0, math.nan, 0.0]), mask, num_generations=2, scorable=scorable)
    with pytest.raises(EvidenceError, match="num_generations=3 does not divide the 4 rows"):
        group_relative(torch.zeros(4), mask, num_generations=3)


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
def test_unknown_choices_and_shapes():
    with pytest.raises(ConfigError, match=r"baseline must be one of 'group_mean', 'leave_one_out', 'none', got 'mean'"):
        GroupRelative(baseline="mean")
    with pytest.raises(ConfigError, match="scale must be one of"):
        GroupRelative(scale="std")
    with pytest.raises(EvidenceError, match="response_rewards has shape"):
        group_relative(torch.zeros(4), torch.ones(2, 2, dtype=torch.bool), num_generations=2)
