"""The reductions of `attention_statistics` as one Triton kernel, for NVIDIA GPUs.

A program takes a block of query rows of one key-value head and streams that head's keys past them. Query heads that
share a key head are folded into the rows, so that each block of keys is loaded once for all of them. Per row it keeps
the sums of `streaming.py` in registers, in base 2: m, l1, l2, t, f, and d = sum_j 2^(s_j - m) (i - j) for distances.
Sink keys go to sums of their own, which are merged before anything is written. There is one exponential per score (a
second one with `softcap`, and in the few key blocks that hold a sink), no values are read, and 7 to 11 numbers are
written per row.

Key blocks that no row of the program may see are not loaded: those above the diagonal, before the window, and, where a
mask or documents are given, before the first and after the last key that any of its rows sees. A first small kernel
finds these two keys, once for all heads that share a mask. A mask is read through its strides: one that was expanded
over heads, rows or queries is not copied.

Cost, on paper: per score half the matrix work of a FlashAttention forward, which multiplies by the values too, and with
features of width w about 3 w / (2 * head width) of it. **Not run on a GPU**: it was compiled for compute capabilities
8.0, 9.0, 10.0 and 12.0 with Triton 3.9 (8.0 and 9.0 with 3.0 and 3.2 too), and its results are tested in Triton's
interpreter on a CPU. So the block sizes are estimates, and its speed is not known. Keys are not split over programs: a
call of few queries (decoding) occupies few of them.
"""

import math
from contextlib import nullcontext
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from comppo.computation.attention_rows import INVISIBLE, LOWEST_MAXIMUM, MASKED, AttentionStatistics
from comppo.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError:  # it has no package for this platform, and `supports` says no
    triton = None

LOG2_E = math.log2(math.e)
SCANNED = 2**13  # entries of a mask that are looked at in one step
WIDEST = 512  # head width
WIDEST_FEATURES = 64
ALWAYS = ("collision", "maximum", "visible_keys", "sink_mass", "rest_collision", "rest_maximum", "rest_visible_keys")
AXES = {
    "query": ("row", "head", "query", "width"),
    "key": ("row", "head", "key", "width"),
    "mask": ("row", "head", "query", "key"),
    "documents": ("row", "key"),
    "sinks": ("row", "key"),
    "features": ("row", "key", "width"),
    "s_aux": ("head",),
}
"""Strides that the kernels take, named by the tensor's initial and the axis (no axis of sinks is one of s_aux)."""
ENTROPIES, DISTANCES = ("entropy", "rest_entropy"), ("distance", "rest_distance")

# (bytes per element, head width up to): (rows, keys, warps, stages). At these sizes the compiled kernel fits into the
# 99 KiB of shared memory that the smallest supported GPUs have, and into registers (with every option at once, up to
# 1140 bytes of a thread do not).
BLOCKS = {
    (2, 64): (128, 64, 8, 3),
    (2, 128): (128, 64, 8, 2),
    (2, 256): (64, 32, 4, 2),
    (2, 512): (32, 16, 4, 2),
    (4, 64): (64, 32, 8, 2),
    (4, 128): (32, 32, 8, 2),
    (4, 256): (32, 32, 8, 2),
    (4, 512): (16, 16, 4, 2),
}
BLOCKS_WITH_FEATURES = {2: (64, 16, 4, 2), 4: (32, 16, 4, 2)}  # at most these: features need registers too

