import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fit_task import NAMES, WIDTHS, fitted, parameters, task

from comppo.critic.fit import critic_optimizer, explained_variance, fit_critic
from comppo.critic.head import CriticConfig, TransportAlignedCritic
from comppo.errors import ConfigError, EvidenceError

NAN = float("nan")


def test_it_learns_a_value_that_is_readable_from_the_features():
    critic, first = fitted(*task(0, rows=64), epochs=80)
    assert first.steps == 80
    assert first.loss_after < 0.3 * first.loss_before
    assert first.explained_variance <= 0.05, "nothing was known before the first fit"
    inputs, returns = task(1, rows=64)
    fresh = explained_variance(critic(inputs).detach(), returns, inputs.mask)
    assert fresh > 0.5
    _, second = fitted(inputs, returns, epochs=1, critic=critic)
    assert second.explained_variance == pytest.approx(fresh, abs=1e-12), "reported for outcomes not yet seen"


@pytest.mark.parametrize("size", [1, 3, 8, 16, 99])
def test_micro_batches_change_nothing(size):
    inputs, returns = task(0)
    whole, expected = fitted(inputs, returns)
    parts, report = fitted(inputs, returns, micro_batch_size=size)
    torch.testing.assert_close(parameters(parts), parameters(whole), rtol=0, atol=1e-9)
    assert report.loss_after == pytest.approx(expected.loss_after, abs=1e-9)
    assert report.grad_norm == pytest.approx(expected.grad_norm, abs=1e-9)
    assert report.explained_variance == pytest.approx(expected.explained_variance, abs=1e-9)


def test_micro_batches_change_nothing_in_float32_either():
    inputs, returns = task(0)
    whole, _ = fitted(inputs, returns.float(), dtype=torch.float32)
    parts, _ = fitted(inputs, returns.float(), dtype=torch.float32, micro_batch_size=3)
    torch.testing.assert_close(whole(inputs), parts(inputs), rtol=0, atol=1e-6)


