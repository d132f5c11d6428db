"""How far the credit of an operator agrees with the true advantages: a pure function of tensors.

Truth is noisy. It comes as two halves h and k from independent continuations, so that E[h k] = E[A^2] and nothing here
takes noise for signal. With covariances over tokens and m = (h + k) / 2,

    attainable correlation  rho = sqrt(cov(h, k) / var(m))       Spearman-Brown: 2r / (1 + r), r being corr(h, k)
    fidelity                F = corr(a, m) / rho = cov(a, m) / sqrt(var(a) cov(h, k))

which estimates the correlation of `a` with the advantages that infinitely many continuations would give.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.audit.moments import Moments, ratio, select
from comppo.audit.resampling import Estimate, bootstrap_weights, interval, sums_by_prompt
from comppo.errors import ConfigError, EvidenceError

Advantages = Float[Tensor, "rows tokens"] | tuple[Float[Tensor, "rows tokens"], Float[Tensor, "rows tokens"]]
"""One tensor; or, for an operator that is itself made of the continuations, a pair: made of the first half and of the
second. Each is then judged by the other half, so that no noise is shared."""
MATTERS = 2.0
"""A token matters where its true advantage is more than so many standard errors from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorFidelity:
    """How one operator did. NaN: undefined, as the correlation within responses of a credit that is constant there."""

    operator: str
    fidelity: float
    """Correlation with the true advantages over all tokens, as a share of the attainable one."""
    low: float
    """Of the 95 % interval of `fidelity`, resampling prompts."""
    high: float
    correlation: float
    """With the measured advantages: fidelity times the attainable correlation."""
    within: float
    """Fidelity of deviations from each response's mean: does it tell the tokens of a response apart?"""
    within_low: float
    within_high: float
    early: float
    """Fidelity over the first half of every response."""
    late: float
    """And over the second."""
    without_sharpening: float
    """Fidelity after the rewardless rule was projected out of operator and truth; NaN if it was not given."""
    without_sharpening_low: float
    without_sharpening_high: float
    sign_agreement: float
    """Share of the tokens that matter on which the signs agree; a credit of 0 counts as half."""
    sign_low: float
    sign_high: float
    decisive_share: float
    """Share of the squared credit on decisive tokens; NaN if they were not given."""
    gain: float
    """Slope of the credit over the true advantage, units of the credit per reward unit."""
    bias: float
    """Mean of credit / gain - truth, reward units per token; NaN unless the gain is above 0."""
    variance: float
    """Variance of credit / gain - truth, squared reward units, noise of the truth left out; NaN as `bias`."""
    drift: float
    """Fidelity of what it gives when rewards are shuffled between responses; NaN if that was not given."""
    difference: float
    """Fidelity minus that of the reference operator, prompts resampled together; NaN without a reference."""
    difference_low: float
    difference_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """What `credit_fidelity` found."""

    operators: tuple[OperatorFidelity, ...]
    """Best fidelity first; undefined ones last."""
    attainable: float
    """Greatest correlation that the noise of the truth lets a perfect credit reach."""
    attainable_within: float
    """The same within responses."""
    tokens: int
    responses: int
    prompts: int
    matters: float
    """Share of tokens whose true advantage is more than `MATTERS` standard errors from 0."""
    decisive_tokens: float
    """Share of tokens that are decisive; NaN if they were not given."""
    decisive_truth: float
    """Share of the true squared advantage on decisive tokens; NaN if they were not given."""

    def __getitem__(self, operator: str) -> OperatorFidelity:
        """The row of an operator; KeyError where there is none."""
        for row in self.operators:
            if row.operator == operator:
                return row
        raise KeyError(operator)

    def as_json(self) -> dict[str, Any]:
        """JSON types; None where undefined."""
        return {
            name: [_without_nan(row) for row in value] if name == "operators" else _without_nan({name: value})[name]
            for name, value in asdict(self).items()
        }


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}


