"""How good a number per token is as a reading of attention: measures on response tokens, for many numbers at once.

Each measure is prepared once and then called with `weights`, how often each response counts: ones for the estimate,
counts of draws for a bootstrap over responses. It keeps sums per response only, so a draw is cheap. Two measures look
at pairs of tokens. Pairs of a drawn response with its own copy are left out: they would agree for no reason.

Axes: `tokens` (response tokens, all responses one after the other), `columns` (candidate numbers), `splits`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Measure = Callable[[Array], Array]
"""Weights (responses,) to one value per column; see the module's docstring."""

REPEATED = 3
"""Times a token must occur for its identity to be judged."""
RESIDUALIZE = ("none", "log_keys", "position", "position_bins", "log_keys_position", "log_keys_token")
"""Known to `residuals`: the first three are those of the trainer's gate, the last is for reference only."""


def residuals(values: Array, *, how: str, log_keys: Array, step: Index, token: Index) -> Array:
    """What is left of `values` (tokens, ...) over a batch, by least squares with an intercept.

    Args:
        values: one or more numbers per token.
        how: "none" (the mean is removed all the same), "log_keys", "position" (a line), "position_bins" (bins of
            doubling width), "log_keys_position" (log n and log(1 + step) together), "log_keys_token" (the line on log n
            then the mean of each token seen `REPEATED` times or more; the rarer ones count as one token).
        log_keys: log of the number of visible keys, (tokens,).
        step: place in the response, from 0, (tokens,).
        token: the token at the emitting position, (tokens,).

    Returns:
        Residuals with the shape of `values`.
    """
    assert how in RESIDUALIZE, how
    if how == "log_keys_token":
        return without_identity(residuals(values, how="log_keys", log_keys=log_keys, step=step, token=token), token)
    if how == "position_bins":
        return demeaned(values, np.log2(step + 1).astype(np.int64))
    lines: dict[str, list[Any]] = {
        "log_keys": [log_keys],
        "position": [step],
        "log_keys_position": [log_keys, np.log1p(step)],
    }
    design = np.column_stack([np.ones(len(step)), *lines.get(how, [])])
    flat = values.reshape(len(values), -1)
    left: Array = flat - design @ np.linalg.lstsq(design, flat, rcond=None)[0]
    return left.reshape(values.shape)


def mixed_residuals(
    near: Array, far: Array, response: Index, near_log_keys: Array, far_log_keys: Array, **rest: Any
) -> tuple[Array, Array]:
    """Residuals of two readings of the same tokens, as in batches in which every other response has the far prompt.

    There are two such batches, so that each token is read once behind either prompt; the fit is each batch's own.

    Args:
        near: numbers (tokens, columns) behind the short prompt.
        far: the same behind the long one.
        response: the response of each token, (tokens,).
        near_log_keys: log of the number of visible keys, (tokens,).
        far_log_keys: the same behind the long prompt.
        **rest: `how`, `step` and `token` of `residuals`.

    Returns:
        Residuals of `near` and of `far`.
    """
    odd = response % 2 == 1
    near_left, far_left = np.empty_like(near), np.empty_like(far)
    for moved in (odd, ~odd):
        left = residuals(
            np.where(moved[:, None], far, near), log_keys=np.where(moved, far_log_keys, near_log_keys), **rest
        )
        far_left[moved], near_left[~moved] = left[moved], left[~moved]
    return near_left, far_left


def position_share(x: Array, response: Index, step: Index) -> Measure:
    """Share of the variance that a cubic in log(1 + step) explains, adjusted for its three terms."""
    basis, _ = np.linalg.qr(np.vander(np.log1p(step), 4, increasing=True))
    products = _sums(basis[:, :, None] * basis[:, None, :], response)
    crossed = _sums(basis[:, :, None] * x[:, None, :], response)
    count, total, energy = _sums(np.ones(len(x)), response), _sums(x, response), _sums(x * x, response)

    def measure(weights: Array) -> Array:
        n = weights @ count
        inner = np.tensordot(weights, crossed, 1)
        fitted = (inner * np.linalg.solve(np.tensordot(weights, products, 1), inner)).sum(0)
        error, around_mean = weights @ energy - fitted, weights @ energy - (weights @ total) ** 2 / n
        share: Array = 1 - error / around_mean * (n - 1) / (n - 4)
        return share

    return measure