if triton is not None:
    _VARYING = ("queries", "keys", "lead", "window", "blocks", "d_row", "s_row")  # not worth compiling anew for
    _LN_2 = tl.constexpr(math.log(2.0))
    _LOG2_E = tl.constexpr(LOG2_E)
    _MASKED = tl.constexpr(MASKED)
    _LOWEST = tl.constexpr(LOWEST_MAXIMUM)
    _INVISIBLE = tl.constexpr(INVISIBLE)

    @triton.jit
    @no_type_check
    def _key_range(first, last, keys, lead, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """First and last + 1 of the keys that positions allow queries first .. last to see."""
        start, stop = 0, keys
        if CAUSAL:
            stop = tl.minimum(keys, lead + last + 1)
        if WINDOW:
            start = tl.maximum(0, lead + first - window + 1)
        return start, stop

    @triton.jit
    @no_type_check
    def _visible(
        place, k, first, keys, window, mask, m_key, documents, d_key, document,
        CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DOCUMENTS: tl.constexpr,
    ):  # fmt: skip
        """Which keys k >= first each row sees, one line for all where that is the same, and what an additive mask adds.
        `place` is the row's own key position, `mask` a pointer to its line of the mask, `document` its document."""
        inside = (k >= first) & (k < keys)
        keep = inside[None, :]
        if CAUSAL:
            keep = keep & (k[None, :] <= place[:, None])
        if WINDOW:
            keep = keep & (k[None, :] > place[:, None] - window)
        if DOCUMENTS:
            theirs = tl.load(documents + k.to(tl.int64) * d_key, mask=inside, other=0)
            keep = keep & (theirs[None, :] == document[:, None])
        added = 0.0
        if MASK != "none":
            line = tl.load(mask[:, None] + (k.to(tl.int64) * m_key)[None, :], mask=keep, other=0)
            if MASK == "additive":
                added = line.to(tl.float32)
                keep = keep & (added > _INVISIBLE)
            else:
                keep = keep & (line != 0)
        return keep, added

    @triton.jit(do_not_specialize=_VARYING)
    @no_type_check
    def _bounds_kernel(
        mask, documents, bounds, m_row, m_head, m_query, m_key, d_row, d_key,
        queries, keys, lead, window, mask_groups, blocks,
        GROUP: tl.constexpr, FOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
        CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DOCUMENTS: tl.constexpr,
    ):  # fmt: skip
        """For each block of rows of `_rows_kernel`: first and last + 1 of the keys that any row sees; equal if none."""
        program = tl.program_id(0)
        block, group = program % blocks, program // blocks % mask_groups
        row = (program // blocks // mask_groups).to(tl.int64)
        q_first = block * BLOCK_ROWS // GROUP
        q_last = tl.minimum((block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, queries - 1)
        r = tl.arange(0, LINES)
        q = tl.minimum(q_first + r // FOLD, q_last)
        place = lead + q
        line, document = place, place
        if MASK != "none":
            line = mask + row * m_row + (group * FOLD + r % FOLD).to(tl.int64) * m_head + q.to(tl.int64) * m_query
        if DOCUMENTS:
            documents += row * d_row
            document = tl.load(documents + place.to(tl.int64) * d_key, mask=place >= 0, other=0)
        start, stop = _key_range(q_first, q_last, keys, lead, window, CAUSAL, WINDOW)
        columns = tl.arange(0, TILE)
        lowest = keys
        k0 = start
        while (k0 < stop) & (lowest == keys):
            k = k0 + columns
            keep, _ = _visible(place, k, start, keys, window, line, m_key, documents, d_key, document,
                               CAUSAL, WINDOW, MASK, DOCUMENTS)  # fmt: skip
            lowest = tl.min(tl.min(tl.where(keep, k[None, :], keys), 1), 0)
            k0 += TILE
        end = lowest
        k0 = stop
        while (k0 > lowest) & (end == lowest):
            k = k0 - TILE + columns
            keep, _ = _visible(place, k, lowest, keys, window, line, m_key, documents, d_key, document,
                               CAUSAL, WINDOW, MASK, DOCUMENTS)  # fmt: skip
            end = tl.max(tl.max(tl.where(keep, k[None, :] + 1, lowest), 1), 0)
            k0 -= TILE
        tl.store(bounds + 2 * program, lowest)
        tl.store(bounds + 2 * program + 1, end)

    @triton.jit
    @no_type_check
    def _absorb(s, m, l1, l2, t, d, place, k, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr):
        """Take in a block of scores; also returns its exponentials and the factor on what was summed before."""
        new = tl.maximum(m, tl.max(s, 1))
        step = m - new
        r = tl.exp2(step)
        x = s - new[:, None]
        e = tl.exp2(x)
        if ENTROPY:
            t = r * (t + step * l1) + tl.sum(e * x, 1)
        if DISTANCE:
            d = r * d + tl.sum(e * (place[:, None] - k[None, :]).to(tl.float32), 1)
        return new, r * l1 + tl.sum(e, 1), r * r * l2 + tl.sum(e * e, 1), t, d, e, r

    @triton.jit
    @no_type_check
    def _moved(m, l1, l2, t, d, new):
        """The same sums relative to the maximum `new >= m`."""
        step = m - new
        r = tl.exp2(step)
        return r * l1, r * r * l2, r * (t + step * l1), r * d

    @triton.jit
    @no_type_check
    def _finished(l1, l2, t, d):
        """Collision, maximum, entropy and distance; 0 where there was no key."""
        some = l1 != 0  # NaN stays NaN
        l1 = tl.where(some, l1, 1.0)
        entropy = tl.log(l1) - t / l1 * _LN_2
        entropy = tl.where(entropy < 0, 0.0, entropy)
        # Correctly rounded, and l1 is at least 1, since the greatest score adds 2^0: so no maximum is above 1.
        return l2 / (l1 * l1), tl.where(some, tl.div_rn(tl.full(l1.shape, 1.0, tl.float32), l1), 0.0), entropy, d / l1

    @triton.jit(do_not_specialize=_VARYING)
    @no_type_check
    def _rows_kernel(
        query, key, mask, documents, sinks, s_aux, features, bounds,
        collision, maximum, visible_keys, sink_mass, rest_collision, rest_maximum, rest_visible_keys,
        entropy, rest_entropy, distance, rest_distance, rest_features,
        q_row, q_head, q_query, q_width, k_row, k_head, k_key, k_width, m_row, m_head, m_query, m_key,
        d_row, d_key, s_row, s_key, f_row, f_key, f_width, s_head,
        queries, keys, lead, window, kv_heads, mask_groups, blocks, scale, softcap,
        GROUP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
        CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, DOCUMENTS: tl.constexpr,
        SINKS: tl.constexpr, LEARNED: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, WIDEN: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One program reduces BLOCK_ROWS rows: row r is query r // GROUP of head r % GROUP of one key-value head."""
        program = tl.program_id(0)
        block = blocks - 1 - program % blocks  # the rows that see most keys start first
        kv_head, row = program // blocks % kv_heads, (program // blocks // kv_heads).to(tl.int64)
        r = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        stored = r < queries * GROUP
        q = tl.minimum(r // GROUP, queries - 1)  # surplus rows repeat the last query and are not stored
        head = kv_head * GROUP + r % GROUP
        place = lead + q
        q_first = block * BLOCK_ROWS // GROUP
        q_last = tl.minimum((block * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, queries - 1)

        width = tl.arange(0, BLOCK_WIDTH)
        lines = query + row * q_row + head.to(tl.int64) * q_head + q.to(tl.int64) * q_query
        q_block = tl.load(lines[:, None] + (width * q_width)[None, :], mask=(width < WIDTH)[None, :], other=0.0)
        if WIDEN:
            q_block = q_block.to(tl.float32)
        key += row * k_row + kv_head.to(tl.int64) * k_head
        line, document = place, place
        if MASK != "none":
            line = mask + row * m_row + head.to(tl.int64) * m_head + q.to(tl.int64) * m_query
        if DOCUMENTS:
            documents += row * d_row
            document = tl.load(documents + place.to(tl.int64) * d_key, mask=place >= 0, other=0)

        start, stop = _key_range(q_first, q_last, keys, lead, window, CAUSAL, WINDOW)
        if MASK != "none" or DOCUMENTS:
            place_of_bounds = bounds + 2 * ((row * mask_groups + kv_head % mask_groups) * blocks + block)
            start, stop = tl.load(place_of_bounds), tl.load(place_of_bounds + 1)
        start = start // BLOCK_KEYS * BLOCK_KEYS

        zero = tl.zeros([BLOCK_ROWS], tl.float32)
        m, l1, l2, t, d = zero + _LOWEST, zero, zero, zero, zero
        sink_m, sink_l1, sink_l2, sink_t, sink_d = zero + _LOWEST, zero, zero, zero, zero
        count = tl.zeros([BLOCK_ROWS], tl.int32)
        sink_count = tl.zeros([BLOCK_ROWS], tl.int32)
        f = tl.zeros([BLOCK_ROWS, BLOCK_FEATURES], tl.float32)
        columns = tl.arange(0, BLOCK_KEYS)
        f_columns = tl.arange(0, BLOCK_FEATURES)
        for k0 in range(start, stop, BLOCK_KEYS):
            k = k0 + columns
            k_block = tl.load(
                key + (k.to(tl.int64) * k_key)[None, :] + (width * k_width)[:, None],
                mask=(k < keys)[None, :] & (width < WIDTH)[:, None],
                other=0.0,
            )
            if WIDEN:
                k_block = k_block.to(tl.float32)
            s = tl.dot(q_block, k_block, input_precision=PRECISION) * scale
            if SOFTCAP:  # in units of the cap; base-2 scores after it
                decay = tl.exp2(tl.abs(s) * (-2.0 * _LOG2_E))
                s = tl.where(s < 0, -softcap, softcap) * ((1.0 - decay) / (1.0 + decay))
            if MASK != "none" or DOCUMENTS:
                keep, added = _visible(place, k, 0, keys, window, line, m_key, documents, d_key, document,
                                       CAUSAL, WINDOW, MASK, DOCUMENTS)  # fmt: skip
                if MASK == "additive":
                    s += added * _LOG2_E
                s = tl.where(keep, s, _MASKED)
                count += tl.sum(keep.to(tl.int32), 1)
            else:
                edge = k0 + BLOCK_KEYS > keys
                if CAUSAL:
                    edge = edge | (k0 + BLOCK_KEYS - 1 > lead + q_first)
                if WINDOW:
                    edge = edge | (k0 <= lead + q_last - window)
                if edge:
                    keep, _ = _visible(place, k, 0, keys, window, line, m_key, documents, d_key, document,
                                       CAUSAL, WINDOW, MASK, DOCUMENTS)  # fmt: skip
                    s = tl.where(keep, s, _MASKED)
                    count += tl.sum(keep.to(tl.int32), 1)
                else:
                    count += BLOCK_KEYS
            if SINKS:
                sink = tl.load(sinks + row * s_row + k.to(tl.int64) * s_key, mask=k < keys, other=0) != 0
                if tl.max(sink.to(tl.int32), 0) > 0:
                    only = tl.where(sink[None, :], s, _MASKED)
                    sink_count += tl.sum((only > _LOWEST).to(tl.int32), 1)
                    sink_m, sink_l1, sink_l2, sink_t, sink_d, _, _ = _absorb(
                        only, sink_m, sink_l1, sink_l2, sink_t, sink_d, place, k, ENTROPY, DISTANCE
                    )
                s = tl.where(sink[None, :], _MASKED, s)
            m, l1, l2, t, d, e, moved = _absorb(s, m, l1, l2, t, d, place, k, ENTROPY, DISTANCE)
            if FEATURES:
                f_block = tl.load(
                    features + row * f_row + (k.to(tl.int64) * f_key)[:, None] + (f_columns * f_width)[None, :],
                    mask=(k < keys)[:, None] & (f_columns < FEATURES)[None, :],
                    other=0.0,
                ).to(tl.float32)
                # Three products of tf32 parts: as exact as float32, on tensor cores
                f = tl.dot(e, f_block, f * moved[:, None], input_precision="tf32x3")

        new = tl.maximum(m, sink_m)
        all_l1, all_l2, all_t, all_d = _moved(m, l1, l2, t, d, new)
        sink_l1, sink_l2, sink_t, sink_d = _moved(sink_m, sink_l1, sink_l2, sink_t, sink_d, new)
        all_l1 += sink_l1
        some = all_l1 != 0
        mass = sink_l1 / tl.where(some, all_l1, 1.0)
        if LEARNED:
            logit = tl.load(s_aux + head * s_head).to(tl.float32)
            total = tl.log(tl.where(some, all_l1, 1.0)) + new * _LN_2
            learned = tl.where(some, 1.0 / (1.0 + tl.exp(total - logit)), 0.0)
            mass = learned + (1.0 - learned) * mass
        all_c, all_p, all_h, all_d = _finished(all_l1, all_l2 + sink_l2, all_t + sink_t, all_d + sink_d)
        rest_c, rest_p, rest_h, rest_d = _finished(l1, l2, t, d)

        at = (row * kv_heads * GROUP + head) * queries + q
        tl.store(collision + at, all_c, mask=stored)
        tl.store(maximum + at, all_p, mask=stored)
        tl.store(visible_keys + at, count.to(tl.float32), mask=stored)
        tl.store(sink_mass + at, mass, mask=stored)
        tl.store(rest_collision + at, rest_c, mask=stored)
        tl.store(rest_maximum + at, rest_p, mask=stored)
        tl.store(rest_visible_keys + at, (count - sink_count).to(tl.float32), mask=stored)
        if ENTROPY:
            tl.store(entropy + at, all_h, mask=stored)
            tl.store(rest_entropy + at, rest_h, mask=stored)
        if DISTANCE:
            tl.store(distance + at, all_d, mask=stored)
            tl.store(rest_distance + at, rest_d, mask=stored)
        if FEATURES:
            f_at = (at * FEATURES)[:, None] + f_columns[None, :]
            f_stored = stored[:, None] & (f_columns < FEATURES)[None, :]
            tl.store(rest_features + f_at, f / tl.where(l1 != 0, l1, 1.0)[:, None], mask=f_stored)


def unsupported(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    features: Float[Tensor, "rows keys features"] | None = None,
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can. The other arguments never matter.

    Args:
        query: as in `attention_statistics`.
        key: likewise.
        features: likewise.

    Returns:
        A reason that follows "the Triton kernel ", or None.
    """
    if triton is None:
        return "needs the package triton"
    interpreted = not isinstance(_rows_kernel, triton.runtime.JITFunction)
    if not query.is_cuda and not (interpreted and query.device.type == "cpu"):
        return f"runs on CUDA, not on {query.device} (on a CPU with TRITON_INTERPRET=1, for tests)"
    if query.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(query.device) < (8, 0)):
        return "needs an NVIDIA GPU of compute capability 8.0 or later"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or key.dtype != query.dtype:
        return f"takes float32, bfloat16 or float16, the same for both, not {query.dtype} and {key.dtype}"
    if query.shape[3] > WIDEST:
        return f"takes heads up to {WIDEST} wide, not {query.shape[3]}"
    if features is not None and features.shape[2] > WIDEST_FEATURES:
        return f"takes features up to {WIDEST_FEATURES} wide, not {features.shape[2]}"
    return None


def supports(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    features: Float[Tensor, "rows keys features"] | None = None,
) -> bool:
    """Whether `triton_statistics` can take these inputs; nothing is computed, nothing synchronised."""
    return unsupported(query, key, features=features) is None


@torch.no_grad()
def triton_statistics(
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    *,
    scale: float,
    mask: Shaped[Tensor, "mask_rows mask_heads queries keys"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Bool[Tensor, "rows keys"] | None = None,
    documents: Int[Tensor, "rows keys"] | None = None,
    rows: slice | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    features: Float[Tensor, "rows keys features"] | None = None,
    entropy: bool = True,
    distance: bool = False,
) -> AttentionStatistics:
    """`attention_statistics` as a Triton kernel; the arguments are its own, and it checks that they fit each other.

    Nothing waits for the GPU. Sums are kept in float32; float32 inputs are multiplied in full precision (no tf32).

    Args:
        query: float32, bfloat16 or float16, any strides.
        key: the same dtype.
        scale: factor on the scores.
        mask: boolean or additive, any strides.
        causal: hide keys that come after the query.
        window: a query sees only its last `window` keys.
        softcap: scores become softcap * tanh(score / softcap), before the mask.
        sinks: keys that count as attention sink.
        documents: number of the document that each key belongs to.
        rows: which query positions to reduce.
        s_aux: one learned sink logit per head.
        features: at most `WIDEST_FEATURES` wide.
        entropy: whether to compute the two entropies.
        distance: whether to compute the two distances.

    Returns:
        As `attention_statistics`, float32.

    Raises:
        ConfigError: `supports` is false.

    Source:
        The online softmax of Milakov & Gimelshein (arXiv:1805.02867) in the blocks of FlashAttention-2
        (arXiv:2307.08691).
    """
    reason = unsupported(query, key, features=features)
    if reason is not None:
        raise ConfigError(f"the Triton kernel {reason}: call attention_statistics, which chooses by itself.")
    start, stop, _ = (rows or slice(None)).indices(query.shape[2])
    lead = start + key.shape[2] - query.shape[2]
    query = query[:, :, start:stop]
    if mask is not None:
        mask = mask[:, :, start:stop].expand(query.shape[0], query.shape[1], -1, -1)
    names = ALWAYS + (ENTROPIES if entropy else ()) + (DISTANCES if distance else ())
    results = {name: query.new_empty(query.shape[:3], dtype=torch.float32) for name in names}
    if features is not None:
        results["rest_features"] = query.new_empty((*query.shape[:3], features.shape[2]), dtype=torch.float32)
    if query.numel():
        sizes = _block_sizes(query, key, mask, features)
        seen = _seen(query, key, mask, documents, lead, causal, window, sizes["BLOCK_ROWS"])
        with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
            _rows_kernel[(seen["blocks"] * query.shape[0] * key.shape[1],)](
                **_with_strides(query=query, key=key, sinks=sinks, features=features, s_aux=s_aux),
                **seen | sizes,
                **dict.fromkeys(ENTROPIES + DISTANCES + ("rest_features",)) | results,
                bounds=None if mask is None and documents is None else _bounds(query.shape[0], seen),
                kv_heads=key.shape[1],
                scale=scale * LOG2_E if softcap is None else scale / softcap,
                softcap=0.0 if softcap is None else softcap * LOG2_E,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                LEARNED=s_aux is not None,
                ENTROPY=entropy,
                DISTANCE=distance,
                # "ieee" would keep half precision off the tensor cores too, where its products are exact anyway.
                PRECISION="ieee" if query.dtype == torch.float32 else None,
                WIDEN=query.dtype == torch.bfloat16 and not query.is_cuda,  # the interpreter cannot multiply it
                # Fused, a score less the maximum would not be 0 where the score is the maximum.
                enable_fp_fusion=False,
            )
    return AttentionStatistics(**results)


def _block_sizes(query: Tensor, key: Tensor, mask: Tensor | None, features: Tensor | None) -> dict[str, int]:
    """From the tables; fewer rows where there are few queries."""
    width, bytes_each = max(16, triton.next_power_of_2(query.shape[3])), query.element_size()
    rows, keys, warps, stages = BLOCKS[bytes_each, max(width, 64)]
    if features is not None:
        most = BLOCKS_WITH_FEATURES[bytes_each]
        rows, keys, warps, stages = min(rows, most[0]), min(keys, most[1]), most[2], most[3]
    elif mask is not None:
        rows, keys = min(rows, 64), max(16, keys // 2)  # it takes registers, most where its lines are not aligned
    folded = triton.next_power_of_2(query.shape[2] * (query.shape[1] // key.shape[1]))
    return {
        "BLOCK_ROWS": min(rows, max(16, folded)),
        "BLOCK_KEYS": keys,
        "BLOCK_WIDTH": width,
        "BLOCK_FEATURES": max(16, triton.next_power_of_2(0 if features is None else features.shape[2])),
        "WIDTH": query.shape[3],
        "FEATURES": 0 if features is None else features.shape[2],
        "num_warps": warps,
        "num_stages": stages,
    }


def _seen(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    lead: int,
    causal: bool,
    window: int | None,
    block_rows: int,
) -> dict[str, Any]:
    """The arguments of both kernels, about which keys are seen; `lead` is the key position of the first query."""
    group = query.shape[1] // key.shape[1]
    return {
        **_with_strides(mask=mask, documents=documents),
        "queries": query.shape[2],
        "keys": key.shape[2],
        "lead": lead,
        "window": window or 0,
        "mask_groups": 1 if mask is None or mask.stride(1) == 0 else key.shape[1],
        "blocks": triton.cdiv(query.shape[2] * group, block_rows),
        "BLOCK_ROWS": block_rows,
        "GROUP": group,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "MASK": "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive",
        "DOCUMENTS": documents is not None,
    }


def _bounds(n_rows: int, seen: dict[str, Any]) -> Tensor:
    """First and last + 1 key that each block of rows sees: (rows * mask_groups * blocks, 2), int32."""
    block_rows, group, mask = seen["BLOCK_ROWS"], seen["GROUP"], seen["mask"]
    device = (seen["documents"] if mask is None else mask).device
    bounds = torch.empty((n_rows * seen["mask_groups"] * seen["blocks"], 2), dtype=torch.int32, device=device)
    fold = 1 if mask is None or mask.stride(1) == 0 else group  # heads that share a mask need one line of it
    queries = triton.cdiv(block_rows, group) + (block_rows % group > 0)  # of a block, at most
    lines = triton.next_power_of_2(queries * fold)
    _bounds_kernel[(len(bounds),)](
        **seen,
        bounds=bounds,
        FOLD=fold,
        LINES=lines,
        TILE=max(64, SCANNED // lines),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return bounds


def _with_strides(**tensors: Tensor | None) -> dict[str, Any]:
    """Tensors and their strides as arguments of a kernel; a tensor that is not there has strides of 0."""
    arguments: dict[str, Any] = dict(tensors)
    for name, tensor in tensors.items():
        axes = AXES[name]
        steps = (0,) * len(axes) if tensor is None else tensor.stride()
        arguments |= {f"{name[0]}_{axis}": step for axis, step in zip(axes, steps, strict=True)}
    return arguments
