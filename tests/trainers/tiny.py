"""A random two-layer model, a character tokenizer and a data set: what a trainer needs, in milliseconds."""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHARACTERS = "0123456789abcdefgh=;? "


def tokenizer():
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def model(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS) + 3,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def mixture(seed=0):
    """The same with experts, and room for a critic."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(CHARACTERS) + 3,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def dataset(rows=64):
    draw = random.Random(0)
    return Dataset.from_list([{"prompt": f"a={draw.randint(0, 999)};a?", "answer": "1"} for _ in range(rows)])


def digit_reward(completions, **_):
    """Share of digits: graded, so that groups are rarely all alike."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def settings(folder, **changes):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-3,
        "max_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "bf16": False,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        # A small actor may not have a critic of more than a few percent of its size
        "critic_features": ["routing", "surprisal", "entropy", "position", "group_mean"],
        "critic_hidden_size": 4,
    } | changes


def trainer(
    folder,
    *,
    actor=model,
    peft_config=None,
    reward_funcs=digit_reward,
    cls=None,
    config=None,
    rollout_func=None,
    **changes,
):
    from comppo import CompPOConfig, CompPOTrainer

    values = settings(folder, **changes)
    if config is not None:
        values = {k: v for k, v in values.items() if not k.startswith("critic")}
    return (cls or CompPOTrainer)(
        model=actor(),
        reward_funcs=reward_funcs,
        args=(config or CompPOConfig)(**values),
        train_dataset=dataset(),
        eval_dataset=dataset(8) if values.get("eval_strategy") else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        rollout_func=rollout_func,
    )


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def logged(run, key):
    return [row[key] for row in run.state.log_history if key in row]
