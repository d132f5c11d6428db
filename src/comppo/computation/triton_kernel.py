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
from typing import no_type_check

from comppo.computation.attention_rows import INVISIBLE, LOWEST_MAXIMUM, MASKED

try:
    import triton
    import triton.language as tl
except ImportError:  # it has no package for this platform, and `triton_launch.supports` says no
    triton = None

LOG2_E = math.log2(math.e)

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
    def bounds_kernel(
        mask, documents, bounds, m_row, m_head, m_query, m_key, d_row, d_key,
        queries, keys, lead, window, mask_groups, blocks,
        GROUP: tl.constexpr, FOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
        CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DOCUMENTS: tl.constexpr,
    ):  # fmt: skip
        """For each block of rows of `rows_kernel`: first and last + 1 of the keys that any row sees; equal if none."""
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
    def rows_kernel(
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
