import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comppo.errors import ConfigError, EvidenceError
from comppo.update.clipped import clipped_objective


def loss_and_gradient(ratio, advantage, **ranges):
    logps = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = clipped_objective(
        logps,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        **ranges,
    )
    loss.sum().backward()
    return loss.item(), logps.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # already 20 % likelier: a good token earns no more
        (0.5, 2.0, -1.0, -1.0),  # a good token that became unlikely is pulled back
        (0.5, -2.0, 1.6, 0.0),  # already 20 % less likely: a bad token costs no more
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier is pushed back
    ],
)
def test_each_regime(ratio, advantage, loss, gradient):
    got = loss_and_gradient(ratio, advantage, epsilon=0.2)
    assert got == (pytest.approx(loss, rel=1e-12), pytest.approx(gradient, rel=1e-12, abs=0))


def test_separate_upper_range():
    assert loss_and_gradient(1.25, 1.0, epsilon=0.2, epsilon_high=0.28) == pytest.approx((-1.25, -1.25))
    assert loss_and_gradient(1.5, 1.0, epsilon=0.2, epsilon_high=0.28) == pytest.approx((-1.28, 0.0))
    assert loss_and_gradient(0.75, -1.0, epsilon=0.2, epsilon_high=0.28) == pytest.approx((0.8, 0.0))


@given(st.floats(0.05, 20), st.floats(-5, 5), st.floats(0.01, 1.0), st.floats(0.01, 3.0))
def test_agrees_with_the_definition(ratio, advantage, low, high):
    clipped = min(max(ratio, 1 - low), 1 + high)
    got, _ = loss_and_gradient(ratio, advantage, epsilon=low, epsilon_high=high)
    assert got == pytest.approx(-min(ratio * advantage, clipped * advantage), rel=1e-9, abs=1e-12)


def test_on_policy_gradient_is_the_policy_gradient():
    generator = torch.Generator().manual_seed(0)
    logps = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    advantages = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    clipped_objective(logps, logps.detach(), advantages, mask, epsilon=0.2).sum().backward()
    torch.testing.assert_close(logps.grad, torch.where(mask, -advantages, 0.0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_whatever_stands_at_masked_slots_is_harmless(poison):
    mask = torch.tensor([[True, False]])
    logps = torch.tensor([[-1.0, poison]], requires_grad=True)
    loss = clipped_objective(logps, torch.tensor([[-1.0, -1.0]]), torch.tensor([[2.0, poison]]), mask, epsilon=0.2)
    loss.sum().backward()
    assert loss.tolist() == [[-2.0, 0.0]]
    assert logps.grad.tolist() == [[-2.0, 0.0]]


def test_old_logps_and_advantages_are_constants():
    tensors = [torch.randn(1, 3, requires_grad=True) for _ in range(3)]
    clipped_objective(*tensors, torch.ones(1, 3, dtype=torch.bool), epsilon=0.5).sum().backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None


@pytest.mark.parametrize(("low", "high"), [(0.0, None), (-0.1, None), (1.5, None), (0.2, 0.0), (float("nan"), None)])
def test_impossible_ranges_are_errors(low, high):
    with pytest.raises(ConfigError, match="epsilon"):
        loss_and_gradient(1.0, 1.0, epsilon=low, epsilon_high=high)


@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping raises its own error first")
@pytest.mark.shapes
def test_shape_errors_name_the_argument():
    ones = torch.ones(1, 3)
    with pytest.raises(EvidenceError, match="advantages has shape"):
        clipped_objective(ones, ones, ones[:, :2], torch.ones(1, 3, dtype=torch.bool), epsilon=0.2)
