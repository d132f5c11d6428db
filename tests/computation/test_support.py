"""What can be read is known from a configuration alone; importing loads neither Transformers nor TRL."""

import subprocess
import sys

import pytest
import torch

from comppo.computation import ComputationReader, readable_layers, require_readable
from comppo.computation.support import as_model, map_model
from comppo.errors import ConfigError, UnreadableModelError

HYBRIDS = {
    "jamba": (
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        [1],
    ),
    "lfm2": ({"layer_types": ["full_attention", "conv"], "block_ff_dim": 48}, [0]),
    "bamba": ({"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}, [1]),
    "qwen3_next": (
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
        },
        [3],
    ),
}


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi", "olmo2", "smollm3", "qwen3_moe", "gpt_oss"]
)
def test_ordinary_models_are_readable_in_every_layer(name, config_of, build):
    assert readable_layers(config_of(name)) == [0, 1]
    model = build(name, "eager")
    assert readable_layers(model) == [0, 1]
    assert require_readable(model) == (1,) and require_readable(config_of(name), layers="middle") == (0, 1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_show_their_softmax_layers(name, config_of):
    changes, layers = HYBRIDS[name]
    config = config_of(name, **changes)
    assert readable_layers(config) == layers
    assert require_readable(config, layers="all") == tuple(layers)
    with pytest.raises(UnreadableModelError, match=r"layers \[.*no softmax attention.*Readable layers"):
        require_readable(config, layers=(0, 1, 2, 3)[: config.num_hidden_layers])


def test_a_hybrid_is_read_where_it_attends(build, padded):
    ids, mask = padded
    model = build("jamba", **HYBRIDS["jamba"][0])
    with torch.no_grad(), ComputationReader(model, statistics=("collision",), layers="all") as reader:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert reader.layers == (1,) and reader.statistic("collision").shape == (4, 20, 1, 4)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mamba", {}, "no softmax attention"),
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "no softmax attention"),
    ],
)
def test_unreadable_models_are_refused_before_weights_exist(name, changes, reason, config_of, monkeypatch):
    config = config_of(name, **changes)
    made = []
    parameter = torch.nn.Parameter.__new__

    def watch(cls, data=None, requires_grad=True):
        made.append(data is not None and data.device.type != "meta")
        return parameter(cls, data, requires_grad)

    monkeypatch.setattr(torch.nn.Parameter, "__new__", watch)
    state = torch.get_rng_state()
    with pytest.raises(UnreadableModelError, match=rf"layers \[0, 1\]: .*{reason}"):
        require_readable(config, layers="middle")
    assert made and not any(made) and torch.equal(torch.get_rng_state(), state)
    assert require_readable(config, layers=()) == ()


def test_the_choice_of_layers_is_checked(config_of):
    config = config_of("llama", num_hidden_layers=6)
    assert require_readable(config) == (4, 5) and require_readable(config, layers=(4, 0, 4)) == (0, 4)
    with pytest.raises(UnreadableModelError, match=r"layers \[-1, 6\].*layers 0 to 5"):
        require_readable(config, layers=(-1, 2, 6))
    with pytest.raises(ConfigError, match="integers"):
        require_readable(config, layers=(True,))
    with pytest.raises(ConfigError, match="middle"):
        require_readable(config, layers="upper")
    config._attn_implementation = "paged|sdpa"
    with pytest.raises(UnreadableModelError, match=r"paged.*sdpa"):
        require_readable(config)


def test_names_of_architectures_that_are_none_are_passed_over(config_of):
    config = config_of("llama")
    config.architectures = [3]
    assert readable_layers(config) == [0, 1]


def test_configurations_of_other_models_are_refused():
    from transformers import ViTConfig

    with pytest.raises(UnreadableModelError, match="ViTConfig is not a causal language model"):
        readable_layers(ViTConfig())


TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SEEING = {
    "qwen2_vl": {"vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4}},
    "qwen2_5_vl": {"vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 4}},
    "gemma3": {"vision_config": VISION | {"image_size": 28, "patch_size": 14}},
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", SEEING)
def test_models_that_see_images_are_read_in_their_text_layers(name, named):
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = CONFIG_MAPPING[name](**({"text_config": TEXT} | SEEING[name]))
    if named:
        config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__]
    assert require_readable(config, layers="all") == (0, 1)
    # The vision tower is as deep: its layers must not be taken for the decoder's
    assert "vision" not in type(map_model(as_model(config)).decoder).__name__.lower()
    with pytest.raises(UnreadableModelError, match=r"paged.*sdpa"):
        require_readable(config, attn_implementation="paged|eager")


def test_the_requested_attention_overrides_the_configuration_s(config_of):
    config = config_of("llama")
    for refused in ("paged|eager", "paged|sdpa", {"": "paged|sdpa"}, {"text_config": "paged|sdpa"}):
        with pytest.raises(UnreadableModelError, match=r"attn_implementation=.*sdpa"):
            require_readable(config, attn_implementation=refused)
    config._attn_implementation = "paged|sdpa"
    for accepted in ("sdpa", "flex_attention", "flash_attention_2", {"text_config": "sdpa", "": "paged|sdpa"}):
        assert require_readable(config, layers="all", attn_implementation=accepted) == (0, 1)


def test_without_evidence_the_check_is_put_off(config_of, build, monkeypatch):
    from transformers import LlamaConfig

    class RemoteConfig(LlamaConfig):
        """As if from code of the model's own: no auto class knows it."""

        model_type = "remote"

    config = RemoteConfig(**config_of("llama").to_dict())
    config.architectures = ["RemoteForCausalLM"]
    config.auto_map = {"AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM"}
    assert require_readable(config) is None
    with pytest.raises(ConfigError, match="middle"):
        require_readable(config, layers="upper")
    with pytest.raises(UnreadableModelError, match="paged"):
        require_readable(config, attn_implementation="paged|sdpa")
    with pytest.raises(UnreadableModelError, match=r"RemoteConfig does not tell.*load the model"):
        readable_layers(config)

    model = build("llama")

    def needs_numbers(self, *_):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(type(model), "__init__", needs_numbers)
    assert require_readable(config_of("llama")) is None
    assert require_readable(model, layers="all") == (0, 1)


@pytest.mark.parametrize("package", ["comppo", "comppo.computation"])
def test_importing_loads_neither_transformers_nor_trl(package):
    code = (
        f"import sys, {package}\n"
        "heavy = {'transformers', 'trl', 'peft', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cross_attention_is_not_the_model_s_own(config_of):
    assert readable_layers(config_of("gpt2", add_cross_attention=True, is_decoder=True)) == [0, 1]
