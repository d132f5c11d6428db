"""Which keys a position looks at most: few numbers per query, and never a matrix of all queries and keys."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comppo.computation import registry
from comppo.computation.score_sources import Products
from comppo.computation.support import map_model
from comppo.errors import ConfigError, UnreadableModelError

BLOCK_QUERIES = 32


class _Calls:
    """Keeps query and key of the attention calls of chosen modules."""

    def __init__(self, layer_of: dict[int, int]) -> None:
        self._layer_of = layer_of
        self.found: dict[int, tuple[Products, Tensor | None]] = {}

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called after each attention call of any model."""
        layer = self._layer_of.get(id(module))
        if layer is None:
            return
        if implementation not in ("sdpa", "eager") or options.get("position_bias") is not None:
            raise UnreadableModelError(
                f"{type(module).__name__} runs {implementation} attention whose top keys are not read: load the model "
                'with attn_implementation="sdpa", or ask for no keys.'
            )
        scale, causal = options.get("scaling"), options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and implementation == "sdpa"
        source = Products(
            query=query.detach(),
            key=key.detach().to(torch.promote_types(query.dtype, torch.float32)).contiguous(),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=None if mask is None else mask[..., : key.shape[2]],
            causal=causal and mask is None and query.shape[2] > 1,
            window=None,
            softcap=options.get("softcap"),
            score_function=None,
            documents=None,
        )
        learned = options.get("s_aux")
        self.found[layer] = source, None if learned is None else learned.detach()


@torch.no_grad()
def top_keys(
    model: nn.Module, input_ids: Int[Tensor, " positions"], *, layers: Sequence[int], positions: slice, count: int = 5
) -> list[list[tuple[int, float]]]:
    """The keys with the greatest attention, mean over all heads of the chosen layers, for some positions of one row.

    One forward of its own. Scores are computed for `BLOCK_QUERIES` queries at a time.

    Args:
        model: a causal language model of Transformers, in evaluation mode.
        input_ids: one sequence without padding.
        layers: `layer_idx` of layers that can be read; at least one.
        positions: query positions, without a step.
        count: keys per position, at least 1.

    Returns:
        Per position, (key position, share of attention in [0, 1]), greatest first; fewer where it sees fewer.

    Raises:
        ConfigError: no layers, or `count` is below 1.
        UnreadableModelError: a layer's attention was not seen, or is of a kind that is not read here.
    """
    if count < 1 or not layers:
        raise ConfigError(f"layers={tuple(layers)!r}, count={count!r}: pass at least one layer and one key.")
    modules = map_model(model).attention
    calls = _Calls({id(modules[layer]): layer for layer in layers if layer in modules})
    registry.attach(calls)
    try:
        model(input_ids=input_ids[None], use_cache=False)
    finally:
        registry.detach(calls)
    unseen = sorted(set(layers) - set(calls.found))
    if unseen:
        raise UnreadableModelError(
            f"the attention of layers {unseen} did not go through Transformers' attention registry: leave these layers "
            "out, or ask for no keys."
        )
    start, stop, _ = positions.indices(len(input_ids))
    found: list[list[tuple[int, float]]] = []
    for q0 in range(start, stop, BLOCK_QUERIES):
        q1 = min(q0 + BLOCK_QUERIES, stop)
        rows = torch.stack([_mean_rows(*call, q0, q1) for call in calls.found.values()]).mean(0)
        weights, places = rows.topk(min(count, rows.shape[-1]), dim=-1)
        for some, at in zip(weights.tolist(), places.tolist(), strict=True):
            found.append([(place, weight) for place, weight in zip(at, some, strict=True) if weight > 0])
    return found


def _mean_rows(source: Products, learned: Tensor | None, q0: int, q1: int) -> Tensor:
    """Attention of queries q0 .. q1 - 1 on every key, mean over heads, (queries, keys)."""
    scores, _ = source.block(q0, q1, 0, source.shape[3])
    assert scores is not None, "a causal query sees itself"
    if learned is not None:  # a learned sink takes its share, and is no key
        sink = learned.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1)[0, ..., :-1].mean(0)
    return torch.softmax(scores, -1)[0].mean(0)
