"""Row reductions of attention, without attention matrices: entropy, collision, maximum, sink mass.

Everything a softmax row says about its own concentration follows from four running numbers per query,

    m = max_j s_j,   l1 = sum_j e^(s_j - m),   l2 = sum_j e^(2 (s_j - m)),   t = sum_j e^(s_j - m) (s_j - m),

with one exponential per score: entropy = log l1 - t / l1, collision = l2 / l1^2, maximum = 1 / l1. When a new block of
keys moves the maximum by d = m_old - m_new <= 0: l1 <- e^d l1, l2 <- e^(2d) l2, t <- e^d (t + d l1).

Keys before `sink_end` go to an accumulator of their own, merged at the end: subtracting them from the whole afterwards
would cancel, since the sink often holds nearly all of the mass.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from comppo.errors import EvidenceError

MASKED = -1e30  # a finite score whose exponential is exactly 0: with -inf, 0 * inf would make NaN
LOWEST_MAXIMUM = -1e29  # above MASKED, so that a row without keys gives exp(MASKED - LOWEST_MAXIMUM) = 0, not 1
INVISIBLE = -1e4  # an additive mask at or below this hides the key; half precision's lowest value is -65504
SCRATCH_SCORES = 2**19  # scores per block: 2 MiB in float32, about what a CPU core keeps close


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionStatistics:
    """Reductions of each attention row; float32 (float64 for float64 inputs); 0 where a row has no key to speak of.

    Fields that begin with `rest_` leave the sink keys out and renormalise over the others. A learned sink logit
    (`s_aux`) is never part of a distribution: it counts in `sink_mass` alone.
    """

    entropy: Float[Tensor, "rows heads tokens"]
    """-sum p log p, nats, in [0, log visible_keys]."""
    collision: Float[Tensor, "rows heads tokens"]
    """sum p^2, unitless, in [1 / visible_keys, 1]."""
    maximum: Float[Tensor, "rows heads tokens"]
    """Greatest p, unitless."""
    visible_keys: Float[Tensor, "rows heads tokens"]
    """Keys the query may attend to, sinks included."""
    sink_mass: Float[Tensor, "rows heads tokens"]
    """Probability on the sink keys and on the learned sink, unitless; 0 without sinks."""
    rest_entropy: Float[Tensor, "rows heads tokens"]
    rest_collision: Float[Tensor, "rows heads tokens"]
    rest_maximum: Float[Tensor, "rows heads tokens"]
    rest_visible_keys: Float[Tensor, "rows heads tokens"]


@dataclass(slots=True, eq=False)
class _Sums:
    """The running numbers of one set of keys; see the module's docstring."""

    m: Tensor
    l1: Tensor
    l2: Tensor
    t: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], like: Tensor) -> "_Sums":
        zero = like.new_zeros(shape)
        return cls(torch.full_like(zero, LOWEST_MAXIMUM), zero, zero, zero)

    def add(self, scores: Tensor) -> None:
        """Take in a block of scores, which is overwritten."""
        m = torch.maximum(self.m, scores.amax(-1))
        shifted = scores.sub_(m.unsqueeze(-1))
        exps = shifted.exp()
        l1, t = exps.sum(-1), shifted.mul_(exps).sum(-1)
        l2 = exps.square_().sum(-1)
        self._move(m)
        self.l1, self.l2, self.t = self.l1 + l1, self.l2 + l2, self.t + t

    def _move(self, m: Tensor) -> None:
        """Express the sums relative to the maximum `m >= self.m`."""
        d = self.m - m
        r = d.exp()
        self.m, self.l1, self.l2, self.t = m, r * self.l1, r * r * self.l2, r * (self.t + d * self.l1)

    def merged(self, other: "_Sums") -> "_Sums":
        """The sums over both sets of keys."""
        m = torch.maximum(self.m, other.m)
        a, b = _Sums(self.m, self.l1, self.l2, self.t), _Sums(other.m, other.l1, other.l2, other.t)
        a._move(m)
        b._move(m)
        return _Sums(m, a.l1 + b.l1, a.l2 + b.l2, a.t + b.t)

    def reductions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Entropy, collision and maximum; 0 where there was no key."""
        some = self.l1 > 0
        l1 = torch.where(some, self.l1, 1.0)  # at least 1 wherever there is a key: the greatest score adds e^0
        entropy = (l1.log() - self.t / l1).clamp_min(0.0)
        return entropy, self.l2 / (l1 * l1), torch.where(some, 1.0 / l1, 0.0)


@torch.no_grad()
def attention_statistics(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    scale: float,
    mask: Shaped[Tensor, "mask_rows mask_heads queries keys"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sink_end: Int[Tensor, " rows"] | None = None,
    rows: slice | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    block_queries: int | None = None,
    block_keys: int = 512,
) -> AttentionStatistics:
    """Reduce the rows of softmax(scale * query @ key^T), streaming over blocks of queries and keys.

    Scratch memory is one block of scores; neither scores nor probabilities exist as a whole. Sums are kept in float32
    (float64 for float64 inputs), whatever the inputs' dtype and autocast say.

    Args:
        query: after position encoding, not yet scaled.
        key: with the model's own number of key-value heads (never repeated); query head h reads key head
            h // (heads / kv_heads). Query i stands at key position i + keys - queries.
        scale: factor on the scores.
        mask: boolean (true = visible) or additive float, broadcastable over rows and heads.
        causal: hide keys that come after the query. Combined with `mask` where both are given.
        window: a query sees only its last `window` keys, itself included; needs `causal`.
        softcap: scores become softcap * tanh(score / softcap), before the mask.
        sink_end: per row, index of the first key that is not a sink; every visible key before it is one.
        rows: which query positions to reduce; None means all.
        s_aux: one learned sink logit per head.
        block_queries: queries per block; None fits the block to the cache.
        block_keys: keys per block.

    Returns:
        One value per row, head and chosen query, detached.

    Raises:
        EvidenceError: shapes do not fit each other, or `window` is given without `causal`.

    Source:
        The online softmax of Milakov & Gimelshein (arXiv:1805.02867), extended by l2 and t; the extension is ours.
    """
    _check(query, key, mask, causal, window)
    start, stop, step = (rows or slice(None)).indices(query.shape[2])
    if step != 1:
        raise EvidenceError(f"rows={rows!r} has step {step}: pass a contiguous slice of query positions.")
    if block_queries is None:
        block_queries = min(256, max(8, SCRATCH_SCORES // (query.shape[0] * query.shape[1] * block_keys)))
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):  # autocast would run the products in half precision
        blocks = _Blocks(query, key.to(dtype), mask, causal, window, softcap, sink_end, scale, block_keys)
        parts = [blocks.reduce(q0, min(q0 + block_queries, stop), s_aux) for q0 in range(start, stop, block_queries)]
    if not parts:
        empty = query.new_zeros((*query.shape[:2], 0), dtype=dtype)
        parts = [AttentionStatistics(**{f.name: empty for f in fields(AttentionStatistics)})]
    if len(parts) == 1:
        return parts[0]
    return AttentionStatistics(
        **{f.name: torch.cat([getattr(part, f.name) for part in parts], -1) for f in fields(AttentionStatistics)}
    )


def _check(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise EvidenceError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit: pass (rows, heads, queries, width) and "
            "(rows, kv_heads, keys, width)."
        )
    if query.shape[1] % key.shape[1]:
        raise EvidenceError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads: pass a divisor.")
    if window is not None and not causal:
        raise EvidenceError(f"window={window} needs causal=True; a window without causality must be in the mask.")
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if (
            mask.ndim != 4
            or any(m not in (1, n) for m, n in zip(mask.shape[:2], full[:2], strict=True))
            or (mask.shape[2:] != full[2:])
        ):
            raise EvidenceError(f"mask {tuple(mask.shape)} does not broadcast over rows and heads to {full}.")


@dataclass(slots=True, eq=False)
class _Blocks:
    """One call's inputs, read block by block."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    window: int | None
    softcap: float | None
    sink_end: Tensor | None
    scale: float
    block_keys: int

    def reduce(self, q0: int, q1: int, s_aux: Tensor | None) -> AttentionStatistics:
        """The statistics of queries q0 .. q1 - 1."""
        n_rows, n_heads, n_queries, width = self.query.shape
        kv_heads, n_keys = self.key.shape[1:3]
        group, size, offset = n_heads // kv_heads, q1 - q0, n_keys - n_queries
        # Query heads that share a key head become further rows of one product, so that keys are never repeated.
        query = self.query[:, :, q0:q1].to(self.key.dtype) * self.scale
        query = query.reshape(n_rows * kv_heads, group * size, width)
        key = self.key.reshape(n_rows * kv_heads, n_keys, width)
        shape = (n_rows, n_heads, size)
        rest, sink = _Sums.empty(shape, query), _Sums.empty(shape, query)
        visible, rest_visible = query.new_zeros(shape), query.new_zeros(shape)
        sink_stop = 0 if self.sink_end is None else int(self.sink_end.max())
        lowest = 0 if self.window is None else max(0, offset + q0 - self.window + 1)
        for k0 in range(lowest, min(n_keys, offset + q1) if self.causal else n_keys, self.block_keys):
            k1 = min(k0 + self.block_keys, min(n_keys, offset + q1) if self.causal else n_keys)
            keep = self._keep(q0, q1, k0, k1, offset)
            if keep is not None and keep.device.type == "cpu" and not bool(keep.any()):
                continue  # as above the diagonal; on an accelerator the question would cost more than the block
            scores = torch.bmm(query, key[:, k0:k1].transpose(1, 2)).view(n_rows, n_heads, size, k1 - k0)
            scores = self._adjust(scores, keep, q0, q1, k0, k1)
            count = float(k1 - k0) if keep is None else keep.sum(-1)
            visible = visible + count
            if k0 < sink_stop:
                count = count - self._take_sinks(scores, keep, sink, k0, min(k1, sink_stop))
            rest_visible = rest_visible + count
            rest.add(scores)
        return _finish(rest, sink, visible, rest_visible, s_aux)

    def _keep(self, q0: int, q1: int, k0: int, k1: int, offset: int) -> Tensor | None:
        """Which keys of the block are visible, broadcastable to (rows, heads, queries, keys); None = all of them."""
        keep = None
        if self.mask is not None:
            part = self.mask[..., q0:q1, k0:k1]
            keep = part if part.dtype == torch.bool else part > INVISIBLE
        cut_above = self.causal and k1 - 1 > offset + q0
        cut_below = self.window is not None and k0 <= offset + q1 - 1 - self.window
        if cut_above or cut_below:
            positions = torch.arange(q0 + offset, q1 + offset, device=self.query.device)[:, None]
            keys = torch.arange(k0, k1, device=self.query.device)
            near = keys <= positions
            if self.window is not None:
                near &= keys > positions - self.window
            keep = near[None, None] if keep is None else keep & near
        return keep

    def _adjust(self, scores: Tensor, keep: Tensor | None, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """Softcap, additive mask and hidden keys, in place."""
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores.add_(self.mask[..., q0:q1, k0:k1].to(scores.dtype))
        return scores if keep is None else scores.masked_fill_(~keep, MASKED)

    def _take_sinks(self, scores: Tensor, keep: Tensor | None, sink: _Sums, k0: int, stop: int) -> Tensor:
        """Move the block's sink keys from `scores` to `sink`; returns how many visible ones each query lost."""
        assert self.sink_end is not None
        keys = torch.arange(k0, stop, device=scores.device)
        is_sink = (keys < self.sink_end[:, None])[:, None, None, :]
        first = scores[..., : stop - k0]
        sink.add(first.masked_fill(~is_sink, MASKED))
        first.masked_fill_(is_sink, MASKED)
        return (is_sink if keep is None else keep[..., : stop - k0] & is_sink).sum(-1)


def _finish(
    rest: _Sums, sink: _Sums, visible: Tensor, rest_visible: Tensor, s_aux: Tensor | None
) -> AttentionStatistics:
    whole = rest.merged(sink)
    entropy, collision, maximum = whole.reductions()
    rest_entropy, rest_collision, rest_maximum = rest.reductions()
    some = whole.l1 > 0
    mass = torch.where(some, sink.l1 * (sink.m - whole.m).exp() / torch.where(some, whole.l1, 1.0), 0.0)
    if s_aux is not None:
        total = torch.where(some, whole.l1, 1.0).log() + whole.m
        learned = torch.where(some, torch.sigmoid(s_aux.to(total.dtype)[None, :, None] - total), 0.0)
        mass = learned + (1.0 - learned) * mass
    return AttentionStatistics(
        entropy=entropy,
        collision=collision,
        maximum=maximum,
        visible_keys=visible,
        sink_mass=mass,
        rest_entropy=rest_entropy,
        rest_collision=rest_collision,
        rest_maximum=rest_maximum,
        rest_visible_keys=rest_visible,
    )