def identity_share(x: Array, response: Index, token: Index) -> Measure:
    """Share of the variance that the token's identity explains, over tokens seen `REPEATED` times or more.

    The variance between tokens is the mean product of two different occurrences of a token, in deviations from the
    overall mean: without the noise of a group's mean, a small group has no bias. The two come from different responses,
    since two of the same response share their context too. Tokens weigh as often as they occur.
    """
    used = occurrences(token) >= REPEATED
    names, group = np.unique(token[used], return_inverse=True)
    responses = int(response.max()) + 1
    cell, cells = group * responses + response[used], len(names) * responses
    totals = _sums(x[used], cell, cells).reshape(len(names), responses, -1)
    counts = _sums(np.ones(used.sum()), cell, cells).reshape(len(names), responses)
    energy = _sums(x[used] ** 2, response[used], responses)

    def measure(weights: Array) -> Array:
        often = counts * weights
        n = often.sum()
        mean = np.tensordot(weights, totals.sum(0), 1) / n
        part = (totals - counts[:, :, None] * mean) * weights[:, None]
        pairs = often.sum(1) ** 2 - (often**2).sum(1)
        some = pairs > 0
        product = (part.sum(1) ** 2 - (part**2).sum(1))[some] / pairs[some, None]
        between = often.sum(1)[some] @ product / often.sum(1)[some].sum()
        share: Array = between / (weights @ energy / n - mean**2)
        return share

    return measure


def response_share(x: Array, response: Index) -> Measure:
    """Share of the variance between responses: the mean product of two tokens of a response, over the variance."""
    count, total, energy = _sums(np.ones(len(x)), response), _sums(x, response), _sums(x * x, response)
    pairs = np.maximum(count * (count - 1), 1)[:, None]

    def measure(weights: Array) -> Array:
        n = weights @ count
        mean = weights @ total / n
        own = energy - 2 * mean * total + count[:, None] * mean**2
        product = ((total - count[:, None] * mean) ** 2 - own) / pairs
        return (weights * count) @ product / n / (weights @ energy / n - mean**2)

    return measure


def correlation(x: Array, y: Array, response: Index, used: NDArray[np.bool_] | None = None) -> Measure:
    """Pearson correlation of x with y, both (tokens, ...), over all tokens or those that are `used`."""
    size = int(response.max()) + 1
    kept = np.ones(len(x), dtype=bool) if used is None else used
    x, y, response = x[kept], y[kept], response[kept]
    count = _sums(np.ones(len(x)), response, size)
    parts = [_sums(part, response, size) for part in (x, y, x * x, y * y, x * y)]

    def measure(weights: Array) -> Array:
        mx, my, xx, yy, xy = (np.tensordot(weights, part, 1) / (weights @ count) for part in parts)
        return (xy - mx * my) / np.sqrt((xx - mx * mx) * (yy - my * my))

    return measure


def shift(near: Array, far: Array, response: Index) -> Measure:
    """Mean of far - near, in standard deviations of near."""
    count = _sums(np.ones(len(near)), response)
    parts = [_sums(part, response) for part in (near, near * near, far)]

    def measure(weights: Array) -> Array:
        mean, square, moved = (weights @ part / (weights @ count) for part in parts)
        return (moved - mean) / np.sqrt(square - mean * mean)

    return measure


def split_half(halves: Array, response: Index, used: NDArray[np.bool_] | None = None) -> Measure:
    """Reliability of the mean over all heads, from the means over two halves of them, (tokens, 2, splits, columns).

    The correlation of the halves, averaged over the splits and stepped up to the full number: 2 r / (1 + r).

    Source:
        Spearman 1910 and Brown 1910.
    """
    agreement = correlation(halves[:, 0], halves[:, 1], response, used)

    def measure(weights: Array) -> Array:
        r = agreement(weights).mean(0)
        whole: Array = 2 * r / (1 + r)
        return whole

    return measure


def without_identity(values: Array, token: Index) -> Array:
    """`values` (tokens, ...) without the mean of each token; those seen less than `REPEATED` times count as one."""
    return demeaned(values, np.where(occurrences(token) >= REPEATED, token, -1))


def demeaned(values: Array, group: Index) -> Array:
    """`values` (tokens, ...) without the mean of each group."""
    _, index = np.unique(group, return_inverse=True)
    shape = (-1,) + (1,) * (values.ndim - 1)
    return values - (_sums(values, index) / np.bincount(index).reshape(shape))[index]


def occurrences(token: Index) -> Index:
    """How often the token of each place occurs."""
    _, index, counts = np.unique(token, return_inverse=True, return_counts=True)
    return counts[index]


def _sums(values: Array, group: Index, size: int | None = None) -> Array:
    """Sums of `values` (tokens, ...) over the tokens of each group 0 .. size - 1."""
    order = np.argsort(group, kind="stable")
    names, starts = np.unique(group[order], return_index=True)
    result = np.zeros((int(names[-1]) + 1 if size is None else size, *values.shape[1:]))
    result[names] = np.add.reduceat(values[order], starts, axis=0)
    return result
