"""FlexAttention's log-sum-exp, uncompiled on the CPU, against the streaming sums."""

import os

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

from comppo.computation import attention_statistics, flex

FIELDS = ("collision", "maximum", "visible_keys", "sink_mass", "rest_collision", "rest_maximum", "rest_visible_keys")


def on_the_cpu(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention, but for the greatest scores, which it gives on accelerators only."""
    assert return_aux.lse and return_aux.max_scores
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa}
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    changed = score_mod(scores, *at).masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    return out, AuxOutput(lse=aux.lse, max_scores=changed.amax(-1))


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="FlexAttention cannot trace run-time shape checks")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap", "function", "learned"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_log_sum_exp_says_what_streaming_says(kind, kv_heads, monkeypatch):
    """Padding, a window, and a row without keys; sinks that hold nearly all of the mass among them."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 40, 16) * 2, torch.randn(2, kv_heads, 40, 16)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :9] = False
    key[0, :, 0] *= 8
    bias = torch.randn(4, 40)

    def mask(b, h, q, k):
        return (k <= q) & (k > q - 25) & real[b, k]

    settings = {"scale": 0.4, "mask": mask, "sinks": None, "softcap": None, "score_function": None, "s_aux": None}
    settings |= {
        "plain": {},
        "sinks": {"sinks": real & (real.cumsum(-1) <= 2)},
        "softcap": {"softcap": 3.0, "sinks": real & (real.cumsum(-1) <= 1)},
        "function": {"score_function": lambda s, b, h, q, k: s - 0.1 * (q - k) + bias[h, k]},
        "learned": {"s_aux": torch.randn(4), "sinks": real & (real.cumsum(-1) <= 1)},
    }[kind]
    rows = slice(3, 38)
    settings |= {"entropy": False, "causal": False, "rows": rows}
    want = attention_statistics(query, key, **settings)
    monkeypatch.setattr(flex, "supports", lambda query: True)  # as on CUDA
    monkeypatch.setattr(flex, "_compiled", lambda: on_the_cpu)
    monkeypatch.setattr("comppo.computation.statistics.reduce", lambda *a, **k: pytest.fail("streamed"))
    got = attention_statistics(query, key, **settings)
    assert (want.visible_keys[1] == 0).any() and got.entropy is want.entropy is None
    for name in FIELDS:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=5e-6, msg=name)


def test_it_is_for_cuda():
    assert not flex.supports(torch.zeros(1, 1, 2, 16))
