import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.evidence.rollout import last_trainable, response_lengths, trainable_mask, truncated_rows

unhooked = pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")


def test_trainable_mask_is_the_conjunction_of_its_parts():
    completion = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    tools = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    assert trainable_mask(completion).tolist() == [[True, True, True, False], [True] * 4]
    assert trainable_mask(completion, tools).tolist() == [[True, False, True, False], [True] * 4]
    got = trainable_mask(completion, tools, torch.tensor([True, False]))
    assert got.dtype == torch.bool
    assert got.tolist() == [[True, False, True, False], [False] * 4]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_lengths_and_last_positions_agree_with_python(rows):
    mask = torch.tensor(rows)
    assert response_lengths(mask).tolist() == [sum(row) for row in rows]
    expected = [max((t for t, on in enumerate(row) if on), default=-1) for row in rows]
    assert last_trainable(mask).tolist() == expected


def test_no_tokens_at_all():
    mask = torch.zeros(2, 0, dtype=torch.bool)
    assert last_trainable(mask).tolist() == [-1, -1]
    assert response_lengths(mask).tolist() == [0, 0]
    assert truncated_rows(torch.zeros(2, 0, dtype=torch.long), mask, 1).tolist() == [False, False]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_rows_on_either_padding_side(side):
    pad, eos = 0, 9
    responses = [[5, 6, 9], [5, 6, 7, 8], [5, 9, 7], [], [5, 8]]
    ids = torch.full((5, 4), pad)
    mask = torch.zeros(5, 4, dtype=torch.long)
    for row, tokens in enumerate(responses):
        start = 0 if side == "right" else 4 - len(tokens)
        ids[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, start : start + len(tokens)] = 1
    assert truncated_rows(ids, mask, eos).tolist() == [False, True, True, False, True]
    assert truncated_rows(ids, mask, [eos, 8]).tolist() == [False, False, True, False, False]


def test_padding_with_the_end_token_does_not_hide_a_cut():
    ids = torch.tensor([[5, 6, 9, 9]])
    assert truncated_rows(ids, torch.tensor([[1, 1, 0, 0]]), 9).tolist() == [True]


def test_no_end_token_is_an_error():
    with pytest.raises(ConfigError, match="eos_token_ids is empty"):
        truncated_rows(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long), [])


@unhooked
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    ones = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(EvidenceError, match="tool_mask has shape"):
        trainable_mask(ones, ones[:, :2])
    with pytest.raises(EvidenceError, match="scorable has shape"):
        trainable_mask(ones, None, torch.ones(3, dtype=torch.bool))
    with pytest.raises(EvidenceError, match="completion_mask must be"):
        trainable_mask(ones[0])
    with pytest.raises(EvidenceError, match="completion_ids has shape"):
        truncated_rows(ones[:, :2], ones, 1)
