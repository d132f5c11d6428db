"""Tiny configurations of causal language models: how their layers attend and whether they are read.

A literal table: the name in Transformers, the kind of attention, and what changes against `BASE`. Shared by the parity
test and `benchmarks/parity.py`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
TOKENS = {key: BASE[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
HEAD = {"head_dim": 8}
ALL_HEADS = {"num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXER = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
WINDOW = {"sliding_window": 6}
SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
NOT_SPREAD = ("embed", "lm_head", "wte", "wpe", "conv", "A_log")
"""Parts of names of weight matrices that keep their initial values."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One tiny model."""

    kind: str
    """How it attends, in words."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its configuration beside `BASE`."""
    base: bool = True
    """Whether `BASE` is used; without it, its token ids alone."""
    layers: tuple[int, ...] | None = None
    """Which layers attend with a softmax and are read; None for all of them."""
    bypass: bool = False
    """Whether its attention does not go through Transformers' attention registry."""
    refused: str = ""
    """Where it is not read: a regular expression that the error message must match."""
    late: bool = False
    """Whether that error comes only with the first forward, and not from the configuration."""
    known_gap: str = ""
    """What is wrong with reading it, until that is mended: its test must fail, and the page of the docs says so."""
    own_differs: str = ""
    """Why its forwards with eager and sdpa attention differ by far more than rounding, where they do."""

    spread: float = 0.16
    """Standard deviation of weight matrices: the default initial one makes nearly uniform attention, and much larger
    ones make scores whose own float32 rounding is what would be compared."""
    embedding: float | None = None
    """Standard deviation of token embeddings, where no norm follows them; None keeps the initial one."""
    query_norm: float = 1.0
    """Weight of the norm on queries, where a model normalises queries and keys and then divides by nothing."""

    def config(self, name: str) -> Any:
        """The configuration, as Transformers' class of that name."""
        from transformers import CONFIG_MAPPING

        settings = {**(BASE if self.base else TOKENS), **copy.deepcopy(dict(self.changes))}
        return CONFIG_MAPPING[name](**settings)

    def build(self, name: str) -> Any:
        """The model, always the same one, in float32, with the attention that Transformers chooses by itself."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config(name), dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim > 1 and not any(part in parameter_name for part in NOT_SPREAD):
                    parameter.normal_(0.0, self.spread)
                elif parameter_name.endswith("sinks"):
                    parameter.normal_()
                elif parameter_name.endswith("q_norm.weight"):
                    parameter.mul_(self.query_norm)
                elif parameter_name.endswith("temp"):
                    parameter.fill_(1.0)
            if self.embedding is not None:
                model.get_input_embeddings().weight.normal_(0.0, self.embedding)
        return model.eval()


def cfg(*groups: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Groups of settings and single ones as one dictionary; later ones win."""
    return {key: value for group in (*groups, settings) for key, value in group.items()}


