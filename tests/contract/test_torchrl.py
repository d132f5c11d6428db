"""Comp-GAE equals torchrl's GAE loop with the per-token discount gamma * g."""

import pytest
import torch

from comppo.transport import comp_gae

functional = pytest.importorskip("torchrl.objectives.value.functional")


@pytest.mark.parametrize("tokens", [1, 2, 17, 63, 400])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("cut_off", [False, True])
def test_comp_gae_is_torchrls_gae_with_a_discount_per_token(tokens, lam, cut_off):
    """torchrl: (rows, tokens, 1); `done` ends the trace, `terminated` also the bootstrap."""
    generator = torch.Generator().manual_seed(tokens)
    rewards, values = (torch.randn(3, tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    gates = torch.rand(3, tokens, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(3, generator=generator, dtype=torch.float64)
    following = torch.cat((values[:, 1:], bootstrap[:, None]), dim=1)
    done = torch.zeros(3, tokens, 1, dtype=torch.bool)
    done[:, -1] = True
    advantages, returns = functional.generalized_advantage_estimate(
        (0.97 * gates)[..., None],
        lam,
        values[..., None],
        following[..., None],
        rewards[..., None],
        done,
        torch.zeros_like(done) if cut_off else done,
    )
    credit = comp_gae(
        rewards,
        values,
        gates,
        torch.ones(3, tokens, dtype=torch.bool),
        gamma=0.97,
        lam=lam,
        bootstrap_values=bootstrap if cut_off else None,
    )
    torch.testing.assert_close(credit.advantages, advantages[..., 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(credit.returns, returns[..., 0], rtol=1e-12, atol=1e-12)
