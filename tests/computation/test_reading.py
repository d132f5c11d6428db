"""`read_computation`: alignment, padding, one forward per micro-batch, scores, statistics by name."""

import sys

import pytest
import torch

from comppo.computation import (
    ROUTER_STATISTICS,
    STATISTICS,
    AttentionStatistic,
    ComputationReader,
    read_computation,
    require_readable,
    score_plainly,
    token_scores,
)
from comppo.computation.user_statistics import load_statistic
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

TENSORS = ("statistic", "routing", "routed", "sink_mass", "visible_keys", "hidden", "logps", "entropies")
PROMPTS, RESPONSES = (6, 3, 4, 6), (7, 4, 7, 1)
# Jamba without its attention layers: experts beside Mamba alone
NO_ATTENTION = {
    "attn_layer_offset": 5,
    "attn_layer_period": 8,
    "num_experts": 4,
    "mamba_d_state": 8,
}
PEAK = AttentionStatistic("peak", lambda rows: rows.rest_maximum * rows.rest_visible_keys)
OWN = {"callable": lambda c: c.entropies * c.sink_mass, "attention": PEAK}
DENSE = [*(name for name in STATISTICS if name not in ROUTER_STATISTICS), *OWN]


def layout(prompt_width, response_width, rows=range(4)):
    """The same rows at another padding: prompts to the left, responses to the right of it."""
    torch.manual_seed(3)
    tokens = [torch.randint(3, 95, (p + r,)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(prompt_width - PROMPTS[row], prompt_width + RESPONSES[row])
        ids[i, place], mask[i, place] = tokens[row], 1
    return ids, mask, response_width


def assert_equal_computation(got, want, tokens, row_got, row_want, atol=1e-5):
    for name in TENSORS:
        torch.testing.assert_close(
            getattr(got, name)[row_got, :tokens],
            getattr(want, name)[row_want, :tokens],
            rtol=0,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    ("name", "statistic"),
    [(n, s) for n in ("llama", "gpt2", "mistral") for s in DENSE] + [("qwen3_moe", s) for s in ROUTER_STATISTICS],
)
def test_padding_moves_nothing(name, statistic, build):
    """Each row alone and unpadded against padded batches; GPT-2 has learned positions, Mistral a window."""
    model = build(name)
    options = {"statistic": OWN.get(statistic, statistic), "layers": "all", "hidden_layers": (1, -1), "routed_width": 3}
    narrow = read_computation(model, *layout(6, 7), **options)
    wide = read_computation(model, *layout(11, 12), **options, micro_batch_size=3)
    for row, tokens in enumerate(RESPONSES):
        alone = read_computation(model, *layout(PROMPTS[row], tokens, [row]), **options)
        assert_equal_computation(narrow, alone, tokens, row, 0)
        assert_equal_computation(wide, alone, tokens, row, 0)
        assert narrow.mask[row].sum() == wide.mask[row].sum() == tokens
    for read in (narrow, wide):
        for field in TENSORS:
            values = getattr(read, field)
            assert values.dtype == torch.float32 and values.isfinite().all() and not values.requires_grad
            assert (values[~read.mask] == 0).all()


def test_padding_s_content_is_never_seen(build):
    model = build("llama")
    ids, mask, tokens = layout(9, 9)
    want = read_computation(model, ids, mask, tokens)
    got = read_computation(model, torch.where(mask.bool(), ids, 77), mask.bool(), tokens)
    for name in TENSORS:
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_scores_and_hidden_states_are_those_of_a_plain_forward(build):
    model = build("qwen3")
    ids, mask, tokens = layout(6, 7, [0])
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
    for temperature in (1.0, 0.6):
        read = read_computation(model, ids, mask, tokens, temperature=temperature)
        log_p = torch.log_softmax(output.logits[:, 5:-1].double() / temperature, -1)
        want = log_p.gather(-1, ids[:, 6:, None]).squeeze(-1)
        torch.testing.assert_close(read.logps.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(read.entropies.double(), -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(read.hidden, output.hidden_states[-1][:, 5:-1])


def test_statistic_is_the_mean_of_routing_at_the_emitting_position(build):
    model = build("llama", num_hidden_layers=3)
    ids, mask, tokens = layout(6, 7, [0])
    read = read_computation(model, ids, mask, tokens, statistic="collision", layers="all", heads=(0, 3))
    with torch.no_grad(), ComputationReader(model, statistics=("collision",), layers="all") as reader:
        model(input_ids=ids)
    assert read.layers == (0, 1, 2) and read.routing.shape == (1, 7, 3, 2)
    torch.testing.assert_close(read.routing, reader.statistic("collision")[:, 5:-1][..., [0, 3]])
    torch.testing.assert_close(read.statistic, read.routing.mean((2, 3)))
    assert read.visible_keys[0].tolist() == [6, 7, 8, 9, 10, 11, 12]


def test_named_statistics_by_their_definitions(build):
    model = build("llama")
    rows = layout(6, 7)
    read = {name: read_computation(model, *rows, statistic=OWN.get(name, name), layers="all") for name in DENSE}
    assert torch.equal(read["output_entropy"].statistic, read["collision"].entropies)
    assert torch.equal(read["output_entropy"].routing, read["whole_effective_keys"].routing)
    assert torch.equal(read["sink_mass"].statistic, read["collision"].sink_mass)
    mask, n = read["entropy"].mask, read["entropy"].visible_keys - 1
    ratio = read["entropy"].routing / n.clamp_min(2).log()[..., None, None]
    torch.testing.assert_close(read["concentration"].routing[mask], 1 - ratio[mask], rtol=0, atol=1e-5)
    collision, maximum = read["collision"].routing[mask], read["maximum"].routing[mask]
    assert (maximum**2 <= collision + 1e-6).all() and (collision <= maximum + 1e-6).all()
    torch.testing.assert_close(read["attention"].routing[mask], maximum * n[mask][..., None, None])
    ids, _, _ = layout(6, 7, [0])
    with torch.no_grad():
        h = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, 4:-1]
    want = (h[1:] - h[:-1]).norm(dim=-1) / h[:-1].norm(dim=-1)
    torch.testing.assert_close(read["hidden_change"].statistic[0], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("micro_batch_size", "forwards"), [(None, 1), (1, 4), (3, 2), (9, 1)])
def test_one_forward_per_micro_batch(micro_batch_size, forwards, build):
    """With the plain forward and with a score of one's own alike."""
    model = build("llama")
    calls, seen = [], []
    handle = model.model.register_forward_hook(lambda m, args, output: calls.append(output[0].shape[0]))
    rows = layout(6, 7)

    def score(model, input_ids, attention_mask, completion_length):
        seen.append(input_ids.shape[0])
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask)[0]  # as a fused head does
        logits = model.lm_head(hidden[:, -completion_length - 1 : -1])
        return token_scores(logits, input_ids[:, -completion_length:])

    plain = read_computation(model, *rows, micro_batch_size=micro_batch_size)
    assert len(calls) == forwards and sum(calls) == 4
    own = read_computation(model, *rows, micro_batch_size=micro_batch_size, score=score)
    assert len(calls) == 2 * forwards and seen == calls[forwards:]
    handle.remove()
    for row, tokens in enumerate(RESPONSES):
        assert_equal_computation(own, plain, tokens, row, row)


def test_the_model_gets_each_module_s_mode_back_even_after_an_error(build):
    model = build("gpt2", resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    first, second = (read_computation(model, *layout(6, 7)) for _ in range(2))
    assert torch.equal(first.logps, second.logps)
    assert [m.training for m in model.modules()] == modes

    def score(*args):
        assert not model.training
        raise RuntimeError("in score")

    with pytest.raises(RuntimeError, match="in score"):
        read_computation(model, *layout(6, 7), score=score)
    assert [m.training for m in model.modules()] == modes


def test_peft_models_are_read(build):
    from peft import LoraConfig, get_peft_model

    model = build("llama")
    want = read_computation(model, *layout(6, 7), layers="all")
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    got = read_computation(peft, *layout(6, 7), layers="all")
    for name in TENSORS:
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_models_without_readable_attention_give_the_rest(build):
    model = build("mamba", "eager")
    with pytest.raises(UnreadableModelError, match=r"no softmax attention.*layers=\(\)"):
        read_computation(model, *layout(6, 7))
    for options in ({}, {"statistic": PEAK}, {"statistic": "output_entropy", "routed_width": 2}):
        with pytest.raises(ConfigError, match="needs attention"):
            read_computation(model, *layout(6, 7), layers=(), **options)
    read = read_computation(model, *layout(6, 7), layers=(), statistic="output_entropy")
    assert torch.equal(read.statistic, read.entropies)
    assert read.routing.shape == read.routed.shape == (4, 7, 0, 0)
    assert read.visible_keys[1].tolist() == [3, 4, 5, 6, 0, 0, 0] and read.hidden.shape == (4, 7, 32)


@pytest.mark.parametrize("statistic", ROUTER_STATISTICS)
def test_statistics_of_routers_stand_beside_the_attention(statistic, build):
    model = build("qwen3_moe", num_hidden_layers=3)
    assert require_readable(model.config, routers=True) == (2,) and require_readable(model, layers="all") == (0, 1, 2)
    ids, mask, tokens = layout(6, 7, [0])
    read = read_computation(model, ids, mask, tokens, statistic=statistic, layers=(0, 1), routed_width=2)
    with torch.no_grad(), ComputationReader(model, statistics=(statistic,), layers=(0, 1)) as reader:
        model(input_ids=ids)
    torch.testing.assert_close(read.statistic, reader.summary(statistic)[:, 5:-1])
    attention = read_computation(model, ids, mask, tokens, layers=(0, 1), routed_width=2)
    for name in set(TENSORS) - {"statistic"}:
        assert torch.equal(getattr(read, name), getattr(attention, name)), name
    assert read.layers == (0, 1) and read.statistic.std() > 0
    elsewhere = read_computation(model, ids, mask, tokens, statistic=statistic, layers=(), router_layers=(0, 1))
    assert torch.equal(elsewhere.statistic, read.statistic) and elsewhere.layers == ()
    other = read_computation(model, ids, mask, tokens, statistic=statistic, layers=(0, 1), router_layers="middle")
    assert torch.equal(other.routing, read.routing) and not torch.equal(other.statistic, read.statistic)


def test_routers_without_readable_attention(build):
    """Names of layers mean what can be read; numbers mean these layers."""
    model = build("jamba", **NO_ATTENTION)
    read = read_computation(model, *layout(6, 7, [0]), statistic="router_entropy")
    assert read.routing.shape == (1, 7, 0, 0) and (read.statistic > 0).all()
    numbered = read_computation(model, *layout(6, 7, [0]), statistic="router_entropy", layers=(), router_layers=(1,))
    assert torch.equal(numbered.statistic, read.statistic)
    assert require_readable(model.config, layers="all", routers=True) == (1,)
    for options in ({"layers": (1,)}, {"routed_width": 2}):
        with pytest.raises(UnreadableModelError, match="no softmax attention"):
            read_computation(model, *layout(6, 7, [0]), statistic="router_entropy", **options)


def test_routed_summaries_are_those_of_the_reader(build):
    model = build("llama", num_hidden_layers=3)
    ids, mask, tokens = layout(6, 7, [0])
    read = read_computation(model, ids, mask, tokens, layers="all", routed_width=5)
    with torch.no_grad(), ComputationReader(model, layers="all", routed_width=5) as reader:
        model(input_ids=ids)
    torch.testing.assert_close(read.routed, reader.routed()[:, 5:-1])
    assert read.routed.shape == (1, 7, 3, 5) and read.routed.std() > 0
    assert read_computation(model, ids, mask, tokens, layers="all").routed.shape == (1, 7, 3, 0)


def test_the_vocabulary_s_width_is_paid_for_a_few_tokens_at_a_time(build, monkeypatch):
    """Only the response's logits are made, and their float32 copies in chunks."""
    widths, chunks = [], []
    model = build("llama")
    model.lm_head.register_forward_pre_hook(lambda m, args: widths.append(args[0].shape[1]))
    log_softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: chunks.append(x.shape[1]) or log_softmax(x, dim))
    monkeypatch.setattr("comppo.computation.scoring.TOKENS_AT_ONCE", 3)
    read = read_computation(model, *layout(6, 7))
    assert widths == [8] and chunks == [3, 3, 1]
    want = score_plainly(model, *layout(6, 7))[0]
    assert torch.equal(read.logps, torch.where(read.mask, want, 0.0))


def test_tokens_ruled_out_entirely_have_no_entropy():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]])
    logps, entropies = token_scores(logits, torch.tensor([[1]]))
    torch.testing.assert_close(logps, torch.full((1, 1), 0.5).log())
    torch.testing.assert_close(entropies, torch.full((1, 1), 2.0).log())