def test_two_gloo_processes_equal_one(tmp_path):
    worker = Path(__file__).with_name("fit_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), tmp_path / "store", tmp_path / f"out{rank}.pt"],
            env=os.environ | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    whole, expected = fitted(*task(0))
    for rank in range(2):
        results, skipped = torch.load(tmp_path / f"out{rank}.pt")
        for got, loss, explained, norm in results:
            torch.testing.assert_close(got, parameters(whole), rtol=0, atol=1e-9)
            assert loss == pytest.approx(expected.loss_after, abs=1e-9)
            assert explained == pytest.approx(expected.explained_variance, abs=1e-9)
            assert norm == pytest.approx(expected.grad_norm, abs=1e-9)
        assert "returns not finite" in skipped


def test_the_loss_and_its_gradient_are_those_of_the_mean_over_tokens():
    inputs, returns = task(2)
    critic, report = fitted(inputs, returns, epochs=1)
    error = torch.where(inputs.mask, 0.6 - returns, 0.0)
    count = inputs.mask.sum()
    assert report.loss_before == pytest.approx(0.5 * (error.square().sum() / count).item())
    assert report.loss_after == pytest.approx(0.5 * ((critic(inputs) - returns)[inputs.mask].square().mean()).item())
    # At zero only the last bias and weights feel the error, with slope 1/2; the bias' part bounds the norm from below.
    assert report.grad_norm >= abs(0.5 * error.sum().item() / count.item())


def test_the_clip_acts_on_the_whole_gradient():
    inputs, returns = task(3)
    steps = {}
    for clip in (1e-3, 1e-4):
        critic = TransportAlignedCritic(CriticConfig(features=NAMES, reward_min=0.0, reward_max=1.0), WIDTHS).double()
        before = parameters(critic)
        sgd = torch.optim.SGD(critic.parameters(), lr=1.0)
        fit_critic(critic, sgd, inputs, returns, epochs=1, gradient_clip=clip, micro_batch_size=2)
        steps[clip] = (parameters(critic) - before).norm().item()
    assert steps[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert steps[1e-4] == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_bad_targets_are_skipped_counted_and_named(bad):
    inputs, returns = task(0)
    returns[inputs.mask.nonzero()[0].tolist()[0], inputs.mask.nonzero()[0].tolist()[1]] = bad
    critic = TransportAlignedCritic(CriticConfig(features=NAMES, reward_min=0.0, reward_max=1.0), WIDTHS).double()
    before = parameters(critic)
    _, report = fitted(inputs, returns, critic=critic, optimizer=critic_optimizer(critic, critic.config))
    assert (report.steps, report.skipped) == (0, 6)
    assert report.skip_reason == f"1 of {inputs.mask.sum()} returns not finite"
    assert torch.equal(parameters(critic), before)
    assert report.explained_variance == 0.0


def test_bad_features_are_skipped_and_masked_rubbish_is_not():
    inputs, returns = task(0)
    expected, _ = fitted(inputs, returns)
    returns[~inputs.mask] = NAN
    features = inputs.features.clone()
    features[~inputs.mask] = NAN
    harmless, report = fitted(replace(inputs, features=features), returns)
    assert report.skip_reason is None
    assert torch.equal(parameters(harmless), parameters(expected))
    features[inputs.mask] = NAN
    critic, report = fitted(replace(inputs, features=features), returns)
    assert report.skip_reason == "loss not finite at epoch 0"
    assert parameters(critic).isfinite().all()
    assert critic.feature_mean.isfinite().all()


def test_a_bad_gradient_is_skipped():
    inputs, returns = task(0)
    critic = TransportAlignedCritic(CriticConfig(features=NAMES, reward_min=0.0, reward_max=1.0), WIDTHS).double()
    critic.value.bias.register_hook(lambda gradient: gradient * NAN)
    before = parameters(critic)
    optimizer = critic_optimizer(critic, critic.config)
    report = fit_critic(critic, optimizer, inputs, returns, epochs=3, gradient_clip=1.0)
    assert report.skip_reason == "gradient not finite at epoch 0"
    assert torch.equal(parameters(critic), before)


def test_too_many_skips_in_a_row_are_an_error_and_a_good_fit_resets_the_count():
    inputs, returns = task(0)
    bad = torch.full_like(returns, NAN)
    critic, _ = fitted(inputs, bad, max_skips=2)
    fitted(inputs, bad, critic=critic, max_skips=2)
    fitted(inputs, returns, critic=critic, max_skips=2)
    fitted(inputs, bad, critic=critic, max_skips=2)
    fitted(inputs, bad, critic=critic, max_skips=2)
    with pytest.raises(EvidenceError, match=r"skipped 3 updates in a row.*returns not finite"):
        fitted(inputs, bad, critic=critic, max_skips=2)


def test_nothing_to_train_on_is_no_failure():
    inputs, returns = task(0)
    nothing = replace(inputs, mask=torch.zeros_like(inputs.mask))
    critic, report = fitted(nothing, returns, max_skips=0)
    assert (report.steps, report.skip_reason) == (0, "no trainable token")
    assert report.loss_before == report.loss_after == report.explained_variance == 0.0
    assert int(critic.skipped_updates) == 0


@given(st.integers(0, 2**16), st.sampled_from([0.3, 1.0]))
def test_explained_variance_agrees_with_the_sample_variances(seed, keep):
    generator = torch.Generator().manual_seed(seed)
    values, returns = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < keep
    if mask.sum() < 2:
        return
    expected = 1 - ((returns - values)[mask].var() / returns[mask].var()).item()
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-9)
    poisoned = torch.where(mask, returns, NAN)
    assert explained_variance(torch.where(mask, values, NAN), poisoned, mask) == pytest.approx(expected, rel=1e-9)


def test_explained_variance_where_it_is_undefined():
    ones, mask = torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)
    assert explained_variance(torch.randn(2, 3), ones, mask) == 0.0
    assert explained_variance(ones, torch.randn(2, 3), ~mask) == 0.0
    assert explained_variance(ones * NAN, torch.randn(2, 3), mask) == 0.0
    exact = torch.randn(2, 3)
    assert explained_variance(exact, exact, mask) == 1.0
    assert explained_variance(exact + 5, exact, mask) == pytest.approx(1.0, abs=1e-6), "a constant bias is no variance"


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"micro_batch_size": 0}, {"max_skips": -1}])
def test_wrong_settings_name_themselves(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        fitted(*task(0), **wrong)


@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    inputs, returns = task(0)
    with pytest.raises(EvidenceError, match="returns has shape"):
        fitted(inputs, returns[:, :3])
