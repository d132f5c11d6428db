"""Standardised statistics and calibrated gates: moments, bounds, means, shards, errors."""

import math
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.transport import GateConfig, gate_from_statistic, standardize

F64 = torch.float64
CONFIGS = [
    GateConfig(residualize="none"),
    GateConfig(residualize="position", sharpness=-3.0),
    GateConfig(unit="tokens", minimum=2.0, reference=30.0, maximum=500.0, residualize="none", sharpness=40.0),
    GateConfig(unit="coefficients", minimum=0.0, reference=0.999, maximum=1.0, sharpness=2.5),
    GateConfig(unit="coefficients", minimum=0.2, reference=0.21, maximum=0.9, sharpness=0.0),
]


def bounds(config, mask):
    """Minimum, reference and maximum gate of each row, worked out one by one."""
    columns = []
    for bound in (config.minimum, config.reference, config.maximum):
        rows = []
        for length in mask.sum(1).tolist():
            horizon = bound * max(length, 1) if config.unit == "response_lengths" else bound
            rows.append(bound if config.unit == "coefficients" else math.exp(-1 / horizon))
        columns.append(torch.tensor(rows, dtype=F64)[:, None].expand(mask.shape))
    return columns


def keys_of(mask):
    return mask.cumsum(1) + 20


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), tokens=st.integers(0, 60))
@pytest.mark.parametrize("config", CONFIGS)
def test_mean_is_the_reference_and_bounds_hold(make_rollout, poison, config, seed, rows, tokens):
    rollout = make_rollout(seed, rows, tokens)
    mask = rollout.mask
    gates = gate_from_statistic(poison(rollout.values, mask), mask, config, visible_keys=keys_of(mask))
    low, reference, high = bounds(config, mask)
    assert gates.dtype == F64 and bool((gates[~mask] == 1).all())
    assert bool(((gates >= low) & (gates <= high))[mask].all())
    if mask.any():
        assert float(gates[mask].mean()) == pytest.approx(float(reference[mask].mean()), abs=1e-9)


def test_two_tokens_by_hand():
    """z = -1, 1; with minimum 0, maximum 1 and mean 1/2 the offset is 0: gates are sigmoid(-2) and sigmoid(2)."""
    config = GateConfig(unit="coefficients", minimum=0.0, reference=0.5, maximum=1.0, sharpness=2.0, residualize="none")
    gates = gate_from_statistic(torch.tensor([[3.0, 7.0]], dtype=F64), torch.ones(1, 2, dtype=torch.bool), config)
    expected = torch.sigmoid(torch.tensor([[-2.0, 2.0]], dtype=F64))
    torch.testing.assert_close(gates, expected, rtol=1e-12, atol=1e-12)


def test_default_is_horizons_in_response_lengths():
    """Every gate of a row of n tokens lies in [exp(-2/n), 1], and the batch mean is that of exp(-1/(4n))."""
    mask = torch.arange(400) < torch.tensor([[400], [10]])
    statistic = torch.randn(2, 400, dtype=F64)
    config = GateConfig(residualize="log_keys_position")
    gates = gate_from_statistic(statistic, mask, config, visible_keys=keys_of(mask))
    for row, n in ((0, 400), (1, 10)):
        assert math.exp(-2 / n) <= float(gates[row, :n].min()) and float(gates[row, :n].max()) <= 1
    mean = (400 * math.exp(-1 / 1600) + 10 * math.exp(-1 / 40)) / 410
    assert float(gates[mask].mean()) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("which", ["minimum", "maximum"])
def test_a_reference_at_a_bound_is_a_constant(which):
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    config = GateConfig(minimum=0.5, maximum=9.0, reference={"minimum": 0.5, "maximum": 9.0}[which], residualize="none")
    gates = gate_from_statistic(torch.randn(2, 6, dtype=F64), mask, config)
    want = torch.where(mask, torch.exp(-1 / (config.reference * torch.tensor([[6.0], [3.0]], dtype=F64))), 1)
    torch.testing.assert_close(gates, want, rtol=1e-15, atol=0)


