"""The pipeline on tensors alone: controls that keep what each response retains, whatever its length."""

import pytest
import torch

from comppo.computation import Computation
from comppo.trainers.pipeline import PipelineConfig, Processes, Rollout, compute_gates

LENGTHS = (400, 10, 10, 40)


def rollout_and_computation():
    torch.manual_seed(0)
    tokens = max(LENGTHS)
    mask = torch.arange(tokens)[None] < torch.tensor(LENGTHS)[:, None]
    rows = len(LENGTHS)
    noise = torch.where(mask, torch.rand(rows, tokens, dtype=torch.float64), 0.0)
    rollout = Rollout(
        completion_ids=torch.zeros(rows, tokens, dtype=torch.long),
        mask=mask,
        response_rewards=torch.zeros(rows),
        scorable=torch.ones(rows, dtype=torch.bool),
        num_generations=2,
        index=0,
    )
    computation = Computation(
        statistic=noise,
        routing=noise[:, :, None, None],
        routed=torch.zeros(rows, tokens, 1, 0),
        sink_mass=torch.zeros_like(noise),
        visible_keys=torch.arange(2, tokens + 2).float().expand(rows, -1) * mask,
        hidden=torch.zeros(rows, tokens, 0),
        logps=-noise,
        entropies=noise,
        mask=mask,
        layers=(0,),
    )
    return rollout, computation


def gates(control):
    rollout, computation = rollout_and_computation()
    found = compute_gates(rollout, computation, PipelineConfig(gate_control=control), Processes())
    return found, rollout.mask


@pytest.mark.parametrize("control", ["constant", "position_mean"])
def test_pooling_controls_keep_what_each_response_retains(control):
    """Horizons are in response lengths: the fixed twin retains exp(-1/4) = .779 of a reward at any length."""
    found, mask = gates(control)
    retained = torch.where(mask, found.double(), 1.0).prod(1)
    assert retained.tolist() == pytest.approx([0.779] * len(LENGTHS), abs=0.08)
    if control == "constant":
        for row, kept in zip(found, mask, strict=True):
            assert row[kept].std() < 1e-6
        # The pooled place is a mean over tokens, so long responses weigh more in it
        assert retained.tolist() == pytest.approx([0.779] * len(LENGTHS), abs=0.04)


@pytest.mark.parametrize("control", ["shuffled", "inverted"])
def test_moving_controls_keep_the_gates_of_each_response(control):
    plain, mask = gates(None)
    found, _ = gates(control)
    assert not torch.allclose(found, plain)
    if control == "shuffled":
        for row, before, kept in zip(found, plain, mask, strict=True):
            torch.testing.assert_close(row[kept].sort().values, before[kept].sort().values, rtol=0, atol=1e-6)
    else:
        for row, before, kept in zip(found, plain, mask, strict=True):
            assert torch.equal(row[kept].argsort(stable=True), before[kept].argsort(descending=True, stable=True))
