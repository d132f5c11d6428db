"""The statistics of attention rows that can be asked for by name, and how a user brings their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from comppo.computation.attention_rows import AttentionStatistics
from comppo.computation.router import ROUTER_STATISTICS
from comppo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionStatistic:
    """A number per row, head and token, made from reduced attention rows.

    Example:
        peak_over_mean = AttentionStatistic("peak_over_mean", lambda rows: rows.rest_maximum * rows.rest_visible_keys)
        ComputationReader(model, statistics=("collision", peak_over_mean))
    """

    name: str
    """What it is called where results are asked for."""
    compute: Callable[[AttentionStatistics], Tensor]
    """(rows, heads, tokens) from the reductions; 0 where a row has no key but sinks, so that padding stays 0."""
    entropy: bool = True
    """Whether `compute` looks at entropies, which cost a tenth more."""
    distance: bool = True
    """Whether it looks at distances, which cost a fifth more."""

    def __post_init__(self) -> None:
        if not self.name or not callable(self.compute):
            raise ConfigError(
                f"AttentionStatistic({self.name!r}, {self.compute!r}): pass a name and a function of reduced rows."
            )


def _entropy(rows: AttentionStatistics) -> Tensor:
    assert rows.rest_entropy is not None
    return rows.rest_entropy


def _distance(rows: AttentionStatistics) -> Tensor:
    assert rows.rest_distance is not None
    return rows.rest_distance


def normalised_entropy(rows: AttentionStatistics) -> Tensor:
    """entropy / log(visible keys), unitless, in [0, 1]; 1 where one key is visible, 0 where none is."""
    return torch.where(rows.rest_visible_keys > 0, 1.0 - concentration(rows), 0.0)


def concentration(rows: AttentionStatistics) -> Tensor:
    """1 - entropy / log(visible keys), unitless, in [0, 1]; 0 where fewer than two keys are visible."""
    several = rows.rest_visible_keys > 1
    log_n = torch.where(several, rows.rest_visible_keys, 2.0).log()
    return torch.where(several, 1.0 - _entropy(rows) / log_n, 0.0).clamp(0.0, 1.0)


def effective_keys(rows: AttentionStatistics) -> Tensor:
    """1 / collision: how many equally weighted keys would collide as often; 0 where no key is visible."""
    some = rows.rest_collision != 0  # also where it is NaN
    return torch.where(some, 1.0 / torch.where(some, rows.rest_collision, 1.0), 0.0)


_BY_REST = (
    AttentionStatistic("collision", lambda rows: rows.rest_collision, entropy=False, distance=False),
    AttentionStatistic("effective_keys", effective_keys, entropy=False, distance=False),
    AttentionStatistic("entropy", _entropy, distance=False),
    AttentionStatistic("normalised_entropy", normalised_entropy, distance=False),
    AttentionStatistic("concentration", concentration, distance=False),
    AttentionStatistic("maximum", lambda rows: rows.rest_maximum, entropy=False, distance=False),
    AttentionStatistic("distance", _distance, entropy=False),
)
_SINK_MASS = AttentionStatistic("sink_mass", lambda rows: rows.sink_mass, entropy=False, distance=False)


def _of_whole_rows(statistic: AttentionStatistic) -> AttentionStatistic:
    """The same of rows with their sinks."""

    def compute(rows: AttentionStatistics) -> Tensor:
        whole = replace(
            rows,
            rest_collision=rows.collision,
            rest_maximum=rows.maximum,
            rest_visible_keys=rows.visible_keys,
            rest_entropy=rows.entropy,
            rest_distance=rows.distance,
        )
        return statistic.compute(whole)

    return replace(statistic, name=f"whole_{statistic.name}", compute=compute)


ATTENTION_STATISTICS: Mapping[str, AttentionStatistic] = MappingProxyType(
    {s.name: s for s in (*_BY_REST, _SINK_MASS, *map(_of_whole_rows, _BY_REST))}
)
"""Reductions of attention rows without their sinks, renormalised; those named "whole_..." are of rows with them."""

DEFAULT_STATISTIC = "whole_effective_keys"
"""Chosen by `studies/reading_defaults.py`, as `DEFAULT_LAYERS` was: docs/reading.md has the figures."""

_DIFFUSE = ("effective_keys", "entropy", "normalised_entropy", "distance")
DIFFUSE_STATISTICS = frozenset((*_DIFFUSE, *(f"whole_{name}" for name in _DIFFUSE), "output_entropy", "router_entropy"))
"""Those that are high where computation is spread out, and low where it is concentrated."""

TOKEN_STATISTICS: tuple[str, ...] = ("output_entropy", "hidden_change")
"""Statistics that need no attention: entropy of the output distribution (nats), and the norm of the change of the
hidden state against the position before, relative to that position's norm (unitless; 0 where there is none before)."""


def chosen_statistics(statistics: Sequence[str | AttentionStatistic]) -> dict[str, AttentionStatistic]:
    """The statistics that were asked for, by name.

    Args:
        statistics: names from `ATTENTION_STATISTICS`, or statistics of the caller's own.

    Returns:
        Each once, in order.

    Raises:
        ConfigError: a name is unknown, or two statistics share one.
    """
    chosen: dict[str, AttentionStatistic] = {}
    for given in statistics:
        if callable(given):
            raise ConfigError(f"statistic={given!r} has no name: pass AttentionStatistic(name, function).")
        if not isinstance(given, AttentionStatistic):
            check_statistic(given, (*ATTENTION_STATISTICS, *ROUTER_STATISTICS))
        elif given.name in ATTENTION_STATISTICS and given != ATTENTION_STATISTICS[given.name]:
            raise ConfigError(f"a statistic of ours is named {given.name!r}: give yours another name.")
        statistic = given if isinstance(given, AttentionStatistic) else ATTENTION_STATISTICS[given]
        if chosen.setdefault(statistic.name, statistic) != statistic:
            raise ConfigError(f"two statistics are named {statistic.name!r}: give yours another name.")
    return chosen


def name_of(statistic: str | AttentionStatistic) -> str:
    """A statistic's name."""
    return statistic.name if isinstance(statistic, AttentionStatistic) else statistic


def check_statistic(name: object, known: Sequence[str]) -> None:
    """Raise ConfigError where `name` is not one of `known`."""
    if name not in known:
        raise ConfigError(f"statistic={name!r} is unknown: pass one of {', '.join(known)}, or one of your own.")
