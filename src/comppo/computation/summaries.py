"""The statistics that can be asked for by name; the sink is left out and the row renormalised over the other keys."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from comppo.computation.statistics import AttentionStatistics
from comppo.errors import ConfigError


def concentration(stats: AttentionStatistics) -> Tensor:
    """1 - entropy / log(visible keys), unitless, in [0, 1]; 0 where fewer than two keys are visible."""
    several = stats.rest_visible_keys > 1
    log_n = torch.where(several, stats.rest_visible_keys, 2.0).log()
    return torch.where(several, 1.0 - stats.rest_entropy / log_n, 0.0).clamp(0.0, 1.0)


ATTENTION_STATISTICS: Mapping[str, Callable[[AttentionStatistics], Tensor]] = MappingProxyType(
    {
        "collision": lambda stats: stats.rest_collision,
        "entropy": lambda stats: stats.rest_entropy,
        "concentration": concentration,
        "maximum": lambda stats: stats.rest_maximum,
        "sink_mass": lambda stats: stats.sink_mass,
    }
)
"""Reductions of attention rows, one value per row, head and token."""

TOKEN_STATISTICS: tuple[str, ...] = ("output_entropy", "hidden_change")
"""Statistics that need no attention: entropy of the output distribution (nats), and the norm of the change of the
hidden state against the position before, relative to that position's norm (unitless; 0 where there is none before)."""


def check_statistic(name: object, known: tuple[str, ...]) -> None:
    """Raise ConfigError where `name` is not one of `known`."""
    if name not in known:
        raise ConfigError(f"statistic={name!r} is unknown: pass one of {', '.join(known)}, or a callable.")
