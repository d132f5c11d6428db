"""What the arguments of an attention call mean, which differs between Transformers' implementations of attention."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from comppo.computation.attention_rows import INVISIBLE, MASKED, AttentionStatistics
from comppo.computation.sequences import over_keys
from comppo.computation.statistics import attention_statistics, reduce_scores
from comppo.computation.support import check_implementation
from comppo.errors import UnreadableModelError


def statistics_of_call(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    options: dict[str, Any],
    *,
    sinks: Tensor | None,
    documents: Tensor | None,
    rows: slice,
    past: int = 0,
    cached: bool = False,
    features: Tensor | None = None,
    entropy: bool = True,
    distance: bool = False,
) -> AttentionStatistics:
    """Statistics of one attention call, as its implementation understands its arguments.

    Args:
        implementation: its name in the registry.
        module: the attention module that called.
        query: (rows, heads, queries, width).
        key: (rows, kv_heads, keys, width).
        mask: as that implementation takes it.
        options: further arguments of the call, by name.
        sinks: (rows, positions), over all positions; as the next and `features`.
        documents: numbers of packed documents, where the implementation is to keep them apart.
        rows: query positions to reduce.
        past: positions before the first query, cached ones.
        cached: whether keys come from a cache, which may have room for more than there are.
        features: (rows, positions, features).
        entropy: whether to compute entropies.
        distance: whether to compute distances.

    Returns:
        Of the chosen query positions.

    Raises:
        UnreadableModelError: the call cannot be read.
    """
    check_implementation(implementation)
    _check_options(implementation, module, options)
    queries, keys, total = query.shape[2], key.shape[2], past + query.shape[2]
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if "flash" not in implementation:  # flash attention's window hides keys from a single query too
        causal = causal and queries > 1
    window = apart = block_mask = None
    if "flash" in implementation:  # padding is a 2-D mask, the window an argument, documents are told by positions
        window, apart = options.get("sliding_window"), documents
        if mask is not None:
            mask = over_keys(mask.bool(), keys)[:, None, None, :].expand(-1, 1, queries, -1)
    elif hasattr(mask, "mask_mod"):
        block_mask, mask, causal = mask, mask.mask_mod, False
    elif mask is not None:  # 4-D, with causality and window inside
        causal = False
        if implementation == "eager" and mask.dtype == torch.bool:
            mask = mask.to(query.dtype)  # it is added to the scores, whatever it was meant to say
        mask = mask[..., :keys]
    elif implementation == "eager" or "flex" in implementation:
        causal = False  # they hide nothing by themselves
    elif causal and keys > queries:
        key = key[:, :, :queries]  # as sdpa does with a preallocated, empty cache
    keys = key.shape[2]
    mask = _with_bias(mask, options.get("position_bias"), keys)
    if keys > total and not cached and (features is not None or distance):
        raise UnreadableModelError(
            f"{type(module).__name__} has {keys} keys for {total} positions, so distances and routed summaries mean "
            "nothing there: leave them or its layer out."
        )
    scale = options.get("scaling")
    stats = attention_statistics(
        query,
        key,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        causal=causal,
        window=window if causal else None,
        softcap=options.get("softcap"),
        sinks=None if sinks is None else over_keys(sinks, keys)[:, :keys],
        documents=None if apart is None else over_keys(apart, keys)[:, :keys],
        rows=rows,
        s_aux=options.get("s_aux"),
        features=None if features is None else over_keys(features, keys)[:, :keys],
        entropy=entropy,
        distance=distance,
        block_mask=block_mask,
    )
    return _placed(stats, queries, keys, past)


def statistics_of_scores(
    scores: Tensor,
    *,
    sinks: Tensor | None,
    rows: slice,
    past: int = 0,
    features: Tensor | None = None,
    entropy: bool = True,
    distance: bool = False,
) -> AttentionStatistics:
    """Statistics of scores that a model made itself.

    Args:
        scores: (rows, heads, queries, keys), masks added.
        sinks: (rows, positions), over all positions; as `features`.
        rows: query positions to reduce.
        past: positions before the first query, cached ones.
        features: (rows, positions, features).
        entropy: whether to compute entropies.
        distance: whether to compute distances.

    Returns:
        Of the chosen query positions.
    """
    queries, keys = scores.shape[2:]
    stats = reduce_scores(
        scores,
        sinks=None if sinks is None else over_keys(sinks, keys),
        rows=rows,
        features=None if features is None else over_keys(features, keys),
        entropy=entropy,
        distance=distance,
    )
    return _placed(stats, queries, keys, past)


def _check_options(implementation: str, module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse what changes the rows in a way that is not known here."""
    unknown = ["sinks"] + (["indices", "block_indices"] if "flash" in implementation else [])
    for name in unknown:
        if options.get(name) is not None:
            raise UnreadableModelError(
                f"{type(module).__name__} hands {name!r} to its {implementation} attention, which is not read: leave "
                'its layer out of `layers`, or load the model with attn_implementation="sdpa".'
            )


def _with_bias(mask: Any, bias: Tensor | None, keys: int) -> Any:
    """A mask with a position bias added, as the model's own attention adds it to the scores."""
    if bias is None:
        return mask
    bias = bias.detach()[..., :keys]
    if mask is None:
        return bias
    if callable(mask):
        raise UnreadableModelError("a position bias under FlexAttention is not read: load the model with sdpa.")
    return bias.masked_fill(~mask, MASKED) if mask.dtype == torch.bool else mask + bias


def _placed(stats: AttentionStatistics, queries: int, keys: int, past: int) -> AttentionStatistics:
    """Distances from where the queries stand: before the room of a static cache, at whose end they were taken to be."""
    room = keys - queries - min(past, keys - queries)
    if stats.distance is None or stats.rest_distance is None or not room:
        return stats
    return replace(
        stats,
        distance=torch.where(stats.visible_keys > 0, stats.distance - room, 0.0),
        rest_distance=torch.where(stats.rest_visible_keys > 0, stats.rest_distance - room, 0.0),
    )


def documents_apart(
    implementation: str, query: Tensor, mask: Any, options: dict[str, Any], documents: Tensor | None
) -> Tensor | None:
    """The documents that this call keeps apart, (rows, positions), or None where each row is one sequence.

    Position ids that begin anew are documents for some implementations and inputs only, and Transformers decides that
    far from the call; so sdpa, eager and flex are asked what they hide, and flash attention what it was given.
    """
    if "flash" in implementation:
        ends = options.get("cu_seq_lens_q")
        if ends is not None:
            at = torch.arange(query.shape[2], device=query.device)
            return torch.bucketize(at, ends[1:].to(query.device), right=True)[None]
        return documents if query.shape[0] == 1 else None
    if documents is None or mask is None:
        return None
    row, position = (documents.diff(dim=-1) != 0).nonzero(as_tuple=True)
    if hasattr(mask, "mask_mod"):
        head = torch.zeros_like(row)
        crosses = torch.vmap(mask.mask_mod)(row, head, position + 1, position)
    else:
        crosses = mask[row % mask.shape[0], 0, position + 1, position]
        crosses = crosses if crosses.dtype == torch.bool else crosses > INVISIBLE
    return None if bool(crosses.any()) else documents
