"""Second moments per prompt, so that correlations of any resample of the prompts follow without another look at tokens.

Columns: credit judged by the second half, credit judged by the first, first half, second half, and maybe a further one.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.audit.resampling import sums_by_prompt

ROUNDING = 1e-12
"""A variance below this share of the column's mean square is rounding error: the column is constant."""


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below, NaN where `below` is not above 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), torch.nan)


def select(values: Tensor, keep: Tensor) -> Tensor:
    """`values`, 0 where not kept."""
    return torch.where(keep, values, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Means and covariances of the sample and of every resample, float64."""

    means: Float[Tensor, "draws columns"]
    covariances: Float[Tensor, "draws columns columns"]

    @classmethod
    def of(
        cls,
        columns: Float[Tensor, "rows tokens columns"],
        keep: Bool[Tensor, "rows tokens"],
        prompts: Int[Tensor, " rows"],
        weights: Float[Tensor, "draws prompts"],
        *,
        within: bool = False,
    ) -> "Moments":
        """Moments over the kept tokens.

        Args:
            columns: float64.
            keep: tokens that count.
            prompts: prompt of each response, 0 .. prompts - 1.
            weights: how often each prompt counts in each resample.
            within: take each response's mean off first.

        Returns:
            Moments with the divisor n; a column that is constant up to rounding has the variance 0.
        """
        kept = select(columns, keep[..., None])
        counts = keep.sum(1).double()
        size = kept.square().sum((0, 1)) / counts.sum().clamp(min=1)
        # Covariances do not depend on a shift: without the mean they lose fewer digits
        centre = kept.sum(1) / counts.clamp(min=1)[:, None] if within else kept.sum((0, 1))[None] / counts.sum()
        deviations = select(columns - centre[:, None], keep[..., None])
        spread = deviations.square().sum((0, 1)) / counts.sum().clamp(min=1)
        deviations = torch.where(spread > ROUNDING * size, deviations, 0.0)
        squares = torch.einsum("rti,rtj->rij", deviations, deviations)
        total = (weights @ sums_by_prompt(counts, prompts, weights.shape[1])).clamp(min=1)
        sums = torch.einsum("dp,pi->di", weights, sums_by_prompt(deviations.sum(1), prompts, weights.shape[1]))
        products = torch.einsum("dp,pij->dij", weights, sums_by_prompt(squares, prompts, weights.shape[1]))
        shift = sums / total[:, None]
        return cls(
            means=shift if within else shift + centre,
            covariances=products / total[:, None, None] - shift[:, :, None] * shift[:, None, :],
        )

    def without_last(self) -> "Moments":
        """The same after the last column was projected out of the others, by least squares."""
        c = self.covariances
        along, size = c[:, :-1, -1], c[:, -1, -1]
        scale = torch.where(size > 0, 1.0 / torch.where(size > 0, size, 1.0), 0.0)
        rest = c[:, :-1, :-1] - along[:, :, None] * along[:, None, :] * scale[:, None, None]
        # What is left of a column that lies along the last one is rounding error
        gone = rest.diagonal(dim1=1, dim2=2) <= ROUNDING * c[:, :-1, :-1].diagonal(dim1=1, dim2=2)
        keep = (~gone).double()
        return Moments(self.means[:, :-1], rest * keep[:, :, None] * keep[:, None, :])

    @property
    def signal(self) -> Float[Tensor, " draws"]:
        """Variance of the truth without its noise."""
        return self.covariances[:, 2, 3]

    @property
    def _shared(self) -> Float[Tensor, " draws"]:
        """Covariance of credit and truth, no noise shared."""
        return (self.covariances[:, 0, 3] + self.covariances[:, 1, 2]) / 2

    @property
    def _own(self) -> Float[Tensor, " draws"]:
        """Variance of the credit."""
        return (self.covariances[:, 0, 0] + self.covariances[:, 1, 1]) / 2

    def fidelity(self) -> Float[Tensor, " draws"]:
        """Noise-corrected correlation; NaN where credit or truth is constant."""
        return ratio(self._shared, (self._own.clamp(min=0) * self.signal.clamp(min=0)).sqrt())

    def attainable(self) -> Float[Tensor, " draws"]:
        """sqrt(reliability) of the mean of the halves; 0 where the halves do not agree at all."""
        c = self.covariances
        whole = (c[:, 2, 2] + c[:, 3, 3] + 2 * c[:, 2, 3]) / 4
        return ratio(self.signal.clamp(min=0), whole).sqrt()

    def scaled_errors(self) -> tuple[float, float, float]:
        """Gain, and bias and variance of credit / gain - truth, of the sample."""
        gain = float(ratio(self._shared, self.signal)[0])
        if not gain > 0.0:
            return gain, math.nan, math.nan
        means = self.means[0]
        bias = float((means[0] + means[1]) / 2 / gain - (means[2] + means[3]) / 2)
        return gain, bias, float(self._own[0] / gain**2 - self.signal[0])