@torch.no_grad()
def credit_fidelity(
    advantages: Mapping[str, Advantages],
    first_half: Float[Tensor, "rows tokens"],
    second_half: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    prompts: Int[Tensor, " rows"] | None = None,
    segments: Int[Tensor, "rows tokens"] | None = None,
    standard_errors: Float[Tensor, "rows tokens"] | None = None,
    decisive: Bool[Tensor, "rows tokens"] | None = None,
    sharpening: Float[Tensor, "rows tokens"] | None = None,
    drift: Mapping[str, Float[Tensor, "..."]] | None = None,
    reference: str | None = None,
    bootstrap: int = 2000,
    seed: int = 0,
) -> FidelityReport:
    """Hold the credit of any operators against true advantages. Needs no model and no other part of comppo.

    Args:
        advantages: credit by operator name, any scale; whatever stands at masked slots is ignored.
        first_half: true advantages from one half of the continuations, reward units.
        second_half: the same from the other half.
        mask: true at the tokens that count.
        prompts: which prompt each response answers: any numbers, equal within a group; None: each its own.
        segments: number of each token's segment within its response, where the truth is known for segments alone: each
            credit is then averaged over the segment, as the truth is. None: every token by itself.
        standard_errors: of the mean of both halves, reward units; None: one for all, from the difference of the halves.
        decisive: true at tokens that are known to decide the reward.
        sharpening: credit of a rule that ignores the reward, such as entropy minus surprisal.
        drift: by operator name, its credit after rewards were shuffled between responses, (rows, tokens), or
            (shuffles, rows, tokens), whose fidelities are averaged.
        reference: the operator that the others are compared with, such as "grpo".
        bootstrap: resamples of the prompts, at least 100.
        seed: of the resamples.

    Returns:
        One row per operator, best first. All sums are float64.

    Raises:
        ConfigError: no operator, an unknown reference or drift, or a number out of range.
        EvidenceError: shapes differ, no token counts, or a number is not finite there.
    """
    tensors = {"first_half": first_half, "second_half": second_half, "segments": segments, "decisive": decisive}
    tensors |= {"standard_errors": standard_errors, "sharpening": sharpening}
    _check(advantages, tensors, mask, prompts, drift or {}, reference, bootstrap)
    audit = _Audit(tensors, mask, prompts, bootstrap, seed)
    curves = {name: audit.fidelities(pair) for name, pair in advantages.items()}
    rows = [
        audit.row(name, pair, (drift or {}).get(name), curves[name], None if reference is None else curves[reference])
        for name, pair in advantages.items()
    ]
    rows.sort(key=lambda row: (math.isnan(row.fidelity), -row.fidelity))
    return audit.report(rows)


def _check(
    advantages: Mapping[str, Advantages],
    tensors: Mapping[str, Tensor | None],
    mask: Tensor,
    prompts: Tensor | None,
    drift: Mapping[str, Tensor],
    reference: str | None,
    bootstrap: int,
) -> None:
    if not advantages:
        raise ConfigError("advantages is empty: pass the credit of at least one operator.")
    if bootstrap < 100:
        raise ConfigError(f"bootstrap must be at least 100, got {bootstrap!r}.")
    for name in (*drift, *(() if reference is None else (reference,))):
        if name not in advantages:
            raise ConfigError(f"{name!r} is not among the operators {', '.join(advantages)}.")
    if prompts is not None and prompts.shape != mask.shape[:1]:
        raise EvidenceError(f"prompts has shape {tuple(prompts.shape)}, but there are {mask.shape[0]} responses.")
    if not bool(mask.any()):
        raise EvidenceError("mask is false everywhere: no token counts.")
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, credit in advantages.items():
        parts = credit if isinstance(credit, tuple) else (credit,)
        named |= {f"advantages[{name!r}]" + "'" * at: part for at, part in enumerate(parts)}
    for name, credit in drift.items():
        named |= {f"drift[{name!r}]": part for part in (credit if credit.ndim == 3 else [credit])}
    for name, tensor in named.items():
        if tensor.shape != mask.shape:
            raise EvidenceError(f"{name} has shape {tuple(tensor.shape)}, but mask has {tuple(mask.shape)}.")
        if tensor.is_floating_point() and not bool(tensor[mask].isfinite().all()):
            raise EvidenceError(f"{name} holds a number that is not finite where mask is true.")


