"""Top keys against whole attention matrices."""

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from comppo.errors import ConfigError, UnreadableModelError
from comppo.inspect.top_keys import top_keys

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(implementation):
    return LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation=implementation)


def windowed(implementation):
    config = MistralConfig(**SMALL, sliding_window=7)
    return MistralForCausalLM._from_config(config, attn_implementation=implementation)


def learned_sinks(_):
    config = GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=9)
    return GptOssForCausalLM._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, windowed, learned_sinks])
def test_they_are_those_of_the_matrix(make, implementation):
    torch.manual_seed(0)
    model = make(implementation).eval()
    for parameter in model.parameters():  # sharp enough that rows differ
        parameter.data.mul_(3.0)
    ids = torch.randint(0, 32, (70,))
    layers, places = (0, 2), slice(29, 69)
    found = top_keys(model, ids, layers=layers, positions=places, count=4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(ids[None], output_attentions=True).attentions
    rows = torch.stack([matrices[layer][0].mean(0) for layer in layers]).mean(0)[places]
    assert len(found) == 40
    for row, keys in zip(rows, found, strict=True):
        weights = row.topk(4).values
        torch.testing.assert_close(torch.tensor([weight for _, weight in keys]), weights, rtol=1e-4, atol=1e-6)
        for place, weight in keys:
            assert weight == pytest.approx(float(row[place]), rel=1e-4, abs=1e-6)


def test_early_positions_see_few_keys():
    found = top_keys(llama("sdpa").eval(), torch.arange(5), layers=(1,), positions=slice(0, 3), count=4)
    assert [len(keys) for keys in found] == [1, 2, 3]
    assert found[0] == [(0, 1.0)]


def test_what_is_not_read_is_refused():
    model = llama("sdpa").eval()
    with pytest.raises(ConfigError, match="at least one layer"):
        top_keys(model, torch.arange(5), layers=(), positions=slice(0, 3))
    with pytest.raises(UnreadableModelError, match=r"layers \[9\] did not go through"):
        top_keys(model, torch.arange(5), layers=(1, 9), positions=slice(0, 3))
