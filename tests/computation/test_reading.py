"""`read_computation`: alignment, padding, one forward per micro-batch, scores, statistics by name."""

import pytest
import torch

from comppo.computation import STATISTICS, ComputationReader, read_computation, score_plainly, token_scores
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

TENSORS = ("statistic", "routing", "sink_mass", "visible_keys", "hidden", "logps", "entropies")
PROMPTS, RESPONSES = (6, 3, 4, 6), (7, 4, 7, 1)


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


@pytest.mark.parametrize("statistic", [*STATISTICS, "callable"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_padding_moves_nothing(name, statistic, build):
    """Each row alone and unpadded against padded batches; GPT-2 has learned positions, Mistral a window."""
    model = build(name)
    chosen = (lambda c: c.entropies * c.sink_mass) if statistic == "callable" else statistic
    options = {"statistic": chosen, "layers": "all", "hidden_layers": (1, -1)}
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
    read = read_computation(model, ids, mask, tokens, layers="all", heads=(0, 3))
    with torch.no_grad(), ComputationReader(model, layers="all") as reader:
        model(input_ids=ids)
    assert read.layers == (0, 1, 2) and read.routing.shape == (1, 7, 3, 2)
    torch.testing.assert_close(read.routing, reader.statistic("collision")[:, 5:-1][..., [0, 3]])
    torch.testing.assert_close(read.statistic, read.routing.mean((2, 3)))
    assert read.visible_keys[0].tolist() == [6, 7, 8, 9, 10, 11, 12]


def test_named_statistics_by_their_definitions(build):
    model = build("llama")
    rows = layout(6, 7)
    read = {name: read_computation(model, *rows, statistic=name, layers="all") for name in STATISTICS}
    assert torch.equal(read["output_entropy"].statistic, read["collision"].entropies)
    assert torch.equal(read["output_entropy"].routing, read["collision"].routing)
    assert torch.equal(read["sink_mass"].statistic, read["collision"].sink_mass)
    mask, n = read["entropy"].mask, read["entropy"].visible_keys - 1
    ratio = read["entropy"].routing / n.clamp_min(2).log()[..., None, None]
    torch.testing.assert_close(read["concentration"].routing[mask], 1 - ratio[mask], rtol=0, atol=1e-5)
    collision, maximum = read["collision"].routing[mask], read["maximum"].routing[mask]
    assert (maximum**2 <= collision + 1e-6).all() and (collision <= maximum + 1e-6).all()
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
    model = build("falcon")
    with pytest.raises(UnreadableModelError, match=r"FalconAttention.*layers=\(\)"):
        read_computation(model, *layout(6, 7))
    with pytest.raises(ConfigError, match="needs attention"):
        read_computation(model, *layout(6, 7), layers=())
    read = read_computation(model, *layout(6, 7), layers=(), statistic="output_entropy")
    assert torch.equal(read.statistic, read.entropies) and read.routing.shape == (4, 7, 0, 0)
    assert read.visible_keys[1].tolist() == [3, 4, 5, 6, 0, 0, 0] and read.hidden.shape == (4, 7, 32)


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
    gap = mask.clone()
    gap[0, 3] = 0
    promptless = mask.clone()
    promptless[1, :6] = 0
    for error, match, changes in (
        (ConfigError, "collision, effective_keys, entropy", {"statistic": "colision"}),
        (ConfigError, "temperature", {"temperature": 0.0}),
        (ConfigError, "micro_batch_size", {"micro_batch_size": 0}),
        (ConfigError, r"return a tensor of shape \(4, 7\)", {"statistic": lambda c: c.routing}),
        (ConfigError, "not finite", {"statistic": lambda c: c.logps / 0}),
        (ConfigError, "hidden_layers", {"statistic": "hidden_change", "hidden_layers": ()}),
        (EvidenceError, r"rows \[0\] have padding between", {"attention_mask": gap}),
        (EvidenceError, r"rows \[1\] have a response without", {"attention_mask": promptless}),
        (EvidenceError, "completion_length=13", {"completion_length": 13}),
        (EvidenceError, "nothing was read", {"score": lambda *a: (torch.zeros(4, 7), torch.zeros(4, 7))}),
        (EvidenceError, "8 rows went through", {"score": lambda *a: (score_plainly(*a), score_plainly(*a))[0]}),
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
        assert (read.routing[0, 0] == 0).all() and (read.sink_mass[0, 0] - 1).abs() < 1e-6
