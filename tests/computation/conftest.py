"""Tiny random models of several architectures, and rows with padding on either side."""

import pytest
import torch

BASE = {
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
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE | HEAD,
    "mistral": BASE | {"sliding_window": 6},
    "gemma2": BASE | HEAD | {"sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0},
    "phi": BASE,
    "olmo2": BASE,
    "smollm3": BASE | {"no_rope_layer_interval": 2},
    "qwen3_moe": BASE | HEAD | EXPERTS,
    "gpt_oss": BASE | HEAD | EXPERTS | {"sliding_window": 6},
}


def make_config(name, **changes):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**(ARCHITECTURES.get(name, BASE) | changes))


@pytest.fixture
def build():
    """Factory: architecture, attention implementation and changed settings -> a model, always the same one."""

    def factory(name, implementation="sdpa", **changes):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_config(name, **changes), attn_implementation=implementation)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Random weights attend almost evenly; larger ones give rows of every concentration.
                if parameter.ndim == 2 and not any(part in parameter_name for part in ("embed", "head", "wte", "wpe")):
                    parameter.mul_(5.0)
                if parameter_name.endswith("sinks"):
                    parameter.normal_()
        return model.eval()

    return factory


@pytest.fixture
def config_of():
    """Factory: an architecture's name and changed settings -> its configuration."""
    return make_config


@pytest.fixture
def padded():
    """Token ids and mask of 4 rows: unpadded, left-padded, right-padded, both."""
    torch.manual_seed(1)
    ids = torch.randint(3, 95, (4, 20))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, -5:] = 0
    mask[3, :4] = 0
    mask[3, -3:] = 0
    return ids * mask, mask