A = Architecture
ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": A("GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL, num_dense_layers=1)),
    "apertus": A("GQA"),
    "apertus1p5_text": A("GQA"),
    "arcee": A("GQA"),
    "aria_text": A("GQA, MoE", cfg(HEAD, moe_num_experts=4)),
    "axk1": A("MLA, MoE", cfg(LATENT, ROUTED)),
    "axk2": A("MLA, sparse index, MoE", cfg(LATENT, ROUTED, INDEXER, gated_norm_rank=4), spread=0.2),
    "bailing_hybrid": A(
        "MLA, hybrid, MoE",
        cfg(
            LATENT,
            EXPERTS,
            num_experts_per_token=2,
            num_expert_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            layer_group_size=2,
            linear_head_dim=8,
            linear_num_heads=4,
        ),
        layers=(1,),
    ),
    "bamba": A("GQA, hybrid", cfg(MAMBA, attn_layer_indices=[1]), layers=(1,)),
    "beam": A("GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL, n_group=1, topk_group=1)),
    "bert": A("dense", cfg(is_decoder=True)),
    "biogpt": A("dense"),
    "bitnet": A("GQA"),
    "bloom": A("dense, ALiBi", cfg(n_layer=2, n_head=4), bypass=True),
    "codegen": A("dense", cfg(GPT2, rotary_dim=4), base=False),
    "cohere": A("GQA"),
    "cohere2": A("GQA, sliding window", cfg(HEAD, WINDOW, SLIDING_FULL)),
    "cohere2_moe": A("GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL)),
    "cohere_compass_text": A(
        "GQA, sliding window",
        cfg(
            HEAD,
            WINDOW,
            SLIDING_FULL,
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in SLIDING_FULL["layer_types"]
            },
        ),
    ),
    "ctrl": A("dense", cfg(GPT2, dff=48), base=False),
    "cwm": A("GQA, sliding window", cfg(HEAD, WINDOW, SLIDING_FULL)),
    "dbrx": A(
        "GQA, MoE",
        cfg(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=128,
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        base=False,
    ),
    "deepseek_v2": A("MLA, MoE", cfg(LATENT, ROUTED, topk_method="greedy")),
    "deepseek_v3": A("MLA, MoE", cfg(LATENT, ROUTED)),
    "deepseek_v32": A("MLA, sparse index, MoE", cfg(LATENT, ROUTED, INDEXER)),
    "deepseek_v4": A(
        "MQA, sliding window, compressed keys, learned sinks, MoE",
        cfg(
            HEAD,
            ROUTED,
            INDEXER,
            WINDOW,
            num_key_value_heads=1,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=8,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        ),
    ),
    "diffllama": A("GQA, differential", HEAD),
    "doge": A("GQA, dynamic mask", cfg(keep_window_size=6)),
    "dory": A("GQA, sliding window, looped", cfg(HEAD, WINDOW), refused="attended twice", late=True),
    "dots1": A("GQA, MoE", cfg(HEAD, ROUTED, n_shared_experts=1)),
    "dots3_note_text": A("MLA, sliding window, sparse index, MoE", cfg(LATENT, ROUTED, INDEXER, WINDOW)),
    "ernie4_5": A("GQA", HEAD),
    "ernie4_5_moe": A(
        "GQA, MoE",
        cfg(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1, moe_layer_end_index=1),
    ),
    "exaone4": A("GQA, sliding window", cfg(WINDOW, SLIDING_FULL)),
    "exaone_moe": A("GQA, sliding window, MoE", cfg(EXPERTS, WINDOW, SLIDING_FULL)),
    "falcon": A("GQA", cfg(num_kv_heads=2, new_decoder_architecture=True), bypass=True),
    "falcon_h1": A("GQA, hybrid", cfg(HEAD, MAMBA, mamba_d_ssm=64)),
    "flex_olmo": A("GQA, MoE", EXPERTS),
    "flint": A(
        "GQA, sliding window, learned sinks, MoE",
        cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL, mlp_only_layers=[0], shared_expert_intermediate_size=16),
    ),
    "gemma": A("GQA", HEAD),
    "gemma2": A(
        "GQA, sliding window, softcap",
        cfg(HEAD, WINDOW, SLIDING_FULL, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    ),
    "gemma3_text": A("GQA, sliding window", cfg(HEAD, WINDOW, SLIDING_FULL, query_pre_attn_scalar=8)),
    "gemma3n_text": A(
        "GQA, sliding window, shared keys",
        cfg(
            HEAD,
            WINDOW,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=96,
            laurel_rank=8,
            intermediate_size=48,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        query_norm=0.4,
    ),
    "gemma4_text": A(
        "GQA, sliding window",
        cfg(
            HEAD, WINDOW, SLIDING_FULL, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96
        ),
        query_norm=0.4,
    ),
    "gemma4_unified_text": A("GQA, sliding window", cfg(HEAD, WINDOW, SLIDING_FULL, global_head_dim=8), query_norm=0.4),
    "glm": A("GQA", HEAD),
    "glm4": A("GQA", HEAD),
    "glm4_moe": A("GQA, MoE", cfg(HEAD, ROUTED)),
    "glm4_moe_lite": A("MLA, MoE", cfg(LATENT, ROUTED)),
    "glm_moe_dsa": A("MLA, sparse index, MoE", cfg(LATENT, ROUTED, INDEXER)),
    "gpt2": A("dense", GPT2, base=False),
    "gpt_bigcode": A("MQA", GPT2, base=False),
    "gpt_neo": A(
        "dense, sliding window",
        cfg(num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=6),
        bypass=True,
        spread=0.1,
    ),
    "gpt_neox": A("dense"),
    "gpt_neox_japanese": A("dense", bypass=True),
    "gpt_oss": A("GQA, sliding window, learned sinks, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL)),
    "gptj": A("dense", cfg(GPT2, rotary_dim=4), base=False),
    "granite": A("GQA", spread=0.1),
    "granite_swa": A("GQA, sliding window, learned sinks", cfg(WINDOW, SLIDING_FULL), spread=0.1),
    "granitemoe": A("GQA, MoE", EXPERTS, spread=0.1),
    "granitemoe_swa": A("GQA, sliding window, learned sinks, MoE", cfg(EXPERTS, WINDOW, SLIDING_FULL), spread=0.1),
    "granitemoehybrid": A(
        "GQA, hybrid, MoE",
        cfg(EXPERTS, MAMBA, layer_types=["mamba", "attention"], shared_intermediate_size=16),
        spread=0.1,
        layers=(1,),
    ),
    "granitemoeshared": A("GQA, MoE", cfg(EXPERTS, shared_intermediate_size=16), spread=0.1),
    "helium": A("GQA", HEAD),
    "hrm_text": A("GQA, looped", cfg(HEAD, num_layers_per_stack=1), refused="no list of .* decoder layers"),
    "hunyuan_v1_dense": A("GQA", HEAD),
    "hunyuan_v1_moe": A("GQA, MoE", cfg(HEAD, EXPERTS, moe_topk=2)),
    "hy_v3": A("GQA, MoE", cfg(HEAD, EXPERTS)),
    "hy_v4": A("MLA, sparse index, learned sinks, MoE", cfg(HEAD, LATENT, ROUTED, INDEXER)),
    "hyperclovax": A("GQA"),
    "inkling2_loop_text": A(
        "GQA, sliding window, position bias, learned sinks, looped, MoE",
        cfg(HEAD, ROUTED, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=6),
        refused="self-attention modules in one layer",
    ),
    "inkling2_text": A(
        "GQA, sliding window, position bias, learned sinks, MoE",
        cfg(HEAD, ROUTED, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=6),
        refused="self-attention modules in one layer",
    ),
    "inkling_text": A(
        "GQA, sliding window, position bias, MoE",
        cfg(
            HEAD,
            ROUTED,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=8,
            sliding_window_size=6,
            unpadded_vocab_size=96,
        ),
    ),
    "jais2": A("GQA"),
    "jamba": A(
        "GQA, hybrid, MoE",
        cfg(attn_layer_offset=1, attn_layer_period=2, num_experts=2, mamba_d_state=8, use_mamba_kernels=False),
        layers=(1,),
    ),
    "jetmoe": A("GQA, MoE", cfg(EXPERTS, kv_channels=8)),
    "kimi_linear": A(
        "MLA, hybrid, MoE",
        cfg(
            LATENT,
            EXPERTS,
            num_experts_per_token=2,
            linear_head_dim=8,
            linear_num_heads=4,
            layer_types=["linear_attention", "full_attention"],
        ),
        layers=(1,),
    ),
    "kolibri1": A("GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, shared_expert_intermediate_size=16)),
    "laguna": A(
        "GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL, shared_expert_intermediate_size=16)
    ),
    "lara_mini": A("GQA, sliding window, hybrid, MoE", cfg(HEAD, EXPERTS, LINEAR, WINDOW), layers=(1, 3)),
    "lfm2": A("GQA, hybrid", cfg(layer_types=["conv", "full_attention"], block_ff_dim=48), layers=(1,)),
    "lfm2_moe": A(
        "GQA, hybrid, MoE", cfg(EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1), layers=(1,)
    ),
    "lfm3": A(
        "GQA, sliding window, hybrid",
        cfg(HEAD, WINDOW, num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"]),
        layers=(1, 2),
    ),
    "llama": A("GQA"),
    "llama4_text": A(
        "GQA, chunked window, MoE",
        cfg(
            HEAD,
            EXPERTS,
            intermediate_size_mlp=48,
            attention_chunk_size=6,
            num_hidden_layers=4,
            no_rope_layers=[1, 1, 1, 0],
        ),
    ),
    "longcat_flash": A(
        "MLA, MoE",
        cfg(
            HEAD,
            LATENT,
            num_hidden_layers=4,
            ffn_hidden_size=48,
            expert_ffn_hidden_size=16,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
        ),
        layers=(0, 1, 2, 3),
    ),
    "mamba": A("no attention", cfg(state_size=8), refused="no softmax attention"),
    "mellum": A("GQA, sliding window, MoE", cfg(HEAD, EXPERTS, WINDOW, SLIDING_FULL)),
    "mimo_v2_flash": A("GQA, sliding window, learned sinks, MoE", cfg(HEAD, ROUTED, WINDOW, SLIDING_FULL)),
    "minicpm3": A("MLA", LATENT),
    "minimax": A(
        "GQA, hybrid, MoE",
        cfg(HEAD, EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=8),
        layers=(1,),
    ),
    "minimax_m2": A("GQA, MoE", cfg(HEAD, EXPERTS)),
    "minimax_m3_vl_text": A(
        "GQA, sparse index, MoE",
        cfg(
            HEAD,
            EXPERTS,
            dense_intermediate_size=48,
            shared_intermediate_size=16,
            rotary_dim=4,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=2,
            layer_types=["full_attention", "minimax_m3_sparse"],
        ),
        own_differs="padded keys take part in its choice of blocks, and at padding eager and sdpa differ",
    ),
    "ministral": A("GQA, sliding window", cfg(HEAD, WINDOW, SLIDING_FULL)),
    "ministral3": A("GQA, sliding window", cfg(HEAD, WINDOW)),
    "mistral": A("GQA, sliding window", WINDOW),
    "mixtral": A("GQA, sliding window, MoE", cfg(EXPERTS, WINDOW)),
    "modernbert-decoder": A("dense, sliding window", cfg(SLIDING_FULL, local_attention=12)),
    "moshi": A("GQA", cfg(HEAD, ffn_dim=96)),
    "mpt": A("dense, ALiBi", cfg(d_model=32, n_layers=2, n_heads=4, max_seq_len=128), base=False, bypass=True),
    "nanochat": A("GQA"),
    "nemotron": A("GQA", HEAD, spread=0.1),
    "nemotron_h": A(
        "GQA, hybrid, MoE",
        cfg(
            HEAD,
            ROUTED,
            layers_block_type=["linear_attention", "full_attention", "moe", "full_attention"],
            ssm_state_size=8,
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=1,
            chunk_size=8,
            moe_shared_expert_intermediate_size=16,
            use_mamba_kernels=False,
        ),
        layers=(1, 3),
    ),
    "olmo": A("GQA"),
    "olmo2": A("GQA"),
    "olmo3": A("GQA, sliding window", cfg(WINDOW, SLIDING_FULL)),
    "olmo_hybrid": A("GQA, hybrid", LINEAR, layers=(3,)),
    "olmoe": A("GQA, MoE", EXPERTS),
    "openai-gpt": A(
        "dense",
        GPT2,
        base=False,
        bypass=True,
        embedding=1.0,
    ),
    "opt": A("dense", cfg(ffn_dim=48, word_embed_proj_dim=32)),
    "persimmon": A("dense", ALL_HEADS),
    "phi": A("GQA"),
    "phi3": A("GQA, sliding window", WINDOW),
    "phimoe": A("GQA, sliding window, MoE", cfg(EXPERTS, WINDOW)),
    "qwen2": A("GQA"),
    "qwen2_moe": A("GQA, MoE", cfg(EXPERTS, shared_expert_intermediate_size=16)),
    "qwen3": A("GQA", HEAD),
    "qwen3_5_moe_text": A("GQA, hybrid, MoE", cfg(HEAD, EXPERTS, LINEAR), layers=(3,)),
    "qwen3_5_text": A("GQA, hybrid", cfg(HEAD, LINEAR), layers=(3,)),
    "qwen3_moe": A("GQA, MoE", cfg(HEAD, EXPERTS)),
    "qwen3_next": A("GQA, hybrid, MoE", cfg(HEAD, EXPERTS, LINEAR), layers=(3,)),
    "qwen4_exp_text": A(
        "GQA, sparse index, hybrid, MoE",
        cfg(
            HEAD,
            EXPERTS,
            LINEAR,
            hc_lowrank=8,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=8,
            indexer_compress_ratio=4,
        ),
        layers=(3,),
    ),
    "recurrent_gemma": A(
        "GQA, sliding window, hybrid",
        cfg(HEAD, block_types=["recurrent", "attention"], attention_window_size=6, lru_width=32),
        layers=(1,),
    ),
    "seed_oss": A("GQA", HEAD),
    "smollm3": A("GQA", cfg(no_rope_layer_interval=2)),
    "solar_open": A("GQA, MoE", cfg(HEAD, ROUTED)),
    "stablelm": A("GQA"),
    "starcoder2": A("GQA, sliding window", WINDOW),
    "vaultgemma": A(
        "GQA, sliding window, softcap",
        cfg(HEAD, WINDOW, SLIDING_FULL, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    ),
    "xglm": A("dense", cfg(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48), bypass=True, embedding=1.0),
    "youtu": A("MLA", LATENT),
    "zamba": A(
        "dense, shared, hybrid",
        cfg(
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            attention_hidden_size=64,
            attention_head_dim=16,
            num_key_value_heads=4,
            use_mamba_kernels=False,
        ),
        spread=0.08,
        refused="shared between layers",
    ),
    "zamba2": A(
        "dense, shared, hybrid",
        cfg(
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            n_mamba_heads=4,
            num_key_value_heads=4,
            use_mamba_kernels=False,
        ),
        spread=0.08,
        refused="shared between layers",
    ),
    "zaya": A("GQA, MoE", cfg(HEAD, EXPERTS, num_experts_per_tok=1, router_hidden_size=16)),
}


def padded_rows() -> tuple[Any, Any]:
    """Token ids and mask of 4 rows of 20 tokens: unpadded, padded on the left, on the right, on both sides."""
    import torch

    ids = torch.randint(3, 95, (4, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, -5:] = 0
    mask[3, :4] = 0
    mask[3, -3:] = 0
    return ids * mask, mask