def test_misuse_says_what_to_do(build):
    model = build("llama")
    ids, mask, tokens = layout(6, 7)

    def twice(*given):
        return (score_plainly(*given), score_plainly(*given))[0]

    gap = mask.clone()
    gap[0, 3] = 0
    promptless = mask.clone()
    promptless[1, :6] = 0
    for error, match, changes in (
        (ConfigError, "collision, effective_keys, entropy", {"statistic": "colision"}),
        (ConfigError, r"needs routers.*router_layers", {"statistic": "router_entropy", "layers": ()}),
        (UnreadableModelError, "LlamaDecoderLayer has no experts", {"statistic": "router_entropy"}),
        (ConfigError, "not finite", {"statistic": AttentionStatistic("own", lambda rows: rows.maximum / 0)}),
        (ConfigError, "statistic 'own' gave", {"statistic": AttentionStatistic("own", lambda rows: rows.maximum[0])}),
        (ConfigError, "temperature", {"temperature": 0.0}),
        (ConfigError, "micro_batch_size", {"micro_batch_size": 0}),
        (ConfigError, r"return a tensor of shape \(4, 7\)", {"statistic": lambda c: c.routing}),
        (ConfigError, "not finite", {"statistic": lambda c: c.logps / 0}),
        (ConfigError, "hidden_layers", {"statistic": "hidden_change", "hidden_layers": ()}),
        (EvidenceError, r"rows \[0\] have padding between", {"attention_mask": gap}),
        (EvidenceError, r"rows \[1\] have a response without", {"attention_mask": promptless}),
        (EvidenceError, "completion_length=13", {"completion_length": 13}),
        (EvidenceError, "nothing was read", {"score": lambda *a: (torch.zeros(4, 7), torch.zeros(4, 7))}),
        (EvidenceError, "8 rows went through", {"score": twice}),
        (EvidenceError, r"score gave logps", {"score": lambda *a: tuple(s[:, 1:] for s in score_plainly(*a))}),
    ):
        arguments = {"input_ids": ids, "attention_mask": mask, "completion_length": tokens, "statistic": "collision"}
        with pytest.raises(error, match=match):
            read_computation(model, **(arguments | changes))


