"""Row reductions of attention, without attention matrices: entropy, collision, maximum, sink mass, distance.

Everything that a softmax row says about its own concentration follows from four running numbers per query:
`docs/reading.md` has the identities and their errors, `streaming.py` the sums, `triton_kernel.py` the same on CUDA.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from comppo.computation import flex
from comppo.computation.attention_rows import AttentionStatistics, MaskFunction, ScoreFunction
from comppo.computation.score_sources import Given, Products
from comppo.computation.streaming import Options, reduce
from comppo.errors import EvidenceError


@torch.no_grad()
def attention_statistics(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    scale: float,
    mask: Shaped[Tensor, "mask_rows mask_heads queries keys"] | MaskFunction | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    score_function: ScoreFunction | None = None,
    sinks: Bool[Tensor, "rows keys"] | None = None,
    documents: Int[Tensor, "rows keys"] | None = None,
    rows: slice | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    features: Float[Tensor, "rows keys features"] | None = None,
    entropy: bool = True,
    distance: bool = False,
    block_mask: Any = None,
    block_queries: int | None = None,
    block_keys: int = 1024,
) -> AttentionStatistics:
    """Reduce the rows of softmax(scale * query @ key^T), streaming over blocks of queries and keys.

    Scratch memory is one block of scores; neither scores nor probabilities exist as a whole. Sums are kept in float32
    (float64 for float64 inputs), whatever the inputs' dtype and autocast say. On CUDA a Triton kernel does the same
    where it can, and FlexAttention where mask or scores are functions and neither entropies nor distances are wanted.

    Args:
        query: after position encoding, not yet scaled.
        key: with the model's own number of key-value heads (never repeated); query head h reads key head
            h // (heads / kv_heads). Query i stands at key position i + keys - queries.
        scale: factor on the scores.
        mask: boolean (true = visible) or additive float, broadcastable over rows and heads, or a function that says
            whether a key is visible.
        causal: hide keys that come after the query. Combined with `mask` where both are given.
        window: a query sees only its last `window` keys, itself included; needs `causal`.
        softcap: scores become softcap * tanh(score / softcap), before the mask.
        score_function: changes the scaled scores instead, before the mask.
        sinks: keys that count as attention sink.
        documents: number of the document that each key belongs to, where a row packs several; a query sees its own.
        rows: which query positions to reduce; None means all.
        s_aux: one learned sink logit per head.
        features: what each key would be read as, shared by all heads.
        entropy: whether to compute the two entropies.
        distance: whether to compute the two distances.
        block_mask: FlexAttention's block mask of a `mask` that is a function, which saves making it on CUDA.
        block_queries: queries per block; None fits the block to the cache.
        block_keys: keys per block.

    Returns:
        One value per row, head and chosen query, detached.

    Raises:
        EvidenceError: shapes do not fit each other, or `window` is given without `causal`.

    Source:
        The online softmax of Milakov & Gimelshein (arXiv:1805.02867), extended by further sums; the extension is ours.
    """
    _check(query, key, mask, causal, window)
    for name, given in (("sinks", sinks), ("documents", documents), ("features", features)):
        if given is not None and given.shape[:2] != (key.shape[0], key.shape[2]):
            raise EvidenceError(f"{name} {tuple(given.shape)} must begin with (rows, keys) of key {tuple(key.shape)}.")
    start, stop, step = (rows or slice(None)).indices(query.shape[2])
    if step != 1:
        raise EvidenceError(f"rows={rows!r} has step {step}: pass a contiguous slice of query positions.")
    part = slice(start, stop)
    simple = not (entropy or distance or causal or features is not None or documents is not None)
    if callable(mask) and simple and flex.supports(query):
        return flex.flex_statistics(
            query,
            key,
            scale=scale,
            mask=mask,
            score_function=score_function,
            softcap=softcap,
            sinks=sinks,
            rows=part,
            s_aux=s_aux,
            block_mask=block_mask,
        )
    if query.is_cuda and not callable(mask) and score_function is None:
        from comppo.computation import triton_launch

        if triton_launch.supports(query, key, features=features):
            return triton_launch.triton_statistics(
                query,
                key,
                scale=scale,
                mask=mask,
                causal=causal,
                window=window,
                softcap=softcap,
                sinks=sinks,
                documents=documents,
                rows=part,
                s_aux=s_aux,
                features=features,
                entropy=entropy,
                distance=distance,
            )
    source = Products(
        query=query,
        key=key.to(torch.promote_types(query.dtype, torch.float32)).contiguous(),
        scale=scale,
        mask=mask,
        causal=causal,
        window=window,
        softcap=softcap,
        score_function=score_function,
        documents=documents,
    )
    options = Options(sinks=sinks, features=features, s_aux=s_aux, entropy=entropy, distance=distance)
    with torch.autocast(query.device.type, enabled=False):  # autocast would run the products in half precision
        return reduce(source, options, (start, stop), block_queries=block_queries, block_keys=block_keys)


@torch.no_grad()
def reduce_scores(
    scores: Float[Tensor, "rows heads queries keys"],
    *,
    sinks: Bool[Tensor, "rows keys"] | None = None,
    rows: slice | None = None,
    features: Float[Tensor, "rows keys features"] | None = None,
    entropy: bool = True,
    distance: bool = False,
) -> AttentionStatistics:
    """The same reductions of scores that a model made itself, its masks already added.

    Args:
        scores: before the softmax; at or below `INVISIBLE_SCORE` (or -inf) where the key is hidden.
        sinks: as in `attention_statistics`, like the arguments below.
        rows: query positions.
        features: what each key would be read as.
        entropy: whether to compute the entropies.
        distance: whether to compute the distances.

    Returns:
        As `attention_statistics`.
    """
    start, stop, _ = (rows or slice(None)).indices(scores.shape[2])
    source = Given(scores=scores, dtype=torch.promote_types(scores.dtype, torch.float32))
    options = Options(sinks=sinks, features=features, s_aux=None, entropy=entropy, distance=distance)
    with torch.autocast(scores.device.type, enabled=False):
        return reduce(source, options, (start, stop))


def _check(query: Tensor, key: Tensor, mask: Tensor | MaskFunction | None, causal: bool, window: int | None) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise EvidenceError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit: pass (rows, heads, queries, width) and "
            "(rows, kv_heads, keys, width)."
        )
    if query.shape[1] % key.shape[1]:
        raise EvidenceError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads: pass a divisor.")
    if window is not None and not causal:
        raise EvidenceError(f"window={window} needs causal=True; a window without causality must be in the mask.")
    if isinstance(mask, Tensor):
        full = (*query.shape[:3], key.shape[2])
        if (
            mask.ndim != 4
            or any(m not in (1, n) for m, n in zip(mask.shape[:2], full[:2], strict=True))
            or (mask.shape[2:] != full[2:])
        ):
            raise EvidenceError(f"mask {tuple(mask.shape)} does not broadcast over rows and heads to {full}.")
