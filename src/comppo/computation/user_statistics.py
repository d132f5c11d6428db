"""Statistics that a setting names: one of ours, or `module:attribute` for one of the user's own."""

import torch
from torch import Tensor

from comppo.computation.reading import STATISTICS, Statistic
from comppo.computation.statistics import attention_statistics
from comppo.computation.summaries import AttentionStatistic
from comppo.errors import ConfigError
from comppo.loading import load_object, names_object


def load_statistic(spec: str, *, field: str = "statistic") -> Statistic:
    """The statistic that a text names.

    Args:
        spec: a name from `STATISTICS`, or `module:attribute`, where the attribute is an `AttentionStatistic` or a
            callable of `Computation`; the module is looked for as `comppo.loading.load_object` says.
        field: the setting that it was given in, for messages.

    Returns:
        The name, or the object, as `read_computation` takes it. An `AttentionStatistic` was tried on a few rows.

    Raises:
        ConfigError: `spec` names no statistic; the message says what was wrong. What the module's code raises while an
            `AttentionStatistic` is tried passes as it is.
    """
    if spec in STATISTICS:
        return spec
    called = f"{field}={spec!r}"
    if not names_object(spec):
        raise ConfigError(f"{called} is unknown: choose one of {', '.join(STATISTICS)}, or 'module:attribute'.")
    statistic = load_object(spec, called=called, error=ConfigError)
    if isinstance(statistic, AttentionStatistic):
        _try(statistic, called)
        return statistic
    if not callable(statistic):
        raise ConfigError(
            f"{called} is a {type(statistic).__name__}: name an AttentionStatistic, or a function of the Computation."
        )
    return statistic  # type: ignore[no-any-return]


def _try(statistic: AttentionStatistic, called: str) -> None:
    """Compute it for two heads and four tokens, the first of which sees a sink alone."""
    query = torch.linspace(-1.0, 1.0, 16).view(1, 2, 4, 2)
    sinks = torch.tensor([[True, False, False, False]])
    rows = attention_statistics(
        query, query.flip(1), scale=1.0, sinks=sinks, entropy=statistic.entropy, distance=statistic.distance
    )
    values, shape = statistic.compute(rows), rows.collision.shape
    if not isinstance(values, Tensor) or values.shape != shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"{called} gave {got} for rows of shape {tuple(shape)}: return one value for each.")
    if not bool(values.isfinite().all()):
        raise ConfigError(
            f"{called} gave values that are not finite: mind rows with one key, and return 0 where there is none."
        )