@pytest.mark.parametrize("lora", [False, True])
def test_trl_s_fused_head_as_the_score(lora, build):
    """Its output has neither logits nor hidden states, and under PEFT the model's own `__call__` may be passed by."""
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    model = build("llama")
    want = read_computation(model, *layout(6, 7))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))

    def score(model, input_ids, attention_mask, completion_length):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-completion_length] = -100
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -completion_length:], output.entropy[:, -completion_length:]

    got = read_computation(model, *layout(6, 7), micro_batch_size=2, score=score)
    for row, tokens in enumerate(RESPONSES):
        assert_equal_computation(got, want, tokens, row, row)


def test_the_first_position_of_a_sequence_has_no_change(build):
    """A prompt of one token, alone and behind padding: nothing stands before the position that emits the response."""
    model = build("gpt2")
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    for start in (0, 1, 2):
        read = read_computation(
            model, ids[:, start:], (ids != 0)[:, start:], 2, statistic="hidden_change", layers="all"
        )
        assert read.statistic[0, 0] == 0 and read.statistic[0, 1] > 0
        assert (read.routing[0, 0] == 1).all() and (read.sink_mass[0, 0] - 1).abs() < 1e-6  # one key, the sink


def test_statistics_of_one_s_own_are_named_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "my_statistics.py").write_text(
        "from comppo.computation import AttentionStatistic\n"
        "peak = AttentionStatistic('peak', lambda rows: rows.rest_maximum * rows.rest_visible_keys)\n"
        "endless = AttentionStatistic('endless', lambda rows: 1 / rows.rest_collision)\n"
        "flat = AttentionStatistic('flat', lambda rows: rows.collision.mean(1))\n"
        "number = AttentionStatistic('number', lambda rows: 0.5)\n"
        "def surprise(computation):\n    return -computation.logps\n"
        "LIMIT = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert load_statistic("router_entropy") == "router_entropy"
    assert load_statistic("my_statistics:peak").name == "peak"
    assert load_statistic("my_statistics:surprise") is sys.modules["my_statistics"].surprise
    for spec, words in [
        ("colision", "is unknown: choose one of collision, .*, router_entropy, .*'module:attribute'"),
        ("my_statistics:", "is unknown"),
        ("no_such_module_here:x", "importing module 'no_such_module_here' failed"),
        ("my_statistics:peek", "has no 'peek'"),
        ("my_statistics:LIMIT", "is a int: name an AttentionStatistic"),
        ("my_statistics:endless", "not finite"),
        ("my_statistics:flat", r"gave \(1, 4\) for rows of shape \(1, 2, 4\)"),
        ("my_statistics:number", "gave float"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            load_statistic(spec, field="gate_statistic")
        assert str(caught.value).startswith(f"gate_statistic={spec!r}")
