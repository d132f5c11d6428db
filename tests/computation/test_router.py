"""Distributions of routers over experts, of tiny random models of every family that is read."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comppo.computation.router import (
    _KNOWN,
    _REFUSED,
    ROUTER_STATISTICS,
    Router,
    RouterHook,
    find_routers,
    why_no_router,
)
from comppo.errors import ConfigError, UnreadableModelError

ENTROPY, MASS = ROUTER_STATISTICS["router_entropy"], ROUTER_STATISTICS["router_top_k_mass"]

# Tiny models: each entry is what its configuration has beyond BASE, written from the configuration classes. ---------

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1}  # three experts in each group, two groups, one of them used
DENSE_FIRST = {"first_k_dense_replace": 1}
SPARSE_SECOND = {"mlp_layer_types": ["dense", "sparse"]}
DEEPSEEK = GROUPS | DENSE_FIRST | {"num_key_value_heads": 4}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
INDEXER = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
SHARED = {"shared_expert_intermediate_size": 16}
LINEAR = {f"linear_{what}": 4 if "num" in what else 8 for what in ("num_value_heads", "num_key_heads")} | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

SOFTMAX = {
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2},
    "cohere2_moe": HEAD | {"expert_selection_fn": "softmax"},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": DEEPSEEK | SPARSE_SECOND | {"topk_method": "greedy"},
    "deepseek_v2": LATENT | DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": [16, 16],
        "moe_layer_start_index": 1,
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]},
    },
    "flex_olmo": {},
    "gemma4_text": HEAD | {"enable_moe_block": True, "top_k_experts": 2, "sliding_window": 8, "global_head_dim": 8},
    "gpt_oss": HEAD | {"sliding_window": 6},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {
        "layer_types": ["attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": HEAD | {"moe_topk": [2, 3]},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"kv_channels": 8},
    "lara_mini": HEAD,
    "longcat_flash": LATENT
    | HEAD
    | {"num_layers": 2, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48}
    | {"num_key_value_heads": 4},
    "mellum": HEAD,
    "minimax": HEAD | {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    "mistral4": LATENT | DEEPSEEK,
    "mistral_large4_text": LATENT | DEEPSEEK,
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": SHARED,
    "qwen3_5_moe_text": HEAD | SHARED | LINEAR,
    "qwen3_moe": HEAD,
    "qwen3_next": HEAD | SHARED | LINEAR,
    "qwen3_omni_moe_text": HEAD,
    "qwen3_vl_moe_text": HEAD,
    "qwen4_exp_text": HEAD
    | SHARED
    | LINEAR
    | {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_budget": 16, "indexer_compress_ratio": 4},
    "unlimited_ocr_text": DEEPSEEK | {"topk_method": "greedy"},
    "zaya": HEAD | {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
SIGMOID = {
    "afmoe": HEAD | {"num_dense_layers": 1, "global_attn_every_n_layers": 2, "sliding_window": 8},
    "axk1": LATENT | DEEPSEEK,
    "axk2": LATENT | DEEPSEEK,
    "bailing_hybrid": HEAD | DEEPSEEK,
    "beam": HEAD | GROUPS | SPARSE_SECOND,
    "cohere2_moe": HEAD | {"expert_selection_fn": "sigmoid"},
    "deepseek_v3": LATENT | DEEPSEEK,
    "deepseek_v32": LATENT | DEEPSEEK | INDEXER,
    "dots1": HEAD | DEEPSEEK | {"n_shared_experts": 1},
    "dots3_note_text": HEAD | DEEPSEEK,
    "exaone_moe": HEAD | DEEPSEEK | {"sliding_window": 8},
    "flint": HEAD | SHARED | {"mlp_only_layers": [0], "layer_types": ["full_attention"] * 2},
    "glm4_moe": HEAD | DEEPSEEK,
    "glm4_moe_lite": LATENT | DEEPSEEK,
    "glm4v_moe_text": HEAD
    | DEEPSEEK
    | {
        "n_shared_experts": 1,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
    },
    "glm5_next_text": LATENT
    | DEEPSEEK
    | SPARSE_SECOND
    | {"qk_rope_head_dim": 0, "layer_types": ["linear_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "glm_moe_dsa": LATENT | DEEPSEEK | INDEXER | SPARSE_SECOND,
    "hy_v3": HEAD | DENSE_FIRST,
    "hy_v4": HEAD | DEEPSEEK,
    "hy_v4_vl_text": HEAD | DEEPSEEK,
    "inkling2_text": HEAD,
    "inkling_text": HEAD | {"n_shared_experts": 2},
    "kimi_linear": LATENT | DEEPSEEK,
    "kolibri1": HEAD,
    "laguna": HEAD | {"moe_router_logit_softcapping": 2.0},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "llama4_text": HEAD | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "interleave_moe_layer_step": 2},
    "mimo_v2_flash": HEAD | GROUPS | {"sliding_window": 8},
    "minimax_m2": HEAD,
    "minimax_m3_vl_text": HEAD,
    "muse_spark_text": HEAD,
    "nemotron_h": HEAD
    | GROUPS
    | {"layers_block_type": ["moe", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
    "solar_open": HEAD | DEEPSEEK,
    "step3p5": HEAD | SPARSE_SECOND | {"moe_num_experts": 6, "moe_top_k": 2, "sliding_window": 8},
}
SQRTSOFTPLUS = {
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "inkling2_text": HEAD | {"scoring_func": "sqrtsoftplus"},
}
SCORES = {
    "softmax": lambda logits: logits.exp(),
    "sigmoid": lambda logits: 1 / (1 + (-logits).exp()),
    "sqrtsoftplus": lambda logits: (1 + logits.exp()).log().sqrt(),
}
FAMILIES = [
    pytest.param(name, scoring, settings, id=f"{name}-{scoring}")
    for scoring, families in (("softmax", SOFTMAX), ("sigmoid", SIGMOID), ("sqrtsoftplus", SQRTSOFTPLUS))
    for name, settings in families.items()
]
# Text models that no auto class makes
CLASSES = {
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
    "unlimited_ocr_text": "UnlimitedOcrTextModel",
}


def make(name, settings, **options):
    """A model whose routers are far from uniform, and whose correction biases move their choice."""
    import transformers

    config = transformers.CONFIG_MAPPING[name](**(BASE | settings))
    torch.manual_seed(0)
    options = {"attn_implementation": "eager"} | options
    if name in CLASSES:
        module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
        model = getattr(module, CLASSES[name])._from_config(config, **options)
    else:
        causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        model = auto.from_config(config, **options)
    with torch.no_grad():
        for module in model.modules():
            if re.search("Router|Gating$|V1Gate$", type(module).__name__):
                for parameter in module.parameters():
                    parameter.normal_(std=0.4)
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search("correction_bias|expert_bias|balancing_biases", part):
                tensor.normal_(std=0.3)
    return model.eval()


def stack(model):
    """The decoder and its layers."""
    for module in model.modules():
        for name in ("layers", "blocks"):
            if isinstance(getattr(module, name, None), nn.ModuleList):
                return module, getattr(module, name)
    raise AssertionError(f"{type(model).__name__} has no layers")


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(3, 95, (2, 9))


def read(model, ids, **options):
    """Run the model; what the routers told, by layer, and the output."""
    got: dict[int, list[torch.Tensor]] = {}
    routers = find_routers(*stack(model))
    with RouterHook(routers, lambda layer, p: got.setdefault(layer, []).append(p)), torch.no_grad():
        output = model(input_ids=ids, use_cache=False, **options)
    assert all(len(parts) == 1 for parts in got.values())
    assert sorted(got) == sorted(routers)
    return {layer: got[layer][0] for layer in sorted(got)}, output, routers


# Against the models themselves -------------------------------------------------------------------------------------


def logits_by_hand(router, x):
    """Logits of every expert from a router's input and its parameters, in float64."""
    kind = type(router).__name__
    router = router.text_moe.gate if kind == "Ernie4_5_VLMoeMoeBlock" else router
    x = x.reshape(-1, x.shape[-1]).double()
    if kind == "Gemma4TextRouter":  # norm without scale, then its own two scales
        x = x * (x.pow(2).mean(-1, keepdim=True) + router.eps).rsqrt() * router.scale.double() * x.shape[-1] ** -0.5
    if kind == "ZayaRouter":  # of the first layer: no state of another router enters
        h = F.linear(x, router.down_proj.weight.double(), router.down_proj.bias.double())
        return router.router_mlp.double()(h)
    parts = [getattr(router, part) for part in ("gate", "classifier", "layer", "wg", "proj") if hasattr(router, part)]
    logits = x @ (parts[0] if parts else router).weight.double().T
    if kind == "GptOssTopKRouter":
        logits = logits + router.bias.double()
    if kind == "LagunaTopKRouter":
        logits = 2.0 * (logits / 2.0).tanh()
    if kind == "MuseSparkTopkRouter":
        logits = logits * router.output_multiplier
    if kind == "InklingTopkRouter":
        logits = logits[:, :6]  # the last two are shared experts
    return logits


