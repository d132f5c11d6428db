"""A task whose value is readable from the features, shared by test_fit.py and its gloo worker."""

import torch

from comppo.critic.bounded import CriticInputs
from comppo.critic.features import build_features, feature_widths
from comppo.critic.fit import critic_optimizer, fit_critic
from comppo.critic.head import CriticConfig, TransportAlignedCritic

NAMES = ("surprisal", "position", "routing")
WIDTHS = feature_widths(NAMES, routing_channels=6)


def task(seed, rows=16, tokens=12):
    """Outcome 1 minus .2 for each surprising token so far, clipped at 0, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.8
    mask[-1] = False
    surprising = torch.rand(rows, tokens, generator=generator) < 0.3
    logps = torch.where(surprising, -2.0, -0.05)
    features = build_features(
        NAMES, mask=mask, logps=logps, routing=torch.randn(rows, tokens, 2, 3, generator=generator), max_length=tokens
    )
    counted = (surprising & mask).double().cumsum(1) - (surprising & mask).double()
    noise = 0.05 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    returns = (1 - 0.2 * counted).clamp(min=0) + noise
    baseline = torch.full((rows,), 0.6, dtype=torch.float64)
    return CriticInputs(mask=mask, baseline=baseline, features=features), returns


def fitted(inputs, returns, *, epochs=6, dtype=torch.float64, critic=None, optimizer=None, **settings):
    config = CriticConfig(features=NAMES, learning_rate=1e-2, reward_min=0.0, reward_max=1.0)
    critic = critic or TransportAlignedCritic(config, WIDTHS).to(dtype)
    optimizer = optimizer or critic_optimizer(critic, config)
    return critic, fit_critic(critic, optimizer, inputs, returns, epochs=epochs, gradient_clip=1.0, **settings)


def parameters(critic):
    return torch.cat([p.detach().double().flatten() for p in critic.parameters()])
