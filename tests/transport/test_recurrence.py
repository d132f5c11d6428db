"""The scan against closed forms and the plain loop."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import EvidenceError
from comppo.transport.recurrence import carry_back
from comppo.transport.reference import carry_back_loop

TOKENS = [0, 1, 2, 15, 16, 17, 32, 33, 63, 64, 257, 1000, 4099]


@pytest.mark.parametrize("tokens", TOKENS)
def test_telescoping_decays_give_harmonic_tails(tokens):
    """decays[t] = (t+1)/(t+2) telescope, so A[t] = (t+1) * sum of 1/n for n = t+1 .. T."""
    n = torch.arange(1, tokens + 1, dtype=torch.float64)
    got = carry_back(torch.ones(1, tokens, dtype=torch.float64), (n / (n + 1))[None])
    tails = (1 / n).flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(got, (n * tails)[None], rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", TOKENS)
def test_terminal_is_carried_through_every_decay(tokens):
    """With no deltas A[t] = terminal * (t+1)/(T+1)."""
    n = torch.arange(1, tokens + 1, dtype=torch.float64)
    terminal = torch.tensor([2.0, -3.0], dtype=torch.float64)
    got = carry_back(torch.zeros(2, tokens, dtype=torch.float64), (n / (n + 1)).expand(2, tokens), terminal=terminal)
    torch.testing.assert_close(got, terminal[:, None] * n / (tokens + 1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_growing_decays_give_powers(tokens):
    """decays[t] = 2**(t % 2 * 2 - 1) alternate between 1/2 and 2: the products are exact, and none is divided out."""
    decays = torch.tensor([0.5, 2.0], dtype=torch.float64).repeat(tokens)[:tokens][None]
    deltas = torch.zeros(1, tokens, dtype=torch.float64)
    deltas[0, -1] = 1
    expected = torch.tensor(
        [[2.0 ** sum(-1 if i % 2 == 0 else 1 for i in range(t, tokens - 1)) for t in range(tokens)]],
        dtype=torch.float64,
    )
    assert torch.equal(carry_back(deltas, decays), expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 5), tokens=st.integers(0, 400), zeros=st.floats(0, 1))
def test_matches_the_loop(seed, rows, tokens, zeros):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    decays = torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    decays = torch.where(torch.rand(rows, tokens, generator=generator) < zeros, 0, decays)
    torch.testing.assert_close(
        carry_back(deltas, decays), carry_back_loop(deltas.detach(), decays.detach()), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 1e-2)]
)
def test_keeps_dtype_and_accumulates_in_float32(dtype, tolerance):
    """A bfloat16 accumulator would stop growing at 256."""
    deltas, decays = torch.ones(2, 1000, dtype=dtype), torch.ones(2, 1000, dtype=dtype)
    got = carry_back(deltas, decays)
    assert got.dtype == dtype
    expected = torch.arange(1000, 0, -1, dtype=torch.float64).expand(2, 1000)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=0)


def test_leaves_inputs_alone_and_takes_any_strides():
    deltas = torch.randn(70, 3, dtype=torch.float64).t().requires_grad_()
    decays = torch.rand(3, 140, dtype=torch.float64)[:, ::2].requires_grad_()
    before = deltas.detach().clone(), decays.detach().clone()
    got = carry_back(deltas, decays)
    assert not got.requires_grad
    assert torch.equal(deltas, before[0]) and torch.equal(decays, before[1])
    torch.testing.assert_close(got, carry_back_loop(deltas.detach(), decays.detach()), rtol=1e-12, atol=1e-13)


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
def test_shapes_that_differ_are_named():
    with pytest.raises(EvidenceError, match=r"deltas \(2, 3\) and decays \(2, 4\)"):
        carry_back(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(EvidenceError, match="terminal has shape"):
        carry_back(torch.ones(2, 3), torch.ones(2, 3), terminal=torch.ones(3))