@pytest.mark.parametrize(("name", "scoring", "settings"), FAMILIES)
def test_probabilities_are_those_of_the_router_recomputed_by_hand(name, scoring, settings, ids):
    """From the router's input and weights; and the model mixes its chosen experts in proportion to them."""
    model = make(name, settings)
    routers = find_routers(*stack(model))
    inputs, outputs = {}, {}
    for layer, router in routers.items():
        router.module.register_forward_pre_hook(lambda m, args, layer=layer: inputs.update({layer: args[0].clone()}))
        router.module.register_forward_hook(lambda m, args, out, layer=layer: outputs.update({layer: out}))
    got, _, _ = read(model, ids)
    assert got
    for layer, probabilities in got.items():
        assert probabilities.dtype == torch.float32
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(18), rtol=0, atol=1e-6)
        assert ENTROPY(probabilities, 2).std() > 0.005  # the weights of `make` leave nothing uniform
        if name != "zaya" or layer == 0:
            scores = SCORES[scoring](logits_by_hand(routers[layer].module, inputs[layer]))
            expected = scores / scores.sum(-1, keepdim=True)
            torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4, atol=1e-6)
        if name in ("phimoe", "llama4_text", "zaya", "dbrx", "jetmoe", "ernie4_5_vl_moe_text"):
            continue  # other weights, a single expert, or none among the outputs
        weights, chosen = outputs[layer][1:3]
        assert chosen.shape[-1] == routers[layer].top_k
        if name == "gemma4_text":
            weights = weights / routers[layer].module.per_expert_scale[chosen]
        mixed = probabilities.gather(-1, chosen)
        torch.testing.assert_close(
            weights / weights.sum(-1, keepdim=True), mixed / mixed.sum(-1, keepdim=True), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(("name", "scoring", "settings"), FAMILIES)
def test_probabilities_are_those_of_output_router_logits(name, scoring, settings, ids):
    """Transformers' own recorder, where the model has one, tells of the same layers in the same order."""
    model = make(name, settings)
    got, plain, _ = read(model, ids)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    logits = output.router_logits[1::2] if name == "jetmoe" else output.router_logits  # attention's experts come first
    assert len(got) == len(logits)
    for probabilities, recorded in zip(got.values(), logits, strict=True):
        scores = recorded.double() if name == "gemma4_text" else SCORES[scoring](recorded.double())
        torch.testing.assert_close(probabilities.double(), scores / scores.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)
    what = "logits" if "logits" in plain else "last_hidden_state"
    assert torch.equal(plain[what], output[what])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "gemma4_text", "llama4_text", "zaya"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_stay_the_same_to_the_bit(name, dtype, ids):
    model = make(name, (SOFTMAX | SIGMOID)[name], dtype=dtype)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    hooks = {id(m): dict(m._forward_hooks) for m in model.modules()}
    got, output, _ = read(model, ids)
    assert torch.equal(output.logits, plain)
    assert {id(m): dict(m._forward_hooks) for m in model.modules()} == hooks
    for probabilities in got.values():
        assert probabilities.dtype == torch.float32 and not probabilities.requires_grad
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(18), rtol=0, atol=1e-6)


