"""The same reductions through FlexAttention's log-sum-exp, for masks and scores that are functions, on CUDA.

With L(a) the log-sum-exp of a times the scores, collision = exp(L(2) - 2 L(1)), maximum = exp(max score - L(1)), and
what is outside the sinks has the mass exp(L_rest(1) - L(1)). FlexAttention gives L and the maximum of any function of
the scores, so five of its calls say everything but entropies, distances and features; there is no kernel of our own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comppo.computation.attention_rows import AttentionStatistics, MaskFunction, ScoreFunction


def supports(query: Tensor) -> bool:
    """Whether these calls can be made: on CUDA, by a FlexAttention that gives its log-sum-exp and maxima."""
    import torch.nn.attention.flex_attention as flex

    return query.is_cuda and query.dtype != torch.float64 and hasattr(flex, "AuxRequest")


def flex_statistics(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    mask: MaskFunction,
    score_function: ScoreFunction | None,
    softcap: float | None,
    sinks: Tensor | None,
    rows: slice,
    s_aux: Tensor | None,
    block_mask: Any = None,
) -> AttentionStatistics:
    """Collision, maximum, visible keys and sink mass; arguments as in `attention_statistics`.

    Args:
        query: (rows, heads, queries, width).
        key: (rows, kv_heads, keys, width).
        scale: factor on the scores.
        mask: says whether a key is visible.
        score_function: changes the scaled scores, or None.
        softcap: bound of the scores, before the function, or None.
        sinks: (rows, keys), or None.
        rows: query positions to give; all are computed.
        s_aux: learned sink logits, or None.
        block_mask: FlexAttention's block mask of `mask`, which lets it pass over hidden blocks; made if None.

    Returns:
        Without entropies, distances and features.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    n_rows, n_heads, n_queries, _ = query.shape
    if block_mask is None:
        block_mask = create_block_mask(mask, n_rows, n_heads, n_queries, key.shape[2], device=query.device)

    def rated(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if score_function is None else score_function(score, b, h, q, k)

    def rest(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert sinks is not None
        return torch.where(sinks[b, k], -torch.inf, rated(score, b, h, q, k))

    def run(change: ScoreFunction) -> tuple[Tensor, Tensor]:
        _, aux = _compiled()(
            query,
            key,
            key,
            score_mod=change,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=key.shape[1] != n_heads,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        return aux.lse[..., rows].float(), aux.max_scores[..., rows].float()

    def reduced(change: ScoreFunction) -> tuple[Tensor, Tensor, Tensor]:
        one, top = run(change)
        two, _ = run(lambda *at: 2.0 * change(*at))
        some = one > -torch.inf
        exact = torch.where(some, one, 0.0)
        return one, torch.where(some, (two - 2.0 * exact).exp(), 0.0), torch.where(some, (top - exact).exp(), 0.0)

    whole, collision, maximum = reduced(rated)
    visible = run(lambda score, b, h, q, k: torch.zeros_like(score))[0].exp().round()
    other, rest_collision, rest_maximum, count = whole, collision, maximum, visible
    if sinks is not None:
        other, rest_collision, rest_maximum = reduced(rest)
        none = torch.full((), -torch.inf, device=query.device)
        count = run(lambda score, b, h, q, k: torch.where(sinks[b, k], none, 0.0 * score))[0].exp().round()
    some = whole > -torch.inf
    exact = torch.where(some, whole, 0.0)
    mass = torch.where(some, -torch.expm1(torch.where(some, other, 0.0) - exact), 0.0)
    if s_aux is not None:
        learned = torch.where(some, torch.sigmoid(s_aux.float()[None, :, None] - exact), 0.0)
        mass = learned + (1.0 - learned) * mass
    return AttentionStatistics(
        collision=collision,
        maximum=maximum,
        visible_keys=visible,
        sink_mass=mass,
        rest_collision=rest_collision,
        rest_maximum=rest_maximum,
        rest_visible_keys=count,
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