def test_sharpness_sets_the_direction():
    mask, statistic = torch.ones(1, 50, dtype=torch.bool), torch.randn(1, 50, dtype=F64)
    order = statistic.argsort(1)
    for sharpness, sign in ((1.0, 1), (-1.0, -1)):
        gates = gate_from_statistic(statistic, mask, GateConfig(residualize="none", sharpness=sharpness))
        assert bool((sign * gates.gather(1, order).diff(dim=1) > 0).all())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-50, 50), scale=st.floats(1e-3, 1e3))
def test_moments_and_invariances(make_rollout, poison, seed, shift, scale):
    """Mean 0, variance 1, no correlation with the covariate; adding a line in it or scaling changes nothing."""
    rollout = make_rollout(seed, 3, 60, keep=0.9)
    mask, covariate = rollout.mask, rollout.rewards
    z = standardize(poison(rollout.values, mask), mask, covariates=(poison(covariate, mask),))
    kept = z[mask]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-12) and not bool(z[~mask].any())
    assert float(kept.square().mean()) == pytest.approx(1, abs=1e-12)
    assert float((kept * covariate[mask]).mean()) == pytest.approx(0, abs=1e-12)
    moved = scale * rollout.values + shift * covariate + shift
    torch.testing.assert_close(standardize(moved, mask, covariates=(covariate,)), z, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_constant_statistic_is_zero(dtype):
    mask = torch.rand(3, 1000) < 0.7
    constant = torch.full((3, 1000), 0.1, dtype=dtype)
    assert not bool(standardize(constant, mask).any())
    assert not bool(standardize(constant, torch.zeros_like(mask)).any())
    gates = gate_from_statistic(
        constant,
        mask,
        GateConfig(unit="coefficients", minimum=0.5, reference=0.75, maximum=1.0, residualize="position"),
    )
    torch.testing.assert_close(gates, torch.where(mask, 0.75, 1).to(gates.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_statistic_that_is_its_covariate_is_zero(dtype):
    covariate = torch.arange(2.0, 2002.0, dtype=dtype)[None].log()
    mask = torch.ones(1, 2000, dtype=torch.bool)
    assert not bool(standardize(3 * covariate + 1, mask, covariates=(covariate,)).any())


def test_several_covariates_leave_the_residuals_of_least_squares(make_rollout, poison):
    """Against torch's own solver; regressors that repeat another one, or are constant, change nothing."""
    rollout = make_rollout(4, 6, 50)
    mask, first, second = rollout.mask, rollout.rewards, rollout.values.cos()
    design = torch.stack((torch.ones_like(first[mask]), first[mask], second[mask]), 1)
    y = rollout.values[mask]
    left = y - design @ torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    want = left / left.square().mean().sqrt()
    for covariates in (
        (first, second),
        (second, 3 * first - 2 * second, first),
        (first, torch.ones_like(first), second),
    ):
        got = standardize(rollout.values, mask, covariates=tuple(poison(c, mask) for c in covariates))
        torch.testing.assert_close(got[mask], want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("residualize", ["log_keys", "log_keys_position"])
def test_a_trend_in_keys_and_position_is_removed(residualize):
    """Prompts of 4 and 200 tokens. A statistic that is a trend plus a pattern gives the gates of the pattern."""
    mask = torch.ones(2, 300, dtype=torch.bool)
    place = torch.arange(300).expand(2, 300)
    keys = place + torch.tensor([[5], [201]])
    trends = [keys.double().log(), place.double().log1p()][: 1 if residualize == "log_keys" else 2]
    pattern = standardize(torch.randn(2, 300, dtype=F64), mask, covariates=trends)
    statistic = pattern - 4 * trends[0] + trends[-1]
    plain = gate_from_statistic(pattern, mask, GateConfig(residualize="none"))
    config = GateConfig(residualize=residualize)
    got = gate_from_statistic(statistic, mask, config, visible_keys=keys)
    torch.testing.assert_close(got, plain, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(gate_from_statistic(statistic, mask, GateConfig(residualize="none")), plain, atol=1e-5)
    left = gate_from_statistic(pattern + place.log1p(), mask, GateConfig(residualize="log_keys"), visible_keys=keys)
    assert not torch.allclose(left, plain, atol=1e-3)  # log keys alone do not remove the position here


@pytest.mark.parametrize("config", [*CONFIGS, GateConfig(residualize="log_keys_position")])
def test_shards_give_what_the_whole_batch_gives(make_rollout, config):
    """Two threads stand for two processes; their reduce waits for both and sums."""
    rollout = make_rollout(11, 5, 40)
    keys = keys_of(rollout.mask)
    whole = gate_from_statistic(rollout.values, rollout.mask, config, visible_keys=keys)
    barrier, slots, results = threading.Barrier(2, timeout=30), [None, None], [None, None]

    def work(rank, rows):
        def reduce(tensor):
            slots[rank] = tensor
            barrier.wait()
            total = slots[0] + slots[1]
            barrier.wait()
            return total

        results[rank] = gate_from_statistic(
            rollout.values[rows], rollout.mask[rows], config, visible_keys=keys[rows], reduce=reduce
        )

    threads = [
        threading.Thread(target=work, args=(0, slice(0, 2))),
        threading.Thread(target=work, args=(1, slice(2, 5))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(results), whole, rtol=1e-10, atol=1e-10)


def test_dtype_and_detachment():
    mask = torch.ones(1, 9, dtype=torch.bool)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        statistic = torch.randn(1, 9).to(dtype).requires_grad_()
        gates = gate_from_statistic(statistic, mask, GateConfig(residualize="none"))
        assert gates.dtype == wanted and not gates.requires_grad
        assert not standardize(statistic, mask).requires_grad


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"minimum": 5.0}, "need minimum <= reference <= maximum, got minimum=5.0, reference=4.0"),
        ({"maximum": 3.0}, "need minimum <= reference <= maximum"),
        ({"reference": math.nan}, "need minimum <= reference <= maximum"),
        ({"minimum": 0.0}, "horizons must be above 0"),
        ({"minimum": -1.0, "unit": "tokens"}, "horizons must be above 0"),
        ({"unit": "coefficients"}, r"coefficients must lie in \[0, 1\]"),
        ({"unit": "coefficients", "minimum": -0.1, "reference": 0.5, "maximum": 1.0}, "coefficients must lie in"),
        ({"sharpness": math.inf}, "sharpness must be finite, got inf"),
    ],
)
def test_config_errors(settings_, message):
    with pytest.raises(ConfigError, match=message):
        GateConfig(**settings_)


def test_evidence_errors():
    mask, statistic = torch.ones(1, 4, dtype=torch.bool), torch.randn(1, 4)
    with pytest.raises(EvidenceError, match="needs visible_keys, which is None"):
        gate_from_statistic(statistic, mask, GateConfig(residualize="log_keys_position"))
    with pytest.raises(EvidenceError, match="visible_keys holds 0"):
        gate_from_statistic(statistic, mask, GateConfig(residualize="log_keys"), visible_keys=torch.arange(4)[None])
    statistic[0, 2] = math.nan
    with pytest.raises(EvidenceError, match=r"statistic holds nan at index \[0, 2\]"):
        standardize(statistic, mask)


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
def test_unknown_choices_and_shapes():
    with pytest.raises(
        ConfigError, match="unit must be one of 'response_lengths', 'tokens', 'coefficients', got 'steps'"
    ):
        GateConfig(unit="steps")
    with pytest.raises(ConfigError, match="residualize must be one of"):
        GateConfig(residualize="keys")
    with pytest.raises(EvidenceError, match="statistic has shape"):
        standardize(torch.ones(2, 3), torch.ones(2, 4, dtype=torch.bool))