def test_bfloat16_logits_are_scored_in_float32(ids):
    model = make("qwen3_moe", HEAD, dtype=torch.bfloat16)
    got, _, _ = read(model, ids)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    assert logits[0].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].double(), logits[0].double().softmax(-1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_read_once_and_gradients_stay_the_same(reentrant, ids):
    def gradients(model):
        model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients(make("qwen3_moe", HEAD))
    model = make("qwen3_moe", HEAD)
    layers = []
    with RouterHook(find_routers(*stack(model)), lambda layer, p: layers.append(layer)):
        hooked = gradients(model)
    assert layers == [0, 1]
    assert plain.keys() == hooked.keys() and any("gate.weight" in name for name in plain)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


def test_the_model_is_left_as_it_was_after_an_exception(ids):
    model = make("mixtral", {})
    routers = find_routers(*stack(model))
    before = [len(r.module._forward_hooks) for r in routers.values()]

    def fail(layer, probabilities):
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"), RouterHook(routers, fail):
        model(input_ids=ids)
    assert [len(r.module._forward_hooks) for r in routers.values()] == before
    hook = RouterHook(routers, fail)
    with pytest.raises(ConfigError, match="in use already"), hook, hook:
        pass
    assert [len(r.module._forward_hooks) for r in routers.values()] == before


def test_a_router_trained_by_peft_is_read_as_it_runs(ids):
    """PEFT runs a copy of the router instead of the router, and the hook follows."""
    from peft import LoraConfig, get_peft_model

    model = make("qwen3_moe", HEAD)
    before, _, _ = read(model, ids)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])).eval()
    copies = [p for name, p in peft.named_parameters() if "gate.modules_to_save" in name]
    assert len(copies) == 2
    torch.testing.assert_close(read(peft, ids)[0], before)
    with torch.no_grad():
        copies[0].zero_()
    got, _, routers = read(peft, ids)
    assert routers[0].top_k == 2
    torch.testing.assert_close(got[0], torch.full((18, 6), 1 / 6))
    with peft.disable_adapter():
        torch.testing.assert_close(read(peft, ids)[0], before)


