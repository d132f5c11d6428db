"""What models outside the attention registry attend to is seen as they compute it, and nothing of them changes."""

import copy
import importlib
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comppo.computation.bypass import Bypass
from comppo.computation.bypass_kind import bypass_kind
from comppo.errors import ConfigError, UnreadableModelError

TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = TOKENS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
GPT_NEO = BASE | {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6}
MODELS = {
    "falcon": ("falcon", BASE | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, one key head": ("falcon", BASE),
    "falcon, all key heads": ("falcon", BASE | {"multi_query": False}),
    "falcon, alibi": ("falcon", BASE | {"alibi": True, "multi_query": False}),
    "falcon, new, alibi": ("falcon", BASE | {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neo": ("gpt_neo", GPT_NEO),
    "bloom": ("bloom", BASE | {"n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", TOKENS | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "xglm": ("xglm", BASE | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "gpt_neox_japanese": ("gpt_neox_japanese", BASE),
    "openai-gpt": ("openai-gpt", TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "big_bird": ("big_bird", BASE | {"is_decoder": True, "attention_type": "original_full"}),
    "megatron-bert": ("megatron-bert", BASE | {"is_decoder": True}),
    "rembert": ("rembert", BASE | {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32}),
    "roformer": ("roformer", BASE | {"is_decoder": True, "embedding_size": 32}),
    "trocr": ("trocr", TOKENS | DECODER | {"max_position_embeddings": 64}),
    "mvp": ("mvp", TOKENS | DECODER | {"max_position_embeddings": 64, "encoder_layers": 1}),
    "xlm": ("xlm", TOKENS | {"n_words": 96, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True}),
}
FALCON = [name for name in MODELS if name.startswith("falcon")]
ROTARY = [name for name in FALCON if "alibi" not in name]
MAIN = [*FALCON, "gpt_neo", "bloom", "mpt", "xglm"]
HIDDEN = -9e3  # OpenAI GPT hides keys by -1e4, every other model by the lowest number of its dtype
NO_CACHE = {"use_cache": False}  # MVP cannot make its own cache


class Seen:
    """Keeps what it is shown as scores, (rows, heads, queries, keys)."""

    def __init__(self):
        self.kinds, self.modules, self.scores = [], [], []

    def observe(self, implementation, module, query, key, mask, options):
        assert implementation == "sdpa" and not torch.is_grad_enabled() and not query.requires_grad
        assert key.shape[0] == query.shape[0]
        scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ key.transpose(-1, -2) * scale
        if mask is not None:
            assert mask.shape[2:] == scores.shape[2:]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if options["is_causal"]:
            assert scores.shape[2] == scores.shape[3] and mask is None
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        self._keep("sdpa", module, scores)

    def observe_scores(self, module, scores):
        assert not torch.is_grad_enabled() and not scores.requires_grad
        self._keep("softmax", module, scores.clone())

    def _keep(self, kind, module, scores):
        self.kinds.append(kind)
        self.modules.append(module)
        self.scores.append(scores)

    def probabilities(self):
        return [scores.float().softmax(-1) for scores in self.scores]


def build(name, implementation="eager", spread=0.16, **changes):
    """Always the same model of a configuration, with attention that is far from uniform."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(copy.deepcopy(settings) | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 if "embed" in parameter_name or "wte" in parameter_name else spread)
    return model.eval()


def attentions(model):
    """Its self-attention modules, in order."""
    named = model.named_modules()
    return [m for name, m in named if bypass_kind(type(m)) is not None and "encoder_attn" not in name]


def padded():
    """Unpadded, left-padded and right-padded row."""
    torch.manual_seed(1)
    ids = torch.randint(3, 95, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, -5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def at_tokens(matrix, mask):
    """Rows of a (rows, heads, queries, keys) matrix that belong to unpadded queries."""
    return matrix.transpose(1, 2)[mask.bool()]


# Faithful ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_scores_give_the_models_own_matrices(name):
    model, inputs, seen = build(name), padded(), Seen()
    with torch.no_grad(), Bypass(attentions(model), seen):
        expected = model(**inputs, **NO_CACHE, output_attentions=True).attentions
    assert seen.kinds == ["softmax"] * 2 and seen.modules == attentions(model)
    for got, matrix in zip(seen.probabilities(), expected, strict=True):
        torch.testing.assert_close(got, matrix, atol=2e-6, rtol=0)
        assert at_tokens(matrix, inputs["attention_mask"]).amax(-1).mean() > 0.25  # uniform attention has 0.21


@pytest.mark.parametrize("name", ROTARY)
def test_sdpa_inputs_give_the_eager_models_matrices(name):
    inputs, seen, model = padded(), Seen(), build(name, "sdpa")
    with torch.no_grad():
        expected = build(name, "eager")(**inputs, output_attentions=True).attentions
        with Bypass(attentions(model), seen):
            model(**inputs)
    assert seen.kinds == ["sdpa"] * 2
    for got, matrix in zip(seen.probabilities(), expected, strict=True):
        rows = (at_tokens(part, inputs["attention_mask"]) for part in (got, matrix))
        torch.testing.assert_close(*rows, atol=2e-6, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FALCON)
def test_what_is_shown_explains_falcons_outputs(name, implementation):
    """probabilities @ values is what reaches the output projection. (With ALiBi, Falcon's eager attention adds the bias
    twice and its sdpa once, so that neither is a reference for the other.)"""
    inputs, seen, model = padded(), Seen(), build(name, implementation)
    values, outputs = [], []
    for module in attentions(model):
        module.query_key_value.register_forward_hook(
            lambda _, args, out, m=module: values.append(m._split_heads(out)[2].transpose(1, 2))
        )
        module.dense.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with torch.no_grad(), Bypass(attentions(model), seen):
        model(**inputs)
    tokens = inputs["attention_mask"].bool()
    for probabilities, value, output in zip(seen.probabilities(), values, outputs, strict=True):
        explained = (probabilities @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(explained[tokens], output[tokens], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "xlm"])  # XLM masks by lengths
def test_hidden_keys_have_lower_scores_than_any_visible_one(name):
    inputs, seen, model = padded(), Seen(), build(name)
    with torch.no_grad(), Bypass(attentions(model), seen):
        model(**inputs, **NO_CACHE)
    mask = inputs["attention_mask"].bool()
    position = torch.arange(20)
    for layer, scores in enumerate(seen.scores):
        visible = mask[:, None, None, :] & (position <= position[:, None])
        if name == "gpt_neo" and layer == 1:
            visible = visible & (position > position[:, None] - 6)
        expected = at_tokens(visible.expand(scores.shape), mask)
        got = at_tokens(scores, mask)
        assert torch.equal(got > HIDDEN, expected)
        assert got[expected].min() > -1000


@pytest.mark.parametrize("name", MAIN)
def test_half_precision_scores_are_those_of_the_softmax(name):
    inputs, seen, model = padded(), Seen(), build(name, spread=0.1).to(torch.bfloat16)
    with torch.no_grad(), Bypass(attentions(model), seen):
        expected = model(**inputs, output_attentions=True).attentions
    for got, matrix in zip(seen.probabilities(), expected, strict=True):
        torch.testing.assert_close(got, matrix.float(), atol=2**-9, rtol=2**-8)  # one rounding to 8 bits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_narrower_softmax_is_shown_its_own_input(implementation):
    """Falcon with ALiBi and eager attention adds up in float32, then rounds to its own dtype before the softmax."""
    inputs, seen, model = padded(), Seen(), build("falcon, alibi", implementation).to(torch.bfloat16)
    with torch.no_grad(), Bypass(attentions(model), seen):
        model(**inputs)
    assert {scores.dtype for scores in seen.scores} == {torch.bfloat16}


@pytest.mark.parametrize("name", MAIN)
def test_cached_steps_show_the_rows_of_one_forward(name):
    inputs, model = padded(), build(name, "sdpa" if name.startswith("falcon") else "eager")
    ids, mask = (values[:2] for values in inputs.values())
    whole, steps, cache = Seen(), Seen(), None
    ends = (0, 12, 18, 19, 20)
    positions = (mask.cumsum(-1) - 1).clamp_min(0) if name in FALCON else None
    with torch.no_grad():
        with Bypass(attentions(model), whole):
            model(ids, attention_mask=mask, **({} if positions is None else {"position_ids": positions}))
        with Bypass(attentions(model), steps):
            for start, stop in itertools.pairwise(ends):
                more = {"cache": cache, "use_cache": True}
                if positions is not None:
                    more["position_ids"] = positions[:, start:stop]
                cache = model(ids[:, start:stop], attention_mask=mask[:, :stop], **more).cache
    for index, (got, expected) in enumerate(
        (probabilities, whole.probabilities()[i % 2]) for i, probabilities in enumerate(steps.probabilities())
    ):
        start, stop = ends[index // 2 : index // 2 + 2]
        tokens = mask[:, start:stop]
        torch.testing.assert_close(
            at_tokens(got, tokens), at_tokens(expected[:, :, start:stop, :stop], tokens), atol=2e-6, rtol=0
        )


# Nothing changes --------------------------------------------------------------------------------------------------


def hooks(model):
    return [dict(h) for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]


def modes():
    return torch._C._len_torch_function_stack()


def stance():
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert modes() == 0 and stance() == "default"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MAIN)
def test_outputs_and_gradients_are_the_same_to_the_bit(name, implementation):
    if implementation == "sdpa" and name not in FALCON:
        pytest.skip("has eager attention only")
    inputs, seen = padded(), Seen()
    model = build(name, implementation, **({} if name == "mpt" else {"attention_dropout": 0.1})).train()
    for module in attentions(model):
        module.attn_dropout_p = 0.1  # of MPT, whose configuration takes no such number
    before = hooks(model)

    def run():
        model.zero_grad()
        torch.manual_seed(2)
        logits = model(**inputs).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = run()
    with Bypass(attentions(model), seen):
        watched = run()
    assert len(seen.kinds) == 2 and hooks(model) == before
    assert len(plain) == len(watched) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True)) and len(seen.kinds) == 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(context):
    model, inputs, seen = build("bloom"), padded(), Seen()
    plain = model(**inputs).logits
    with context(), Bypass(attentions(model), seen):
        assert torch.equal(model(**inputs).logits, plain)
    assert len(seen.kinds) == 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["falcon", "gpt_neo", "bloom"])
def test_checkpointed_layers_are_seen_once(name, reentrant):
    inputs, seen = padded(), Seen()
    model = build(name, "sdpa" if name == "falcon" else "eager").train()
    model(**inputs).logits.square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs = []
    attentions(model)[0].register_forward_hook(lambda *_: runs.append(torch._C._current_graph_task_id() != -1))
    with Bypass(attentions(model), seen):
        model(**inputs).logits.square().mean().backward()
    assert len(seen.kinds) == 2 and True in runs  # it did run again
    for got, expected in zip((p.grad for p in model.parameters()), plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_adapters_may_wrap_the_model():
    from peft import LoraConfig, get_peft_model

    inputs, bare, wrapped = padded(), Seen(), Seen()
    model = build("bloom")
    with torch.no_grad(), Bypass(attentions(model), bare):
        model(**inputs)
    model = get_peft_model(model, LoraConfig(target_modules=["query_key_value"], task_type="CAUSAL_LM"))
    with torch.no_grad(), Bypass(attentions(model), wrapped):
        model(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(bare.scores, wrapped.scores, strict=True))


def test_only_the_chosen_modules_are_seen():
    inputs, seen, model, reference = padded(), Seen(), build("bloom"), build("bloom")
    second = attentions(model)[1]
    with torch.no_grad(), Bypass([second], seen):
        model(**inputs)
        reference(**inputs)
        torch.randn(3, 4, 20, 20).softmax(-1)
    assert seen.modules == [second]


def test_contexts_may_overlap_and_end_in_any_order():
    inputs, model = padded(), build("gpt_neo")
    before, modules = hooks(model), attentions(model)
    first, second = Seen(), Seen()
    a, b = Bypass(modules, first), Bypass(modules, second)
    with torch.no_grad():
        a.__enter__()
        model(**inputs)
        b.__enter__()
        model(**inputs)
        a.__exit__(None, None, None)
        assert stance() == "force_eager"
        model(**inputs)
        b.__exit__(None, None, None)
        model(**inputs)
    assert hooks(model) == before and len(first.kinds) == len(second.kinds) == 4
    assert all(torch.equal(x, y) for x, y in zip(first.scores[2:], second.scores[:2], strict=True))


class Busy(Seen):
    """Takes softmaxes of its own."""

    def observe_scores(self, module, scores):
        super().observe_scores(module, scores.softmax(-1))


def test_what_an_observer_computes_is_nobodys_attention():
    inputs, model, seen, busy = padded(), build("bloom"), Seen(), Busy()
    modules = attentions(model)
    with torch.no_grad(), Bypass(modules, seen), Bypass(modules, busy), Bypass(modules, busy):
        model(**inputs)
    assert len(seen.kinds) == 2 and len(busy.kinds) == 4


def test_threads_see_their_own_models():
    inputs, models = padded(), [build("bloom"), build("falcon", "sdpa")]
    seen = [Seen() for _ in models]

    def run(model, observer):
        for _ in range(5):
            with Bypass(attentions(model), observer):
                model(**inputs)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(models, seen, strict=True)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        torch.randn(3, 4, 20, 20).softmax(-1)
    for model, observer in zip(models, seen, strict=True):
        assert observer.modules == attentions(model) * 5


class Failing(Seen):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def observe_scores(self, module, scores):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_an_error_leaves_everything_as_it_was(error):
    inputs, model = padded(), build("bloom")
    before = hooks(model)
    with torch.no_grad(), pytest.raises(type(error)), Bypass(attentions(model), Failing(error)):
        model(**inputs)
    assert hooks(model) == before and modes() == 0


def test_an_interrupt_that_is_swallowed_inside():
    inputs, model, seen = padded(), build("bloom"), Seen()
    with torch.no_grad(), Bypass(attentions(model), seen):
        handle = attentions(model)[0].dense.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        handle.remove()
        model(**inputs)
        assert modes() == 0
    assert len(seen.kinds) == 3


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_error_of_the_model_is_the_one_that_is_raised(recwarn):
    model, seen = build("bloom"), Seen()
    attentions(model)[1].query_key_value = nn.Linear(3, 3)
    with torch.no_grad(), Bypass(attentions(model), seen):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(**padded())
        assert modes() == 0 and not [w for w in recwarn if "always_call" in str(w.message)]


def test_copies_made_inside_are_not_seen_after():
    inputs, model, seen = padded(), build("bloom"), Seen()
    with torch.no_grad():
        with Bypass(attentions(model), seen):
            twin = copy.deepcopy(model)
        assert torch.equal(twin(**inputs).logits, model(**inputs).logits)
    assert not seen.kinds


# Compiled code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_run_uncompiled_while_they_are_read(warm, in_place):
    torch._dynamo.reset()
    inputs, model, seen, runs = padded(), build("bloom"), Seen(), []

    def backend(graph, example_inputs):
        def call(*args):
            runs.append(1)
            return graph(*args)

        return call

    compiled = model if in_place else torch.compile(model, backend=backend)
    with torch.no_grad():
        plain = model(**inputs, **NO_CACHE).logits
        if in_place:
            model.compile(backend=backend)
        if warm:
            compiled(**inputs, **NO_CACHE)
            assert runs
        for reading in (1, 2):
            before = len(runs)
            with Bypass(attentions(model), seen):
                assert torch.equal(compiled(**inputs, **NO_CACHE).logits, plain)
            assert len(seen.kinds) == 2 * reading and len(runs) == before
            compiled(**inputs, **NO_CACHE)
            assert len(runs) > before and len(seen.kinds) == 2 * reading
    torch._dynamo.reset()


# What can be read -------------------------------------------------------------------------------------------------

KINDS = {
    "falcon.FalconAttention": "sdpa",
    "falcon.FalconFlashAttention2": None,  # a kernel
    "falcon.FalconDecoderLayer": None,
    "gpt_neo.GPTNeoSelfAttention": "softmax",
    "gpt_neo.GPTNeoAttention": None,  # holds the one above
    "gpt_neo.GPTNeoFlashAttention2": None,
    "bloom.BloomAttention": "softmax",
    "mpt.MptAttention": "softmax",
    "xglm.XGLMAttention": "softmax",
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": "softmax",
    "cpmant.CpmAntAttention": "softmax",
    "git.GitSelfAttention": "softmax",
    "llama.LlamaAttention": None,  # through the registry
    "codegen.CodeGenAttention": None,
    "diffllama.DiffLlamaAttention": None,
    "gpt2.GPT2Attention": None,
    "minimax.MiniMaxLightningAttention": None,  # linear
    "rwkv.RwkvSelfAttention": None,
    "mamba.MambaMixer": None,
    "kimi_linear.KimiLinearDeltaAttention": None,
    "big_bird.BigBirdBlockSparseAttention": None,  # several softmaxes
    "prophetnet.ProphetNetNgramSelfAttention": None,
    "xlnet.XLNetRelativeAttention": None,
    "reformer.LSHSelfAttention": None,
    "mixtral.MixtralTopKRouter": None,  # no attention
    "doge.DogeCDMoE": None,
    "deepseek_v4.DeepseekV4HCACompressor": None,
    "slanet.SLANetAttentionGRUCell": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_known_from_the_class(name):
    family, cls = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert bypass_kind(getattr(module, cls)) == KINDS[name]


class Attention(nn.Module):
    """Multi-head attention over (rows, queries, 8) inputs; subclasses change how."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.router = nn.Linear(8, 6)

    def split(self, hidden):
        return (hidden.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for _ in range(3))

    def scores(self, hidden):
        query, key, _ = self.split(hidden)
        return query @ key.transpose(-1, -2)


class RoutedAttention(Attention):
    def gate(self, hidden):
        return torch.sigmoid(self.router(hidden)).max(-1, keepdim=True).values

    def forward(self, hidden):
        query, key, value = self.split(hidden)
        for block in (query, key):
            assert block.ndim == 4
        if hidden.shape[1] == 0:
            return hidden
        if hidden.requires_grad:
            weights = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        else:
            weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2) * self.gate(hidden)


class TwoSoftmaxAttention(Attention):
    def forward(self, hidden):
        query, key, value = self.split(hidden)
        weights = self.scores(hidden).softmax(-1)
        weights = weights - 0.5 * torch.softmax(query @ key.transpose(-1, -2), -1)
        return (weights @ value).transpose(1, 2).flatten(2)


class LoopedAttention(Attention):
    def forward(self, hidden):
        query, key, value = self.split(hidden)
        heads = [F.softmax(query[:, h] @ key[:, h].mT, dim=-1) @ value[:, h] for h in range(self.num_heads)]
        return torch.cat(heads, -1)


class ConditionalAttention(Attention):
    def forward(self, hidden):
        query, key, value = self.split(hidden)

        def attend(scores):
            return F.softmax(scores, dim=-1) if scores.ndim == 3 else scores.softmax(-1)

        return (attend(query @ key.transpose(-1, -2)) @ value).transpose(1, 2).flatten(2)


class ElementwiseAttention(Attention):
    def forward(self, hidden):
        query, key, value = self.split(hidden)
        return ((query * key).softmax(-1) * value).transpose(1, 2).flatten(2)


class LinearAttention(Attention):
    def forward(self, hidden):
        query, key, value = self.split(hidden)
        return (F.elu(query) @ (F.elu(key).mT @ value)).transpose(1, 2).flatten(2)


class CrossAttention(RoutedAttention):
    pass


class InheritingAttention(RoutedAttention):
    def forward(self, hidden):
        return super().forward(hidden)


class Router(RoutedAttention):
    pass


def test_kinds_of_classes_beyond_transformers():
    for cls in (RoutedAttention, InheritingAttention, ConditionalAttention):
        assert bypass_kind(cls) == "softmax"
    for cls in (TwoSoftmaxAttention, LoopedAttention, ElementwiseAttention, LinearAttention, CrossAttention, Router):
        assert bypass_kind(cls) is None
    assert bypass_kind(Attention) is None and bypass_kind(nn.Linear) is None


def test_kind_without_source_is_unknown():
    scope = {"nn": nn}
    exec(
        "class BareAttention(nn.Module):\n    def forward(self, q, k, v):\n        return (q @ k).softmax(-1) @ v",
        scope,
    )
    assert bypass_kind(scope["BareAttention"]) is None


class FlatAttention(Attention):
    """Flattens heads into rows, and has a softmax beside its attention that only a run can tell from it."""

    def mixture(self, hidden):
        return getattr(torch, "soft" + "max")(self.router(hidden), -1)

    def forward(self, hidden):
        query, key, value = (part.flatten(0, 1) for part in self.split(hidden))
        weights = F.softmax(torch.bmm(query, key.mT), dim=-1)
        mixed = torch.bmm(weights, value).unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2)
        return mixed * self.mixture(hidden).amax(-1, keepdim=True)


def hook_with_a_softmax(module, args, output):
    torch.randn(3, 2, 5, 5).softmax(-1)


@pytest.mark.parametrize("cls", [RoutedAttention, InheritingAttention, ConditionalAttention, FlatAttention])
def test_other_softmaxes_of_the_module_are_passed_over(cls):
    torch.manual_seed(0)
    module, hidden, seen = cls(), torch.randn(3, 5, 8), Seen()
    module.register_forward_hook(hook_with_a_softmax)
    with Bypass([module], seen):
        module(hidden)
        module(hidden=hidden.requires_grad_())
    for scores in seen.scores:
        torch.testing.assert_close(scores, module.scores(hidden).detach())
    assert len(seen.scores) == 2


class DisguisedAttention(Attention):
    """Does something else than its code says."""

    def __init__(self, softmax):
        super().__init__()
        self.softmax = softmax

    def forward(self, hidden, key_value_states=None):
        query, key, value = self.split(hidden)
        return self.softmax(query @ key.transpose(-1, -2)) @ value


@pytest.mark.parametrize(
    ("softmax", "message"),
    [
        (lambda s: s.softmax(-1).softmax(-1), "attended twice in one forward"),
        (lambda s: s.exp(), r"without a softmax over the keys of \(3, 5, 8\) inputs; it took softmaxes of nothing"),
        (lambda s: s.softmax(-2), r"softmaxes of \[\(3, 2, 5, 5\)\]"),
        (lambda s: s.flatten(0, 2).softmax(-1).view_as(s), r"softmaxes of \[\(30, 5\)\]"),
        (lambda s: s[:, :, :1].softmax(-1) + s, r"softmaxes of \[\(3, 2, 1, 5\)\]"),
        (lambda s: F.pad(s[:, :, :3].softmax(-1), (0, 0, 0, 2)), r"softmaxes of \[\(3, 2, 3, 5\)\]"),
        (lambda s: F.pad(s[..., :4].softmax(-1), (0, 1)), r"softmaxes of \[\(3, 2, 5, 4\)\]"),
    ],
)
def test_modules_that_do_not_keep_their_word_are_refused(softmax, message):
    module, seen = DisguisedAttention(softmax), Seen()
    assert bypass_kind(DisguisedAttention) == "softmax"
    with pytest.raises(UnreadableModelError, match=message), Bypass([module], seen):
        module(torch.randn(3, 5, 8))
    assert modes() == 0


def test_attention_to_another_sequence_is_refused():
    module = DisguisedAttention(nn.Softmax(dim=-1))
    hidden = torch.randn(3, 5, 8)
    with Bypass([module], Seen()), pytest.raises(UnreadableModelError, match="another sequence"):
        module(hidden, hidden)


def test_unreadable_modules_are_refused_at_once():
    with pytest.raises(UnreadableModelError, match=r"LinearAttention, TwoSoftmaxAttention cannot be read.*`layers`"):
        Bypass([RoutedAttention(), LinearAttention(), TwoSoftmaxAttention()], Seen())


def test_a_context_is_entered_once_at_a_time():
    context = Bypass([RoutedAttention()], Seen())
    with context, pytest.raises(ConfigError, match="open already"):
        context.__enter__()
    with context:
        pass


class SdpaAttention(Attention):
    """Given queries, keys and values, as inner modules of some models are."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **self.options)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ((3, 4, 5, 8), {}),
        ((3, 4, 9, 8), {"is_causal": True}),  # aligned at the first key
        ((3, 4, 9, 8), {"attn_mask": torch.rand(5, 9) > 0.3}),
        ((3, 4, 9, 8), {"attn_mask": torch.randn(4, 1, 9), "scale": 0.7}),
        ((3, 4, 9, 8), {"attn_mask": torch.randn(3, 1, 1, 9)}),
        ((3, 2, 9, 8), {"enable_gqa": True}),
        ((1, 1, 9, 8), {}),
    ],
)
def test_every_form_of_sdpa_arguments(keys, options):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 5, 8), torch.randn(keys), torch.randn(keys)
    module, seen = SdpaAttention(**options), Seen()
    with Bypass([module], seen):
        got = module(query, key, value)
    (probabilities,) = seen.probabilities()
    value = value.repeat_interleave(4 // value.shape[1], 1)[..., : probabilities.shape[-1], :]
    torch.testing.assert_close(probabilities @ value, got, atol=1e-6, rtol=1e-5)


def test_a_causal_step_sees_the_first_key_as_torch_has_it():
    module, seen = SdpaAttention(is_causal=True), Seen()
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    with Bypass([module], seen):
        assert torch.equal(module(query, key, key), key[:, :, :1])
    assert seen.scores[0].shape == (1, 2, 1, 1)
