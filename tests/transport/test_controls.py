"""Gate controls: what each keeps, and that it moves the rest."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import CONTROLS, constant, inverted, position_mean, shuffled

batches = given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), tokens=st.integers(0, 40))
quick = settings(max_examples=30, deadline=None)


def dice(seed=0):
    return torch.Generator().manual_seed(seed)


@quick
@batches
@pytest.mark.parametrize("name", list(CONTROLS))
def test_every_control_keeps_the_batch_mean_and_ignores_masked_slots(make_rollout, poison, name, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    mask = rollout.mask
    got = CONTROLS[name](rollout.gates, mask, generator=dice())
    assert bool((got[~mask] == 1).all()) and got.dtype == rollout.gates.dtype
    torch.testing.assert_close(got[mask].sum(), rollout.gates[mask].sum(), rtol=1e-12, atol=1e-12)
    assert torch.equal(CONTROLS[name](poison(rollout.gates, mask), mask, generator=dice()), got)


@quick
@batches
@pytest.mark.parametrize("name", ["shuffled", "inverted"])
def test_permutations_keep_the_multiset_of_each_response(make_rollout, name, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    got = CONTROLS[name](rollout.gates, rollout.mask, generator=dice())
    for row in range(rows):
        kept = rollout.mask[row]
        assert torch.equal(got[row, kept].sort().values, rollout.gates[row, kept].sort().values)


def test_shuffled_is_uniform_over_orders_and_repeats_with_its_seed():
    """Each of 3 gates stands at each of 3 unmasked slots a third of the time (6000 rows: s.e. 0.006)."""
    mask = torch.tensor([[1, 0, 1, 1]]).bool().expand(6000, 4)
    gates = torch.tensor([[0.1, 0.5, 0.2, 0.3]]).expand(6000, 4)
    got = shuffled(gates, mask, generator=dice(4))
    for slot in (0, 2, 3):
        for gate in (0.1, 0.2, 0.3):
            assert float((got[:, slot] == gate).float().mean()) == pytest.approx(1 / 3, abs=0.03)
    assert torch.equal(got, shuffled(gates, mask, generator=dice(4)))
    assert not torch.equal(got, shuffled(gates, mask, generator=dice(5)))
    with pytest.raises(ConfigError, match="shuffled needs generator"):
        shuffled(gates, mask)


def test_inverted_by_hand():
    """0.2 < 0.4 < 0.7 become 0.7, 0.4, 0.2; of the two 0.5 the earlier counts as the smaller."""
    gates = torch.tensor([[0.4, 0.9, 0.2, 0.7], [0.5, 0.5, 0.1, 0.3]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]]).bool()
    assert torch.equal(inverted(gates, mask), torch.tensor([[0.4, 1.0, 0.7, 0.2], [0.5, 0.1, 0.5, 1.0]]))


def test_position_mean_counts_unmasked_tokens():
    gates = torch.tensor([[0.2, 0.9, 0.5], [0.9, 0.6, 0.9]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    expected = torch.tensor([[0.4, 1.0, 0.5], [1.0, 0.4, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(position_mean(gates, mask), expected)
    torch.testing.assert_close(constant(gates, mask)[mask], torch.full((3,), 1.3 / 3, dtype=torch.float64))


@pytest.mark.parametrize("name", ["position_mean", "constant"])
def test_batch_means_are_taken_over_all_processes(make_rollout, name):
    rollout = make_rollout(2, 6, 20)
    whole = CONTROLS[name](rollout.gates, rollout.mask)
    parts = (slice(0, 2), slice(2, 6))
    sums = []
    for rows in parts:  # first what each process would send, then the answer with the sum of both
        CONTROLS[name](rollout.gates[rows], rollout.mask[rows], reduce=lambda mine: (sums.append(mine), mine)[1])
    total = sums[0] + sums[1]
    got = [CONTROLS[name](rollout.gates[rows], rollout.mask[rows], reduce=lambda _: total) for rows in parts]
    torch.testing.assert_close(torch.cat(got), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls_detach(make_rollout, name):
    rollout = make_rollout(2, 2, 20)
    assert not CONTROLS[name](rollout.gates.requires_grad_(), rollout.mask, generator=dice()).requires_grad


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
@pytest.mark.parametrize("name", list(CONTROLS))
def test_shapes_that_differ_are_named(name):
    with pytest.raises(EvidenceError, match=r"gates has shape \(2, 3\), but mask has \(2, 4\)"):
        CONTROLS[name](torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool), generator=dice())
