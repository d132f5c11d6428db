"""GRPO's residuals equal, bit for bit, what TRL's own statistics give in float32."""

import pytest
import torch

from comppo.transport import group_residuals

utils = pytest.importorskip("trl.trainer.utils")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("lost", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("num_generations", [2, 8])
def test_group_residuals_are_trls_advantages(scale, lost, num_generations):
    generator = torch.Generator().manual_seed(num_generations)
    rewards = torch.randn(6 * num_generations, generator=generator)
    rewards[torch.rand(len(rewards), generator=generator) < lost] = torch.nan
    grouped = rewards.view(-1, num_generations)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (utils.nanstd(grouped, dim=1)[:, None] + 1e-4)
    elif scale == "batch":
        centred = centred / (utils.nanstd(rewards) + 1e-4)
    expected = centred.nan_to_num(nan=0.0).flatten()
    assert torch.equal(group_residuals(rewards, num_generations=num_generations, scale=scale), expected)
