"""From a statistic of the policy's computation to retention gates: bounded, detached, with a chosen mean."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError
from comppo.transport._checks import require_choice, require_finite, require_shapes

Unit = Literal["response_lengths", "tokens", "coefficients"]
Residualize = Literal["log_keys_position", "log_keys", "position", "none"]
UNITS = ("response_lengths", "tokens", "coefficients")
RESIDUALIZE = ("log_keys_position", "log_keys", "position", "none")

Reduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over the processes that share a batch, such as a wrapped all_reduce; None where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """Range, mean and slope of the retention gate.

    A gate below 1 at every token is a decay with position, whatever its pattern: over a response of n tokens the shares
    multiply. That is why bounds are horizons, and by default horizons in response lengths.

    Raises:
        ConfigError: bounds out of order or range, or an unknown choice.
    """

    unit: Unit = "response_lengths"
    """Unit of the bounds. A horizon h is the gate exp(-1/h) in "tokens", and exp(-1/(h * length)) in
    "response_lengths", where length counts the row's unmasked tokens. "coefficients" are the gates themselves."""
    minimum: float = 0.5
    """Least share of later credit that a token keeps. Horizon above 0, or coefficient in [0, reference]."""
    reference: float = 4.0
    """The batch mean of the gates is that of this constant. Between minimum and maximum."""
    maximum: float = math.inf
    """Greatest share. Horizon up to infinity (nothing is lost), or coefficient in [reference, 1]."""
    sharpness: float = 1.0
    """Slope of sigmoid(sharpness * z + offset). Unitless; 0 is a constant gate, below 0 turns the direction."""
    residualize: Residualize = "position"
    """What is removed from the statistic by least squares: the "position" in the response, the log of the number of
    visible keys ("log_keys", which leaves the position in where prompts differ in length), the latter and
    log(1 + position) together ("log_keys_position"), or "none". docs/reading.md has figures."""

    def __post_init__(self) -> None:
        require_choice("unit", self.unit, UNITS)
        require_choice("residualize", self.residualize, RESIDUALIZE)
        given = f"minimum={self.minimum!r}, reference={self.reference!r}, maximum={self.maximum!r}"
        if not self.minimum <= self.reference <= self.maximum:
            raise ConfigError(f"need minimum <= reference <= maximum, got {given}.")
        if self.unit == "coefficients" and not (self.minimum >= 0.0 and self.maximum <= 1.0):
            raise ConfigError(
                f'coefficients must lie in [0, 1], got {given}: horizons need unit="tokens" or "response_lengths".'
            )
        if self.unit != "coefficients" and not self.minimum > 0.0:
            raise ConfigError(
                f'horizons must be above 0, got {given}. For a gate that may close, use unit="coefficients".'
            )
        if not math.isfinite(self.sharpness):
            raise ConfigError(f"sharpness must be finite, got {self.sharpness!r}. Usual values are 0.5 to 4.")

    def coefficients(self, horizon: float, lengths: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """`horizon`, in this config's unit, as one gate per row of `lengths` unmasked tokens (at least 1)."""
        if self.unit == "coefficients":
            return torch.full_like(lengths, horizon)
        tokens = torch.full_like(lengths, horizon)
        if self.unit == "response_lengths":
            tokens = tokens * lengths.clamp(min=1)
        return torch.exp(-1.0 / tokens)


@torch.no_grad()
def standardize(
    statistic: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    covariates: Sequence[Float[Tensor, "rows tokens"]] = (),
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """z: the statistic with mean 0 and variance 1 over the batch's unmasked tokens, least squares removed.

    Args:
        statistic: one number per token, any unit.
        mask: true where the policy chose the token; whatever stands elsewhere is ignored.
        covariates: what explains the statistic trivially, such as log n or the position; their plane is removed.
        reduce: sums a tensor over processes, so that a batch in shards gives the same z; None for one process.

    Returns:
        Unitless, float64, detached; 0 at masked slots, and everywhere if nothing but rounding noise is left.

    Raises:
        EvidenceError: shapes differ, or statistic or a covariate is not finite at an unmasked token.

    Source:
        Ordinary least squares, by the normal equations of centred regressors scaled to unit variance.
    """
    require_shapes(mask, statistic=statistic)
    for covariate in covariates:
        require_shapes(mask, covariate=covariate)
    reduce = reduce or _alone
    # Counted over all processes first: an error on one of them alone would leave the others waiting
    if bool(reduce((mask & ~statistic.isfinite()).sum().double()) > 0):
        require_finite("statistic", statistic, mask)
        raise EvidenceError("statistic is not finite at an unmasked token on another process: see the error there.")
    x = torch.where(mask, statistic.detach(), 0).double()
    count, total, energy = reduce(torch.stack((mask.sum().double(), x.sum(), x.square().sum()))).unbind()
    count = count.clamp(min=1)
    x = torch.where(mask, x - total / count, 0)
    if covariates:
        x = x - _fitted(x, covariates, mask, count, reduce)
    deviation = (reduce(x.square().sum()) / count).sqrt()
    # A constant statistic, or one on the plane, leaves rounding noise, which must not be blown up to variance 1.
    epsilon = torch.finfo(torch.float64 if statistic.dtype == torch.float64 else torch.float32).eps
    noise = 4 * epsilon * (energy / count).sqrt()
    return torch.where(deviation > noise, x / deviation, 0)


def _fitted(x: Tensor, covariates: Sequence[Tensor], mask: Tensor, count: Tensor, reduce: Reduce) -> Tensor:
    """The least-squares fit of a centred `x`; regressors that say the same twice share their part."""
    rows = []
    for i, covariate in enumerate(covariates):
        require_finite(f"covariates[{i}]", covariate, mask)
        c = torch.where(mask, covariate.detach(), 0).double()
        c = torch.where(mask, c - reduce(c.sum()) / count, 0)
        deviation = (reduce(c.square().sum()) / count).sqrt()
        rows.append(torch.where(deviation > 0, c / deviation, 0))
    design = torch.stack(rows)
    products = reduce(torch.einsum("irt,jrt->ij", design, torch.cat((design, x[None]))))
    weights = torch.linalg.pinv(products[:, :-1], rtol=1e-9, hermitian=True) @ products[:, -1]
    fitted: Tensor = torch.einsum("i,irt->rt", weights, design)
    return fitted


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@torch.no_grad()
def gate_from_statistic(
    statistic: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    config: GateConfig,
    *,
    visible_keys: Int[Tensor, "rows tokens"] | Float[Tensor, "rows tokens"] | None = None,
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """g = g_min + (g_max - g_min) * sigmoid(sharpness * z + offset), with the batch mean of the reference coefficients.

    A gated arm and its fixed twin therefore differ in the pattern over tokens alone. With bounds in response lengths,
    g_min, g_max and the reference differ between rows, and the means are taken over the batch's unmasked tokens.

    Args:
        statistic: one number per token, any unit; see `standardize`.
        mask: true where the policy chose the token.
        config: bounds, reference, slope and what is removed first.
        visible_keys: how many keys the query of each token could attend to, at least 1; for the choices of
            `residualize` that speak of keys.
        reduce: sums a tensor over processes; None for one process.

    Returns:
        Gates with the dtype of the statistic (at least float32), detached: inside [g_min, g_max] at unmasked tokens,
        1 at masked slots. In float64 the mean is met to 1e-9; float32 adds its rounding.

    Raises:
        EvidenceError: shapes differ, the statistic is not finite at unmasked tokens, or visible_keys is unusable.

    Source:
        Ours, after the abstract of arXiv:2608.21501; docs/mathematics.md.
    """
    require_shapes(mask, statistic=statistic, visible_keys=visible_keys)
    reduce = reduce or _alone
    z = standardize(statistic, mask, covariates=_covariates(mask, config, visible_keys), reduce=reduce)
    lengths = mask.sum(1).double()
    low, middle, high = (
        config.coefficients(bound, lengths)[:, None] for bound in (config.minimum, config.reference, config.maximum)
    )
    wanted, width = reduce(torch.stack((((middle - low) * mask).sum(), ((high - low) * mask).sum()))).unbind()
    if config.reference in (config.minimum, config.maximum) or not bool((wanted > 0) & (wanted < width)):
        gates = middle.expand(mask.shape)
    else:
        logits = config.sharpness * z
        offset = _solve_offset(logits, (high - low) * mask, wanted, width, config.sharpness, reduce, lengths.sum())
        gates = (low + (high - low) * torch.sigmoid(logits + offset)).clamp(low, high)
    return torch.where(mask, gates, 1).to(torch.promote_types(torch.float32, statistic.dtype))


def _covariates(mask: Tensor, config: GateConfig, visible_keys: Tensor | None) -> tuple[Tensor, ...]:
    position = (mask.cumsum(1) - 1).clamp_min(0).double()
    if config.residualize == "none":
        return ()
    if config.residualize == "position":
        return (position,)
    if visible_keys is None:
        raise EvidenceError(
            f"residualize={config.residualize!r} needs visible_keys, which is None: pass the number of keys each query "
            'could attend to, or set residualize="position" or "none".'
        )
    keys = torch.where(mask, visible_keys.detach(), 1).double()
    require_finite("visible_keys", keys)
    if bool((keys < 1).any()):
        raise EvidenceError(
            f"visible_keys holds {keys.min().item()} at an unmasked token: every query sees at least one key."
        )
    return (keys.log(),) if config.residualize == "log_keys" else (keys.log(), position.log1p())


def _solve_offset(
    logits: Tensor, widths: Tensor, wanted: Tensor, width: Tensor, sharpness: float, reduce: Reduce, count: Tensor
) -> Tensor:
    """The offset at which sum(widths * sigmoid(logits + offset)) is `wanted`, where sum(widths) is `width`.

    The sum grows with the offset. Newton steps inside a bracket, bisection where they leave it or gain too little: the
    same few rounds in every process, because each decision is taken on reduced numbers.
    """
    share = wanted / width
    center = torch.log(share) - torch.log1p(-share)
    reach = abs(sharpness) * reduce(count).sqrt() + 1e-6  # |z| is at most sqrt(count) where the variance is 1
    low, high, offset = center - reach, center + reach, center
    step = last_step = high - low
    for _ in range(200):
        share_at = torch.sigmoid(logits + offset)
        miss, slope = reduce(
            torch.stack(((widths * share_at).sum(), (widths * share_at * (1 - share_at)).sum()))
        ).unbind()
        miss = miss - wanted
        if bool(miss.abs() <= 1e-13 * width) or bool(high - low <= 1e-15 * (1 + offset.abs())):
            break
        low, high = torch.where(miss < 0, offset, low), torch.where(miss < 0, high, offset)
        newton = offset - miss / slope
        trusted = (newton > low) & (newton < high) & (2 * miss.abs() <= (last_step * slope).abs())
        proposed = torch.where(trusted, newton, (low + high) / 2)
        last_step, step = step, proposed - offset
        offset = proposed
    return offset
