"""Streaming reductions against the whole matrix in float64, closed forms, and awkward shapes."""

import os
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import comppo.computation.streaming as streaming
from comppo.computation import ATTENTION_STATISTICS, attention_statistics, concentration
from comppo.computation.statistics import reduce_scores
from comppo.errors import EvidenceError


def first_keys(ends, keys):
    """Sinks: in each row the keys before its end."""
    return torch.arange(keys) < torch.as_tensor(ends)[:, None]


def whole_matrix(query, key, *, scale, keep, softcap=None, bias=0.0, sinks=None, s_aux=None, features=None):
    """The same statistics from materialised probabilities, in float64."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~keep, -torch.inf)
    n_keys, n_queries = key.shape[2], query.shape[2]
    is_sink = (torch.zeros(query.shape[0], n_keys, dtype=torch.bool) if sinks is None else sinks)[:, None, None]
    away = torch.arange(n_queries)[:, None] + n_keys - n_queries - torch.arange(n_keys)

    def reduce(s):
        p = s.softmax(-1).nan_to_num(0.0)
        reduced = {"entropy": -torch.xlogy(p, p).sum(-1), "collision": p.square().sum(-1), "maximum": p.amax(-1)}
        return p, reduced | {"distance": (p * away).sum(-1)}

    rest_p, rest = reduce(scores.masked_fill(is_sink, -torch.inf))
    result = reduce(scores)[1] | {f"rest_{k}": v for k, v in rest.items()}
    if features is not None:
        result["rest_features"] = torch.einsum("bhqk,bkf->bhqf", rest_p, features.double())
    learned = torch.full((query.shape[1],), -torch.inf) if s_aux is None else s_aux
    with_learned = torch.cat([scores, learned.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    everything = with_learned.softmax(-1).nan_to_num(0.0)
    mass = (everything[..., :-1] * is_sink).sum(-1) + everything[..., -1]
    result["sink_mass"] = torch.where(keep.expand_as(scores).any(-1), mass, 0.0)
    result["visible_keys"] = keep.expand_as(scores).sum(-1)
    result["rest_visible_keys"] = (keep & ~is_sink).expand_as(scores).sum(-1)
    return result


def without_distance(want):
    return {name: values for name, values in want.items() if "distance" not in name}


def assert_same(got, want, rows=slice(None), atol=2e-6):
    for name, values in want.items():
        torch.testing.assert_close(
            getattr(got, name).double(),
            (values[:, :, rows] if values.ndim == 4 else values[..., rows]).double(),
            rtol=0,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streaming_equals_the_whole_matrix(data):
    """Any shape, block size, mask kind, window, softcap, sinks, learned sink; rows without keys included."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10_000)))
    n_rows, kv_heads, group, keys = (draw(st.integers(1, n)) for n in (3, 3, 3, 33))
    queries = draw(st.integers(1, keys))
    query, key = torch.randn(n_rows, kv_heads * group, queries, 5) * 3, torch.randn(n_rows, kv_heads, keys, 5)
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 9)) if causal else None
    positions, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    keep = torch.ones(queries, keys, dtype=torch.bool)[None, None]
    if causal:
        keep = keep & (columns <= positions) & (columns > positions - (window or keys + 1))
    mask, bias = None, 0.0
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind != "none":
        heads = draw(st.sampled_from([1, kv_heads * group]))
        mask = torch.rand(draw(st.sampled_from([1, n_rows])), heads, queries, keys) < 0.7
        keep = keep & mask
    if kind == "float":
        bias = torch.randn(mask.shape)
        mask = bias.masked_fill(~mask, torch.finfo(torch.float32).min)
    options = {
        "scale": 0.7,
        "softcap": draw(st.none() | st.just(2.0)),
        "sinks": draw(st.none() | st.just(torch.rand(n_rows, keys) < 0.2)),
        "features": draw(st.none() | st.just(torch.randn(n_rows, keys, 3))),
        "s_aux": draw(st.none() | st.just(torch.randn(kv_heads * group))),
    }
    start = draw(st.integers(0, queries))
    rows = slice(start, draw(st.integers(start, queries)))
    got = attention_statistics(
        query,
        key,
        mask=mask,
        causal=causal,
        window=window,
        rows=rows,
        block_queries=draw(st.integers(1, 40)),
        block_keys=draw(st.integers(1, 40)),
        distance=True,
        **options,
    )
    want = whole_matrix(query, key, keep=keep.expand(n_rows, -1, -1, -1), bias=bias, **options)
    assert_same(got, want, rows, atol=2e-5)
    if options["s_aux"] is not None:
        return
    # The same scores, handed over as a model would hand over its own.
    scores = (query.double() @ key.double().repeat_interleave(group, 1).transpose(-1, -2) * 0.7).float()
    scores = scores if options["softcap"] is None else 2.0 * torch.tanh(scores / 2.0)
    scores = (scores + bias).masked_fill(~keep, torch.finfo(torch.float32).min)
    given = reduce_scores(scores, sinks=options["sinks"], rows=rows, features=options["features"], distance=True)
    assert_same(given, want, rows, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_functions_of_indices_say_what_a_mask_says(data):
    """FlexAttention's two kinds of function, with the row's index in them, against tensors."""
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    n_rows, queries, keys = (data.draw(st.integers(1, n)) for n in (5, 20, 30))
    query, key = torch.randn(n_rows, 4, queries, 5, dtype=torch.float64), torch.randn(n_rows, 2, keys, 5).double()
    mask, bias = torch.rand(n_rows, 4, queries, keys) < 0.6, torch.randn(n_rows, 4, queries, keys).double()
    got = attention_statistics(
        query,
        key,
        scale=0.3,
        mask=lambda b, h, q, k: mask[b, h, q, k],
        score_function=lambda s, b, h, q, k: s + bias[b, h, q, k],
        causal=False,
        block_queries=7,
        block_keys=data.draw(st.integers(1, 40)),
    )
    want = whole_matrix(query, key, scale=0.3, keep=mask, bias=bias)
    assert_same(got, without_distance(want), atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_packed_documents_equal_separate_ones(data):
    """Each with a sink of its own; documents of any length, one row."""
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    total = sum(lengths)
    query, key = torch.randn(1, 4, total, 5, dtype=torch.float64), torch.randn(1, 2, total, 5, dtype=torch.float64)
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    sinks = torch.cat([torch.arange(n) < 1 for n in lengths])[None]
    got = attention_statistics(
        query, key, scale=0.5, documents=numbers, sinks=sinks, distance=True, block_queries=7, block_keys=5
    )
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        alone = attention_statistics(
            query[:, :, part], key[:, :, part], scale=0.5, sinks=first_keys([1], n), distance=True
        )
        for f in fields(alone):
            if f.name != "rest_features":
                torch.testing.assert_close(getattr(got, f.name)[..., part], getattr(alone, f.name), rtol=0, atol=1e-12)
        start += n


def test_a_key_block_that_only_the_last_queries_have_left_behind_is_cut():
    """Blocks of 24 queries and 4 keys under a window of 10: in the second, keys 15 to 18 are near for the first query
    but beyond the window of the last, with no key above the diagonal to give the block a mask anyway."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 40, 8, dtype=torch.float64), torch.randn(2, 2, 40, 8, dtype=torch.float64)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    keep = ((distance >= 0) & (distance < 10)).expand(2, 1, -1, -1)
    got = attention_statistics(query, key, scale=0.5, window=10, block_queries=24, block_keys=4)
    assert_same(got, without_distance(whole_matrix(query, key, scale=0.5, keep=keep)), atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 7, 63, 600])
def test_equal_scores_spread_evenly(tokens):
    """Zero queries: row i sees i + 1 keys with p = 1 / (i + 1); the sink holds one share of them."""
    key = torch.randn(1, 1, tokens, 4, dtype=torch.float64)
    got = attention_statistics(
        torch.zeros_like(key), key, scale=1.0, sinks=first_keys([1], tokens), features=key[:, 0], distance=True
    )
    n = torch.arange(1, tokens + 1, dtype=torch.float64)[None, None]
    torch.testing.assert_close(got.entropy, n.log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(got.collision, 1 / n, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.maximum, 1 / n, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.sink_mass, 1 / n, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.rest_collision[..., 1:], 1 / (n[..., 1:] - 1), rtol=1e-12, atol=0)
    # Keys 1 .. i are j = 0 .. i - 1 steps away, (i - 1) / 2 on average; the whole row i / 2.
    torch.testing.assert_close(got.distance, (n - 1) / 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.rest_distance[..., 1:], (n[..., 1:] - 2) / 2, rtol=1e-12, atol=1e-12)
    means = key[:, :, 1:].cumsum(2) / (n[..., 1:, None] - 1)
    torch.testing.assert_close(got.rest_features[:, :, 1:], means, rtol=0, atol=1e-12)
    assert torch.equal(concentration(got), torch.zeros_like(n)) or concentration(got).max() < 1e-12


def test_two_keys_in_closed_form():
    """Scores 0 and x: p = sigmoid(-x), sigmoid(x)."""
    x = torch.linspace(-30, 30, 13, dtype=torch.float64)
    query, key = x.view(13, 1, 1, 1), torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1).expand(13, 1, 2, 1)
    got = attention_statistics(query, key, scale=1.0, causal=False, block_keys=1)
    p, q = torch.sigmoid(x), torch.sigmoid(-x)
    torch.testing.assert_close(got.collision[:, 0, 0], p**2 + q**2, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.maximum[:, 0, 0], torch.maximum(p, q), rtol=1e-12, atol=0)
    torch.testing.assert_close(got.entropy[:, 0, 0], -torch.xlogy(p, p) - torch.xlogy(q, q), rtol=1e-9, atol=1e-12)


def test_a_sink_that_holds_all_but_1e_8_of_the_mass_does_not_cancel():
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 40, 8), torch.randn(1, 1, 40, 8)
    bias = torch.zeros(1, 1, 40, 40).masked_fill_(~torch.ones(40, 40).tril().bool(), torch.finfo(torch.float32).min)
    bias[..., 0] += 22.0
    options = {"scale": 0.3, "sinks": first_keys([1], 40)}
    got = attention_statistics(query, key, mask=bias, causal=False, block_keys=16, **options)
    want = whole_matrix(query, key, keep=torch.ones(40, 40).tril().bool()[None, None], bias=bias, **options)
    assert got.sink_mass.min() > 1 - 1e-6
    assert_same(got, without_distance(want), atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32_under_autocast_too(dtype):
    torch.manual_seed(0)
    query, key = (torch.randn(2, 2, 50, 16) * 2).to(dtype), torch.randn(2, 1, 50, 16).to(dtype)
    keep = torch.ones(50, 50).tril().bool()[None, None].expand(2, -1, -1, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention_statistics(query, key, scale=0.5)
    assert got.entropy.dtype == torch.float32
    assert_same(got, without_distance(whole_matrix(query, key, scale=0.5, keep=keep)), atol=5e-6)


def test_rows_without_keys_are_zero():
    mask = torch.ones(1, 1, 4, 4).tril().bool()
    mask[..., 0] = False
    options = {"scale": 1.0, "mask": mask, "causal": False, "distance": True, "features": torch.randn(1, 4, 2)}
    got = attention_statistics(torch.randn(1, 1, 4, 3), torch.randn(1, 1, 4, 3), **options)
    for f in fields(got):
        values = getattr(got, f.name)
        assert (values[0, 0, 0] == 0).all() and values.isfinite().all()
    got = attention_statistics(torch.randn(1, 1, 4, 3), torch.randn(1, 1, 4, 3), rows=slice(2, 2), **options)
    assert got.collision.shape == (1, 1, 0) and got.rest_features.shape == (1, 1, 0, 2)


@pytest.mark.parametrize("block_keys", [2, 512])
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_no_number_is_not_read_as_a_number(block_keys, entropy):
    """One query, and then one key that all but the first two queries see; the others are as without it."""
    query, key, sinks = torch.randn(1, 2, 6, 4), torch.randn(1, 1, 6, 4), first_keys([1], 6)
    options = {"scale": 1.0, "sinks": sinks, "entropy": entropy, "distance": True, "block_keys": block_keys}
    want = attention_statistics(query, key, **options)
    for broken, seen in ((query.clone(), (2,)), (key.clone(), (2, 3, 4, 5))):
        broken[:, :, 2, 0] = torch.nan
        got = attention_statistics(*((broken, key) if broken.shape[1] == 2 else (query, broken)), **options)
        for f in fields(got):
            values = getattr(got, f.name)
            if values is not None and "visible" not in f.name:
                other = [i for i in range(6) if i not in seen]
                assert values[:, :, seen].isnan().all(), f.name
                torch.testing.assert_close(values[:, :, other], getattr(want, f.name)[:, :, other])
        default = ATTENTION_STATISTICS["whole_effective_keys"].compute(got)
        assert default[:, :, seen].isnan().all()
    scores = torch.zeros(1, 1, 2, 2)
    scores[..., 1, 0] = torch.nan
    assert reduce_scores(scores).collision.isnan().flatten().tolist() == [False, True]


def test_no_row_is_no_error():
    query, key, features = torch.randn(0, 4, 9, 8), torch.randn(0, 2, 9, 8), torch.randn(0, 9, 3)
    got = attention_statistics(query, key, scale=1.0, features=features, sinks=first_keys([], 9))
    assert got.collision.shape == (0, 4, 9) and got.rest_features.shape == (0, 4, 9, 3)


def test_scratch_is_a_block_not_a_matrix(monkeypatch):
    """No product ever has more scores than one block."""
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: sizes.append(a.shape[0] * a.shape[1] * b.shape[2]) or bmm(a, b))
    attention_statistics(torch.randn(1, 4, 3000, 4), torch.randn(1, 2, 3000, 4), scale=1.0)
    assert len(sizes) > 10 and max(sizes) <= streaming.SCRATCH_SCORES


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping's own error comes first")
@pytest.mark.parametrize(
    ("query", "key", "options", "match"),
    [
        ((1, 2, 3, 4), (2, 2, 3, 4), {}, "do not fit"),
        ((1, 3, 3, 4), (1, 2, 3, 4), {}, "cannot share"),
        ((1, 2, 3, 4), (1, 2, 3, 4), {"mask": torch.ones(1, 1, 3, 5).bool()}, "does not broadcast"),
        ((1, 2, 3, 4), (1, 2, 3, 4), {"rows": slice(0, 3, 2)}, "contiguous"),
        ((1, 2, 3, 4), (1, 2, 3, 4), {"causal": False, "window": 2}, "needs causal"),
        ((1, 2, 3, 4), (1, 2, 5, 4), {"sinks": torch.ones(1, 3).bool()}, r"sinks .*\(rows, keys\)"),
    ],
)
def test_shape_errors_name_the_argument(query, key, options, match):
    with pytest.raises(EvidenceError, match=match):
        attention_statistics(torch.zeros(query), torch.zeros(key), scale=1.0, **options)