def test_code_compiled_in_the_context_is_read_there_and_nowhere_else(ids):
    model = make("qwen3_moe", HEAD)
    expected, _, _ = read(model, ids)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    told = []
    hook = RouterHook(find_routers(*stack(model)), lambda layer, p: told.append((layer, p)))
    for times in (2, 4):
        with hook, torch.no_grad():
            model(input_ids=ids, use_cache=False)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)  # the same compiled code
        assert len(told) == times
    for layer, probabilities in told:
        torch.testing.assert_close(probabilities, expected[layer])


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "reasons"),
    [
        ("qwen3_moe", HEAD | {"mlp_only_layers": [0]}, {0: "Qwen3MoeDecoderLayer has no experts"}),
        ("nemotron_h", SIGMOID["nemotron_h"], {1: "NemotronHBlock has no experts"}),
        ("llama", {}, dict.fromkeys((0, 1), "LlamaDecoderLayer has no experts")),
        ("deepseek_v4", SQRTSOFTPLUS["deepseek_v4"], {0: "DeepseekV4HashRouter chooses experts by token id"}),
        ("doge", {"is_moe": True, "num_experts": 16}, dict.fromkeys((0, 1), "DogeCDMoE scores product keys")),
        ("inkling2_loop_text", HEAD, dict.fromkeys((0, 1), "Inkling2LoopTopKRouter runs several times")),
    ],
)
def test_layers_without_a_readable_router_are_told_by_name(name, settings, reasons):
    model = make(name, settings)
    got = why_no_router(*stack(model))
    assert got.keys() == reasons.keys() == set(range(2)) - find_routers(*stack(model)).keys()
    for layer, reason in reasons.items():
        assert got[layer].startswith(reason)


def test_routers_that_are_not_in_the_table_are_refused():
    class Qwen3MoeTopKRouter(nn.Linear):  # the name alone is no evidence
        def forward(self, x):
            return super().forward(x)

    model = make("qwen3_moe", HEAD)
    model.model.layers[0].mlp.gate = Qwen3MoeTopKRouter(32, 6)
    model.model.layers[1].mlp.second = model.model.layers[1].mlp.gate.__class__(model.config)
    assert find_routers(*stack(model)) == {}
    assert why_no_router(*stack(model)) == {
        0: "how its experts are chosen is not known (Qwen3MoeExperts, Qwen3MoeTopKRouter)",
        1: "2 routers in one layer (Qwen3MoeTopKRouter, Qwen3MoeTopKRouter)",
    }


def test_mxfp4_kernels_are_refused_with_a_remedy():
    from transformers.integrations.mxfp4 import Mxfp4GptOssMLP

    model = make("gpt_oss", SOFTMAX["gpt_oss"])
    model.model.layers[0].mlp = Mxfp4GptOssMLP(model.model.layers[0].mlp.router, nn.Module())
    assert list(find_routers(*stack(model))) == [1]
    assert "Mxfp4Config(dequantize=True)" in why_no_router(*stack(model))[0]


def test_an_unknown_scoring_is_refused():
    model = make("deepseek_v4", SQRTSOFTPLUS["deepseek_v4"])
    model.config.scoring_func = "relu"
    assert find_routers(*stack(model)) == {}
    assert "'relu'" in why_no_router(*stack(model))[1]


