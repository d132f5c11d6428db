"""Is a statistic of the computation a faithful proxy of a token's importance? Correlations with |true advantage|.

Partial correlations are those of what is left of statistic and importance after position, token identity and surprisal
were removed by least squares. The test shifts importance cyclically along the responses, all responses of a prompt by
the same random share of their length: its course along a response stays, and so does what the responses of a prompt
have in common. It takes the greatest |correlation| over all channels: p-values are corrected for the number of layers,
heads and statistics (Westfall and Young 1993).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError

MOST_TOKENS = 24
"""Different tokens that have an indicator of their own, the most frequent ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProxyReport:
    """One number per channel, float64; NaN where a channel is constant."""

    correlation: Float[Tensor, " channels"]
    """With |true advantage|."""
    partial: Float[Tensor, " channels"]
    """After position, token identity and surprisal."""
    p_value: Float[Tensor, " channels"]
    """Of `partial`, corrected for all channels together."""
    units: int
    """Tokens, or segments."""


@torch.no_grad()
def proxy_test(
    statistics: Float[Tensor, "rows tokens channels"],
    true_advantages: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    token_ids: Int[Tensor, "rows tokens"],
    input_tokens: Int[Tensor, "rows tokens"],
    surprisal: Float[Tensor, "rows tokens"],
    prompts: Int[Tensor, " rows"] | None = None,
    segments: Int[Tensor, "rows tokens"] | None = None,
    permutations: int = 1000,
    seed: int = 0,
) -> ProxyReport:
    """Correlate channels (a statistic in one layer and head) with |true advantage|.

    Args:
        statistics: one column per channel, read at the position that emits each token.
        true_advantages: reward units; noise weakens every correlation alike.
        mask: true at the tokens that count.
        token_ids: the emitted tokens.
        input_tokens: the tokens at the emitting positions.
        surprisal: -log p of the emitted tokens, nats.
        prompts: which prompt each response answers; None: each its own.
        segments: where the truth is known for segments, each is one unit, with the mean of its tokens.
        permutations: at least 99.
        seed: of the permutations.

    Returns:
        Correlations and corrected p-values by channel.

    Raises:
        ConfigError: too few permutations.
        EvidenceError: fewer than three tokens count.
    """
    if permutations < 99:
        raise ConfigError(f"permutations must be at least 99, got {permutations!r}.")
    mask = mask.cpu()
    if int(mask.sum()) < 3:
        raise EvidenceError("fewer than three tokens count: a correlation needs more.")
    place = (mask.cumsum(1) - 1).double()
    covariates = torch.stack((place, place.square(), (1 + place).log(), surprisal.cpu().double()), 2)
    units, rows = _units(
        torch.cat(
            (
                true_advantages.cpu().double()[..., None],
                covariates,
                _indicators(token_ids.cpu(), mask),
                _indicators(input_tokens.cpu(), mask),
                statistics.cpu().double(),
            ),
            2,
        ),
        mask,
        None if segments is None else segments.cpu(),
    )
    channels = statistics.shape[2]
    importance, given, values = units[:, 0].abs(), units[:, 1:-channels], units[:, -channels:]
    observed = _correlations(values, importance[:, None])[:, 0]
    basis = _basis(given)
    left = _residuals(torch.cat((importance[:, None], values), 1), basis)
    partial = _correlations(left[:, 1:], left[:, :1])[:, 0]
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(len(mask)) if prompts is None else torch.unique(prompts.cpu(), return_inverse=True)[1]
    shifted = torch.stack([_shifted(left[:, 0], rows, groups, generator) for _ in range(permutations)], 1)
    # What was shifted is no longer free of the covariates; left like that, many of them make the test too lenient
    greatest = _correlations(left[:, 1:], _residuals(shifted, basis)).abs().nan_to_num(0.0).amax(0)
    beaten = (greatest[None] >= partial.abs()[:, None]).sum(1)
    p_value = torch.where(partial.isnan(), torch.nan, (1 + beaten) / (1 + permutations))
    return ProxyReport(correlation=observed, partial=partial, p_value=p_value.double(), units=len(importance))


def _indicators(ids: Tensor, mask: Tensor) -> Tensor:
    """1 where the token is the first, second, ... most frequent one."""
    known, counts = torch.unique(ids[mask], return_counts=True)
    frequent = known[counts.argsort(descending=True)[:MOST_TOKENS]]
    same: Tensor = ids[..., None] == frequent
    return same.double()


def _units(columns: Tensor, mask: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means over segments (or the tokens themselves) and the row of each, in the order of the responses."""
    rows = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    flat = columns[mask]
    if segments is None:
        return flat, rows
    place = rows * (int(segments.max()) + 1) + segments[mask]
    known, where, counts = torch.unique(place, return_inverse=True, return_counts=True)
    sums = flat.new_zeros(len(known), flat.shape[1]).index_add_(0, where, flat)
    return sums / counts[:, None], known // (int(segments.max()) + 1)


def _basis(given: Tensor) -> Tensor:
    """Orthonormal columns that span the covariates without their means."""
    base = given - given.mean(0)
    scale = base.norm(dim=0)
    base = base[:, scale > 0] / scale[scale > 0]
    left: Tensor
    left, singular, _ = torch.linalg.svd(base, full_matrices=False)
    return left[:, singular > 1e-10 * singular.amax()] if len(singular) else left


def _residuals(values: Tensor, basis: Tensor) -> Tensor:
    """What is left of each column after least squares on the basis and a constant; 0 where only rounding error is."""
    centred = values - values.mean(0)
    rest = centred - basis @ (basis.T @ centred)
    return torch.where(rest.norm(dim=0) > 1e-9 * values.norm(dim=0), rest, 0.0)


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Between the columns of `a` and those of `b`; NaN for a constant column."""
    a, b = a - a.mean(0), b - b.mean(0)
    norms = a.norm(dim=0)[:, None] * b.norm(dim=0)
    return torch.where(norms > 0, a.T @ b / torch.where(norms > 0, norms, 1.0), torch.nan)


def _shifted(values: Tensor, rows: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
    """Each row's values, moved on and around its end by a random share of its length, one share for each group."""
    known, lengths = torch.unique_consecutive(rows, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    share = torch.rand(int(groups.max()) + 1, generator=generator, dtype=torch.float64)
    shift = (share[groups[known]] * lengths).long()
    each = torch.arange(len(known)).repeat_interleave(lengths)
    place = torch.arange(len(rows)) - starts[each]
    return values[starts[each] + (place + shift[each]) % lengths[each]]