class _Audit:
    """The truth, and what every operator is held against."""

    def __init__(
        self, tensors: Mapping[str, Tensor | None], mask: Tensor, prompts: Tensor | None, bootstrap: int, seed: int
    ) -> None:
        rows = mask.any(1)
        self.mask = mask[rows].cpu()
        self._rows = rows
        self.segments = self._own(tensors["segments"])
        own = torch.arange(len(rows)) if prompts is None else prompts.cpu()
        self.prompts = torch.unique(own[rows.cpu()], return_inverse=True)[1]
        self.count = int(self.prompts.max()) + 1
        self.weights = bootstrap_weights(self.count, bootstrap, seed)
        self.first, self.second = (self.prepare(tensors[name]) for name in ("first_half", "second_half"))
        self.truth = (self.first + self.second) / 2
        given = tensors["standard_errors"]
        pooled = (self.first - self.second)[self.mask].square().mean().sqrt() / 2
        self.errors = pooled.expand(self.mask.shape) if given is None else self.prepare(given)
        self.decisive = self._own(tensors["decisive"])
        sharpening = tensors["sharpening"]
        self.sharpening = None if sharpening is None else self.prepare(sharpening)
        position = self.mask.cumsum(1)
        self.early = self.mask & (2 * position <= self.mask.sum(1, keepdim=True) + 1)

    def _own(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[self._rows].cpu()

    def prepare(self, tensor: Tensor | None) -> Tensor:
        """float64, 0 at masked slots, averaged over segments."""
        assert tensor is not None, "checked"
        values = torch.where(self.mask, tensor.detach()[self._rows].cpu().double(), 0.0)
        if self.segments is None:
            return values
        places = torch.where(self.mask, self.segments, 0).clamp(min=0)
        sums = torch.zeros(len(values), int(places.max()) + 1, dtype=torch.float64)
        counts = torch.zeros_like(sums).scatter_add_(1, places, self.mask.double())
        sums.scatter_add_(1, places, values)
        return torch.where(self.mask, (sums / counts.clamp(min=1)).gather(1, places), 0.0)

    def pair(self, credit: Advantages) -> tuple[Tensor, Tensor]:
        """What is judged by the second half, and what is judged by the first."""
        if isinstance(credit, tuple):
            return self.prepare(credit[0]), self.prepare(credit[1])
        prepared = self.prepare(credit)
        return prepared, prepared

    def moments(self, credit: Advantages, keep: Tensor, *, within: bool = False) -> Moments:
        """Second moments of credit, halves and sharpening over the tokens `keep`, for every resample."""
        columns = [*self.pair(credit), self.first, self.second]
        if self.sharpening is not None:
            columns.append(self.sharpening)
        return Moments.of(torch.stack(columns, 2), keep, self.prompts, self.weights, within=within)

    def fidelities(self, credit: Advantages) -> Tensor:
        """Fidelity of the sample and of every resample."""
        return self.moments(credit, self.mask).fidelity()

    def row(
        self, name: str, credit: Advantages, drift: Tensor | None, curve: Tensor, reference: Tensor | None
    ) -> OperatorFidelity:
        overall = self.moments(credit, self.mask)
        whole, inside = self._estimate(curve), self._estimate(self.moments(credit, self.mask, within=True).fidelity())
        nothing = Estimate(math.nan, math.nan, math.nan)
        unsharpened = nothing if self.sharpening is None else self._estimate(overall.without_last().fidelity())
        signs = self._estimate(self._signs(credit))
        difference = nothing if reference is None else self._estimate(curve - reference)
        gain, bias, variance = overall.scaled_errors()
        shuffles = () if drift is None else (drift if drift.ndim == 3 else drift[None])
        drifts = [float(self.fidelities(shuffle)[0]) for shuffle in shuffles]
        return OperatorFidelity(
            operator=name,
            fidelity=whole.value,
            low=whole.low,
            high=whole.high,
            correlation=whole.value * float(overall.attainable()[0]),
            within=inside.value,
            within_low=inside.low,
            within_high=inside.high,
            early=float(self.moments(credit, self.early).fidelity()[0]),
            late=float(self.moments(credit, self.mask & ~self.early).fidelity()[0]),
            without_sharpening=unsharpened.value,
            without_sharpening_low=unsharpened.low,
            without_sharpening_high=unsharpened.high,
            sign_agreement=signs.value,
            sign_low=signs.low,
            sign_high=signs.high,
            decisive_share=self._share(*self.pair(credit)),
            gain=gain,
            bias=bias,
            variance=variance,
            drift=sum(drifts) / len(drifts) if drifts else math.nan,
            difference=difference.value,
            difference_low=difference.low,
            difference_high=difference.high,
        )

    def _estimate(self, curve: Tensor) -> Estimate:
        return interval(curve, self.count)

    def _signs(self, credit: Advantages) -> Tensor:
        if isinstance(credit, tuple):
            wider = MATTERS * math.sqrt(2.0) * self.errors  # half as many continuations
            judged = [(self.prepare(credit[0]), self.second, wider), (self.prepare(credit[1]), self.first, wider)]
        else:
            judged = [(self.prepare(credit), self.truth, MATTERS * self.errors)]
        agree = total = torch.zeros(len(self.mask), dtype=torch.float64)
        for values, truth, least in judged:
            matters = self.mask & (truth.abs() > least)
            agree = agree + torch.where(matters, (1.0 + values.sign() * truth.sign()) / 2, 0.0).sum(1)
            total = total + matters.double().sum(1)
        sums = sums_by_prompt(torch.stack((agree, total), 1), self.prompts, self.count)
        return ratio(*(self.weights @ sums).unbind(1))

    def _share(self, a: Tensor, b: Tensor) -> float:
        if self.decisive is None:
            return math.nan
        mass = a * b
        return float(ratio(select(mass, self.mask & self.decisive).sum(), select(mass, self.mask).sum()))

    def report(self, rows: list[OperatorFidelity]) -> FidelityReport:
        tokens = int(self.mask.sum())
        decisive = math.nan if self.decisive is None else float((self.mask & self.decisive).sum()) / tokens
        matters = float((self.mask & (self.truth.abs() > MATTERS * self.errors)).sum()) / tokens
        return FidelityReport(
            operators=tuple(rows),
            attainable=self._attainable(within=False),
            attainable_within=self._attainable(within=True),
            tokens=tokens,
            responses=len(self.mask),
            prompts=self.count,
            matters=matters,
            decisive_tokens=decisive,
            decisive_truth=self._share(self.first, self.second),
        )

    def _attainable(self, *, within: bool) -> float:
        columns = torch.stack((self.truth, self.truth, self.first, self.second), 2)
        return float(Moments.of(columns, self.mask, self.prompts, self.weights[:1], within=within).attainable()[0])
