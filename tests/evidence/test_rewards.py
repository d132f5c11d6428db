import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comppo.errors import EvidenceError
from comppo.evidence.rewards import group_mean, leave_one_out_mean, move_to_trainable, place_rewards

NAN = float("nan")
unhooked = pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_reward_stands_on_the_last_trainable_token():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    got = place_rewards(float64(2.0, -1.0, NAN), mask)
    assert got.tolist() == [[0, 0, 0, 2.0, 0], [0, 0, -1.0, 0, 0], [0, 0, 0, 0, 0]]
    assert got.dtype == torch.float64
    assert place_rewards(float64(1.0), torch.zeros(1, 0, dtype=torch.bool)).shape == (1, 0)


def test_rewards_move_to_the_nearest_earlier_token_or_the_first_later_one():
    mask = torch.tensor([[0, 0, 1, 0, 0, 1, 0]]).bool()
    got = move_to_trainable(float64(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)[None], mask)
    assert got.tolist() == [[0, 0, 1 + 2 + 4 + 8 + 16, 0, 0, 32 + 64, 0]]


@given(st.data())
def test_moving_preserves_every_rows_sum_and_agrees_with_a_loop(data):
    tokens = data.draw(st.integers(0, 6))
    rows = data.draw(st.integers(1, 3))
    flags = [data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) for _ in range(rows)]
    values = [data.draw(st.lists(st.integers(-8, 8), min_size=tokens, max_size=tokens)) for _ in range(rows)]
    mask = torch.tensor(flags, dtype=torch.bool).view(rows, tokens)
    got = move_to_trainable(torch.tensor(values, dtype=torch.float64).view(rows, tokens), mask)
    for row in range(rows):
        expected = [0.0] * tokens
        on = [t for t in range(tokens) if flags[row][t]]
        for t, value in enumerate(values[row]):
            if on:
                expected[max((u for u in on if u <= t), default=on[0])] += value
        assert got[row].tolist() == expected


def test_leave_one_out_closed_form():
    """With all rewards scored it is (group sum - own) / (n - 1)."""
    rewards = float64(1.0, 0.0, 0.0, 2.0, 5.0, 5.0, 5.0, 5.0)
    got = leave_one_out_mean(rewards, 4, default=-9.0)
    torch.testing.assert_close(got, float64(2 / 3, 1.0, 1.0, 1 / 3, 5.0, 5.0, 5.0, 5.0))
    torch.testing.assert_close(group_mean(rewards, 4, default=-9.0), float64(*[0.75] * 4, *[5.0] * 4))


def test_unscorable_responses_count_in_no_baseline():
    rewards = float64(1.0, NAN, 3.0, NAN, NAN, 4.0, NAN, NAN, NAN)
    scorable = ~rewards.isnan()
    expected = float64(3.0, 2.0, 1.0, 4.0, 4.0, 0.25, 0.25, 0.25, 0.25)
    for given_flags in (None, scorable):
        torch.testing.assert_close(leave_one_out_mean(rewards, 3, given_flags, default=0.25), expected)
        means = group_mean(rewards, 3, given_flags, default=0.25)
        torch.testing.assert_close(means, float64(2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 0.25, 0.25, 0.25))


def test_a_lone_response_gets_the_default():
    assert leave_one_out_mean(float64(1.0, 0.0), 1, default=0.5).tolist() == [0.5, 0.5]
    assert group_mean(float64(1.0, 0.0), 1, default=0.5).tolist() == [1.0, 0.0]


def test_a_huge_reward_costs_the_others_no_digits():
    got = leave_one_out_mean(float64(1e20, 1.0, 2.0), 3, default=0.0)
    assert got[0] == 1.5


@given(st.integers(2, 6), st.integers(0, 2**16))
def test_own_reward_never_moves_own_baseline(generations, seed):
    rewards = torch.randn(2 * generations, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    changed = rewards.clone()
    changed[1] += 7.0
    before = leave_one_out_mean(rewards, generations, default=0.0)
    after = leave_one_out_mean(changed, generations, default=0.0)
    assert before[1] == after[1]
    assert (before[generations:] == after[generations:]).all()
    torch.testing.assert_close(after[0] - before[0], torch.tensor(7.0 / (generations - 1), dtype=torch.float64))


def test_partial_groups_are_an_error():
    for function in (leave_one_out_mean, group_mean):
        with pytest.raises(EvidenceError, match="num_generations=2 does not divide the 3 rows"):
            function(float64(1.0, 2.0, 3.0), 2, default=0.0)


@unhooked
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(EvidenceError, match="response_rewards has shape"):
        place_rewards(torch.ones(3), mask)
    with pytest.raises(EvidenceError, match="token_rewards has shape"):
        move_to_trainable(torch.ones(2, 2), mask)
    with pytest.raises(EvidenceError, match="scorable has shape"):
        leave_one_out_mean(torch.ones(2), 2, torch.ones(3, dtype=torch.bool), default=0.0)