@pytest.mark.parametrize(
    "output",
    [
        (torch.zeros(4, 6), torch.zeros(4, 2, dtype=torch.long)),  # scattered scores, as gpt-oss once returned
        (torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2), torch.zeros(4, 2)),
        (torch.zeros(4, 1), torch.zeros(4, 2), torch.zeros(4, 2)),
        torch.zeros(4, 6),
    ],
)
def test_outputs_of_other_versions_are_refused(output):
    with pytest.raises(UnreadableModelError, match=r"GptOssTopKRouter returned .* not 3 outputs"):
        router().probabilities(output)


def test_every_router_that_transformers_records_is_read_or_refused():
    """A new family fails here, until it is in the table or among these, which no causal language model uses."""
    import transformers

    others = {
        "DiffusionGemmaTextRouter",
        "NllbMoeTop2Router",
        "OpenAIPrivacyFilterTopKRouter",
        "Qwen3OmniMoeTalkerTextTopKRouter",
        "Qwen3OmniMoeTextTopKRouter",
        "SwitchTransformersTop1Router",
    }
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    recorded = {
        name for path in sources for name in re.findall(r'"router_logits": OutputRecorder\((\w+)', path.read_text())
    }
    assert "MixtralTopKRouter" in recorded
    assert recorded - _KNOWN.keys() - _REFUSED.keys() == others


def test_every_router_of_the_table_is_tested():
    classes = set()
    for family in FAMILIES:
        name, _, settings = family.values
        classes |= {r.name for r in find_routers(*stack(make(name, settings))).values()}
    assert classes == _KNOWN.keys()


# Closed forms ------------------------------------------------------------------------------------------------------


def router(scoring="softmax", top_k=2):
    return Router(module=nn.Identity(), name="GptOssTopKRouter", scoring=scoring, top_k=top_k, outputs=3, index=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (2, 1), (4, 2), (128, 8)])
def test_uniform_routers_have_entropy_log_e_and_mass_k_over_e(experts, k, dtype):
    uniform = torch.full((3, 5, experts), 1 / experts, dtype=dtype, requires_grad=True)
    for statistic, expected in ((ENTROPY, math.log(experts)), (MASS, k / experts)):
        got = statistic(uniform, k)
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got, torch.full((3, 5), expected), rtol=1e-6, atol=1e-6)


def test_certain_routers_have_entropy_0_and_mass_1():
    certain = torch.eye(4)
    assert torch.equal(ENTROPY(certain, 2), torch.zeros(4))
    assert torch.equal(MASS(certain, 2), torch.ones(4))


def test_entropy_and_mass_of_halves():
    """1/2, 1/4, ..., 2^-n, 2^-n has entropy (2 - 2^(1-n)) log 2 and its k largest hold 1 - 2^-k."""
    n = 5
    halves = torch.tensor([*(2.0**-i for i in range(1, n + 1)), 2.0**-n])[[3, 0, 5, 1, 4, 2]]
    torch.testing.assert_close(ENTROPY(halves, 3), torch.tensor((2 - 2.0 ** (1 - n)) * math.log(2)))
    for k in range(1, n + 1):
        torch.testing.assert_close(MASS(halves, k), torch.tensor(1 - 2.0**-k))


@pytest.mark.parametrize("k", [0, 5])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ConfigError, match=rf"k={k}: pass how many of the 4 experts"):
        MASS(torch.eye(4), k)


def test_scores_become_distributions():
    """odds = logits' exponentials for softmax; sigmoid(log a) = a / (1 + a); softplus(log(e^s - 1)) = s."""
    a = torch.tensor([1.0, 3.0, 1 / 3])
    rest = (torch.zeros(1), torch.zeros(1))
    close = torch.testing.assert_close
    close(router().probabilities((a.log()[None], *rest)), a[None] / a.sum())
    sigmoids = torch.tensor([[2.0, 3.0, 1.0]])  # fourths
    close(router("sigmoid").probabilities((a.log()[None], *rest)), sigmoids / 6)
    roots = torch.tensor([[1.0, 2.0, 3.0]])
    close(router("sqrtsoftplus").probabilities((roots.pow(2).expm1().log(), *rest)), roots / 6)
    close(router("probability").probabilities((roots / 6, *rest)), roots / 6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("logit", [-300.0, 0.0, 300.0])
def test_extreme_logits_stay_distributions(scoring, logit):
    """Equal logits are uniform, however extreme."""
    got = router(scoring).probabilities((torch.full((2, 3, 4), logit), None, None))
    torch.testing.assert_close(got, torch.full((6, 4), 0.25))
