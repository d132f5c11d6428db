"""Comp-GAE: the seven properties of its definition, closed forms, and its errors."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import CompGAE, comp_gae, gae, length_adaptive_lam, transport_kernel
from comppo.transport.reference import comp_gae_loop
from comppo.types import Evidence

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LENGTHS = [1, 2, 16, 63, 1000]
rollouts = given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), tokens=st.integers(0, 90))
quick = settings(max_examples=30, deadline=None)


def run(rollout, **changes):
    arguments = {name: getattr(rollout, name) for name in ("rewards", "values", "gates", "mask", "bootstrap_values")}
    return comp_gae(**({"gamma": 0.97, "lam": 0.9} | arguments | changes))


def telescoping(tokens):
    """Gates (t+1)/(t+2): the product over [t, u) is (t+1)/(u+1). And the full mask, zeros, t+1."""
    n = torch.arange(1, tokens + 1, dtype=F64)
    return (n / (n + 1))[None], torch.ones(1, tokens, dtype=torch.bool), torch.zeros(1, tokens, dtype=F64), n[None]


# Closed forms with gates that are not constant: a constant one cannot see an index that is off by one.


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("gate_bootstrap", [True, False])
def test_terminal_reward_reaches_t_through_the_gates_before_it(tokens, gate_bootstrap):
    """V = 0 and a last reward of 1: A_t = (gamma lam)^(T-1-t) * (t+1)/T, whether or not the bootstrap is gated."""
    gates, mask, zeros, n = telescoping(tokens)
    rewards = zeros.clone()
    rewards[0, -1] = 1
    credit = comp_gae(rewards, zeros, gates, mask, gamma=0.999, lam=0.99, gate_bootstrap=gate_bootstrap)
    torch.testing.assert_close(credit.advantages, (0.999 * 0.99) ** (tokens - n) * n / tokens, **EXACT)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_values_that_solve_the_gated_equation_leave_no_advantage(tokens, lam):
    """V_t = (t+1)/T fulfils V_t = g_t V_{t+1} with the last reward 1: delta = 0 everywhere, R = V."""
    gates, mask, zeros, n = telescoping(tokens)
    rewards = zeros.clone()
    rewards[0, -1] = 1
    credit = comp_gae(rewards, n / tokens, gates, mask, gamma=1.0, lam=lam)
    torch.testing.assert_close(credit.advantages, zeros, **EXACT)
    torch.testing.assert_close(credit.returns, n / tokens, **EXACT)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_bootstrap_value_is_gated_at_the_last_token(tokens):
    """No rewards, V = 0, V_T = 3: A_t = gamma (gamma lam)^(T-1-t) * 3 (t+1)/(T+1)."""
    gates, mask, zeros, n = telescoping(tokens)
    boot = torch.full((1,), 3.0, dtype=F64)
    credit = comp_gae(zeros, zeros, gates, mask, gamma=0.999, lam=0.99, bootstrap_values=boot)
    expected = 0.999 * (0.999 * 0.99) ** (tokens - n) * 3 * n / (tokens + 1)
    torch.testing.assert_close(credit.advantages, expected, **EXACT)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_gating_only_the_bootstrap_sums_harmonics(tokens):
    """V = 1, gamma = lam = 1, trace not gated: A_t = -1 - sum of 1/(u+2) for u = t .. T-2."""
    gates, mask, zeros, n = telescoping(tokens)
    credit = comp_gae(zeros, zeros + 1, gates, mask, gamma=1.0, lam=1.0, gate_trace=False)
    lost = 1 / (n + 1)
    lost[0, -1] = 1
    torch.testing.assert_close(credit.advantages, -lost.flip(1).cumsum(1).flip(1), **EXACT)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_gating_only_the_trace(tokens):
    """V = 1, gamma = lam = 1, bootstrap not gated: delta is -1 at the end alone, so A_t = -(t+1)/T."""
    gates, mask, zeros, n = telescoping(tokens)
    credit = comp_gae(zeros, zeros + 1, gates, mask, gamma=1.0, lam=1.0, gate_bootstrap=False)
    torch.testing.assert_close(credit.advantages, -n / tokens, **EXACT)


@quick
@rollouts
@pytest.mark.parametrize("gate_bootstrap", [True, False])
@pytest.mark.parametrize("gate_trace", [True, False])
def test_matches_the_loop_over_compacted_rows(make_rollout, seed, rows, tokens, gate_bootstrap, gate_trace):
    rollout = make_rollout(seed, rows, tokens)
    switches = {"gate_bootstrap": gate_bootstrap, "gate_trace": gate_trace}
    credit = run(rollout, **switches)
    expected = comp_gae_loop(
        rollout.rewards,
        rollout.values,
        rollout.gates,
        rollout.mask,
        gamma=0.97,
        lam=0.9,
        bootstrap_values=rollout.bootstrap_values,
        **switches,
    )
    torch.testing.assert_close((credit.advantages, credit.returns), expected, **EXACT)


@quick
@rollouts
def test_property_1_constant_gate_is_a_discount(make_rollout, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    rewards, values, mask = rollout.rewards, rollout.values, rollout.mask
    for constant in (0.0, 0.6, 1.0):
        got = run(rollout, gates=torch.full_like(values, constant))
        want = gae(rewards, values, mask, gamma=0.97 * constant, lam=0.9, bootstrap_values=rollout.bootstrap_values)
        torch.testing.assert_close((got.advantages, got.returns), (want.advantages, want.returns), **EXACT)


@quick
@rollouts
def test_properties_2_and_3_kernel(make_rollout, seed, rows, tokens):
    """K is written out entry by entry from its definition, and its row sums are bounded."""
    tokens = min(tokens, 12)
    rollout = make_rollout(seed, rows, tokens)
    kernel = transport_kernel(0.97 * 0.9 * rollout.gates, rollout.mask)
    for row in range(rows):
        for t in range(tokens):
            for u in range(tokens):
                product = 1.0 if u >= t and rollout.mask[row, t] and rollout.mask[row, u] else 0.0
                for i in range(t, u):
                    product *= 0.97 * 0.9 * float(rollout.gates[row, i]) if rollout.mask[row, i] else 1.0
                assert float(kernel[row, t, u]) == pytest.approx(product, rel=1e-12)
    assert bool((kernel.sum(2) <= 1 / (1 - 0.97 * 0.9) + 1e-12).all())


@quick
@rollouts
def test_property_3_no_gate_moves_what_comes_after_it(make_rollout, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens, keep=0.9)
    before = run(rollout)
    for u in range(0, tokens, 7):
        gates = rollout.gates.clone()
        gates[:, u] = 1 - gates[:, u]
        after = run(rollout, gates=gates)
        assert torch.equal(after.advantages[:, u + 1 :], before.advantages[:, u + 1 :])
        moved = after.advantages[:, u] != before.advantages[:, u]
        assert not bool(moved[~rollout.mask[:, u]].any())


def test_property_3_a_gate_does_move_its_own_advantage(make_rollout):
    rollout = make_rollout(1, 1, 20, keep=2.0)
    u = int(rollout.mask[0].nonzero()[3])
    gates = rollout.gates.clone()
    gates[:, u] = 1 - gates[:, u]
    assert float((run(rollout, gates=gates).advantages - run(rollout).advantages)[0, u].abs()) > 1e-3


@quick
@rollouts
def test_property_4_returns_are_lambda_returns(make_rollout, seed, rows, tokens):
    """R_t = r_t + gamma g_t ((1 - lam) V_next + lam R_next), checked token by token on compacted rows."""
    rollout = make_rollout(seed, rows, tokens)
    credit = run(rollout)
    for row in range(rows):
        next_value = next_return = rollout.bootstrap_values[row]
        for t in reversed(rollout.mask[row].nonzero().flatten().tolist()):
            mixed = 0.1 * next_value + 0.9 * next_return
            want = rollout.rewards[row, t] + 0.97 * rollout.gates[row, t] * mixed
            torch.testing.assert_close(credit.returns[row, t], want, **EXACT)
            next_value, next_return = rollout.values[row, t], credit.returns[row, t]


@quick
@rollouts
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gate_trace", [True, False])
def test_property_5_deleting_masked_tokens_changes_nothing(make_rollout, poison, seed, rows, tokens, lam, gate_trace):
    rollout = make_rollout(seed, rows, tokens)
    names = ("rewards", "values", "gates")
    poisoned = {name: poison(getattr(rollout, name), rollout.mask) for name in names}
    expanded = run(rollout, lam=lam, gate_trace=gate_trace, **poisoned)
    assert not bool(expanded.advantages[~rollout.mask].any()) and not bool(expanded.returns[~rollout.mask].any())
    for row in range(rows):
        kept = rollout.mask[row]
        compacted = {name: getattr(rollout, name)[row, kept][None] for name in names}
        boot = rollout.bootstrap_values[row : row + 1]
        mask = torch.ones_like(compacted["rewards"], dtype=torch.bool)
        alone = run(rollout, lam=lam, gate_trace=gate_trace, mask=mask, bootstrap_values=boot, **compacted)
        torch.testing.assert_close(expanded.advantages[row, kept], alone.advantages[0], **EXACT)
        torch.testing.assert_close(expanded.returns[row, kept], alone.returns[0], **EXACT)


def test_property_6_nothing_is_attached(make_rollout):
    rollout = make_rollout(0, 2, 40)
    inputs = {name: getattr(rollout, name).requires_grad_() for name in ("rewards", "values", "gates")}
    credit = run(rollout, bootstrap_values=rollout.bootstrap_values.requires_grad_(), critic_lam=1.0, **inputs)
    assert not credit.advantages.requires_grad and not credit.returns.requires_grad
    evidence = Evidence(mask=rollout.mask, **inputs)
    assert not CompGAE().deltas(evidence).requires_grad and not CompGAE().kernel(evidence).requires_grad


@quick
@rollouts
def test_property_7_padding_changes_nothing(make_rollout, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    plain = run(rollout)
    for left, right in ((0, 5), (5, 0), (17, 40)):
        padded = {
            name: torch.nn.functional.pad(getattr(rollout, name), (left, right), value=float("nan"))
            for name in ("rewards", "values", "gates")
        }
        mask = torch.nn.functional.pad(rollout.mask, (left, right), value=False)
        credit = run(rollout, mask=mask, **padded)
        inside = slice(left, left + tokens)
        torch.testing.assert_close(credit.advantages[:, inside], plain.advantages, **EXACT)
        torch.testing.assert_close(credit.returns[:, inside], plain.returns, **EXACT)


@quick
@rollouts
def test_rows_may_differ_in_lambda_and_the_critic_may_have_its_own(make_rollout, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    lam, critic_lam = torch.linspace(0, 1, rows, dtype=F64), torch.linspace(1, 0.5, rows, dtype=F64)
    credit = run(rollout, lam=lam, critic_lam=critic_lam)
    arguments = (rollout.rewards, rollout.values, rollout.gates, rollout.mask)
    boot = rollout.bootstrap_values
    advantages, _ = comp_gae_loop(*arguments, gamma=0.97, lam=lam.tolist(), bootstrap_values=boot)
    _, returns = comp_gae_loop(*arguments, gamma=0.97, lam=critic_lam.tolist(), bootstrap_values=boot)
    torch.testing.assert_close((credit.advantages, credit.returns), (advantages, returns), **EXACT)


def test_blocks_of_rows_join_without_seams(make_rollout, monkeypatch):
    rollout = make_rollout(5, 7, 50)
    whole = run(rollout)
    monkeypatch.setattr("comppo.transport._block.BLOCK", 100)
    parts = run(rollout)
    assert torch.equal(parts.advantages, whole.advantages) and torch.equal(parts.returns, whole.returns)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 5)])
def test_empty_batches_and_rows_without_a_token(shape):
    zeros = torch.full(shape, float("nan"))
    credit = comp_gae(zeros, zeros, zeros, torch.zeros(shape, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert torch.equal(credit.advantages, torch.zeros(shape)) and torch.equal(credit.returns, torch.zeros(shape))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_half_precision_is_computed_in_float32(make_rollout, dtype, tolerance):
    rollout = make_rollout(2, 3, 1000, keep=2.0)
    low = {name: getattr(rollout, name).to(dtype) for name in ("rewards", "values", "gates", "bootstrap_values")}
    credit = run(rollout, **low)
    assert credit.advantages.dtype == credit.returns.dtype == dtype
    exact = run(rollout, **{name: tensor.double() for name, tensor in low.items()})
    torch.testing.assert_close(credit.advantages.double(), exact.advantages, rtol=tolerance, atol=tolerance)


def test_length_adaptive_lam():
    """1 - 1/(alpha * length): alpha 0.05 and 100 tokens give 0.8; 20 tokens and fewer give 0."""
    mask = torch.arange(1000) < torch.tensor([[100], [20], [3], [0], [1000]])
    torch.testing.assert_close(length_adaptive_lam(mask, 0.05), torch.tensor([0.8, 0.0, 0.0, 0.0, 0.98]))
    with pytest.raises(ConfigError, match=r"alpha must be finite and above 0, got 0\.0"):
        length_adaptive_lam(mask, 0.0)


@pytest.mark.parametrize("name", ["gamma", "lam", "critic_lam"])
@pytest.mark.parametrize("number", [-0.1, 1.1, float("nan"), float("inf")])
def test_settings_out_of_range(make_rollout, name, number):
    with pytest.raises(ConfigError, match=rf"{name} must lie in \[0, 1\], got"):
        run(make_rollout(0, 2, 5), **{name: number})
    with pytest.raises(ConfigError, match=rf"{name} must lie in"):
        CompGAE(**{name: number})


def test_lambda_per_row_out_of_range(make_rollout):
    with pytest.raises(ConfigError, match=r"lam must lie in \[0, 1\] for every row"):
        run(make_rollout(0, 2, 5), lam=torch.tensor([0.5, float("nan")]))


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("name", ["rewards", "values", "gates"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(make_rollout, name, number, lam):
    rollout = make_rollout(0, 2, 40)
    for slot in (rollout.mask.nonzero()[0], rollout.mask.nonzero()[-1]):
        broken = getattr(rollout, name).clone()
        broken[tuple(slot)] = number
        with pytest.raises(EvidenceError, match=f"{name} holds .* at index"):
            run(rollout, lam=lam, **{name: broken})


def test_a_bootstrap_value_that_is_not_finite_is_named(make_rollout):
    rollout = make_rollout(0, 2, 40)
    with pytest.raises(EvidenceError, match="bootstrap_values holds nan"):
        run(rollout, bootstrap_values=torch.tensor([0.0, float("nan")], dtype=F64))


@pytest.mark.parametrize("number", [-0.01, 1.01])
@pytest.mark.parametrize("switches", [{}, {"gate_trace": False, "gate_bootstrap": False}])
def test_gates_out_of_range(make_rollout, number, switches):
    rollout = make_rollout(0, 2, 40)
    gates = rollout.gates.clone()
    gates[tuple(rollout.mask.nonzero()[2])] = number
    with pytest.raises(EvidenceError, match=r"gates must lie in \[0, 1\] at unmasked tokens"):
        run(rollout, gates=gates, **switches)


def test_large_finite_numbers_are_not_blamed():
    """Values whose sum overflows are no error of the caller."""
    big = torch.full((1, 4), 3e38)
    credit = comp_gae(big, torch.zeros(1, 4), torch.ones(1, 4), big > 0, gamma=1.0, lam=1.0)
    assert bool(credit.advantages.isinf().any())


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
@pytest.mark.parametrize("name", ["rewards", "values", "gates"])
def test_shapes_that_differ_are_named(make_rollout, name):
    with pytest.raises(EvidenceError, match=rf"{name} has shape \(2, 4\), but mask has \(2, 5\)"):
        run(make_rollout(0, 2, 5), **{name: torch.ones(2, 4)})


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
def test_other_shapes_and_dtypes(make_rollout):
    rollout = make_rollout(0, 2, 5)
    with pytest.raises(EvidenceError, match="bootstrap_values has shape"):
        run(rollout, bootstrap_values=torch.ones(3))
    with pytest.raises(EvidenceError, match="lam has shape"):
        run(rollout, lam=torch.ones(3))
    with pytest.raises(EvidenceError, match="mask must be boolean"):
        run(rollout, mask=rollout.mask.long())
