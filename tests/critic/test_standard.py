import hashlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from comppo.critic.bounded import CriticInputs
from comppo.critic.fit import fit_critic
from comppo.critic.standard import StandardCritic
from comppo.errors import ConfigError, EvidenceError

PROMPT, TOKENS = 3, 5


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def batch(seed=0, rows=4):
    generator = torch.Generator().manual_seed(seed)
    attention = torch.ones(rows, PROMPT + TOKENS, dtype=torch.long)
    attention[1, :2] = 0  # left-padded prompt
    attention[2, -2:] = 0  # short response
    mask = attention[:, PROMPT:].bool()
    mask[3, 1] = False  # tool output
    return CriticInputs(
        mask=mask,
        baseline=torch.rand(rows, generator=generator),
        input_ids=torch.randint(0, 17, attention.shape, generator=generator),
        attention_mask=attention,
    )


def disturbed(actor, **settings):
    critic = StandardCritic(actor, reward_min=-1.0, reward_max=1.0, **settings)
    with torch.no_grad():
        critic.head_weight += torch.randn(critic.head_weight.shape, generator=torch.Generator().manual_seed(0))
    return critic


def digest(model):
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[name].float().numpy().tobytes() for name in sorted(state))).hexdigest()


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_new_critic_is_exactly_the_baseline_and_draws_no_random_number(build):
    actor = build()
    before = torch.get_rng_state()
    critic = StandardCritic(actor, reward_min=0.0, reward_max=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    inputs = batch()
    assert torch.equal(critic(inputs), torch.where(inputs.mask, inputs.baseline[:, None], 0.0))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_fitting_moves_the_copy_and_never_the_actor(build):
    actor = build()
    before = digest(actor)
    critic = StandardCritic(actor, reward_min=-1.0, reward_max=1.0)
    assert all(p.requires_grad for p in critic.parameters())
    copied = digest(critic.backbone)
    inputs = batch()
    returns = torch.where(inputs.input_ids[:, PROMPT:] > 8, 1.0, -1.0)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    report = fit_critic(critic, optimizer, inputs, returns, epochs=12, gradient_clip=1.0, micro_batch_size=3)
    assert report.steps == 12
    assert report.loss_after < 0.7 * report.loss_before
    assert digest(critic.backbone) != copied
    assert digest(actor) == before
    assert all(p.grad is None for p in actor.parameters())


def test_values_are_read_where_the_token_is_emitted():
    """Changing token t moves no value up to t and, at the next position, some value."""
    critic = disturbed(llama())
    inputs = batch()
    before = critic(inputs)
    for t in range(TOKENS - 1):
        ids = inputs.input_ids.clone()
        ids[0, PROMPT + t] = (ids[0, PROMPT + t] + 1) % 17
        changed = CriticInputs(
            mask=inputs.mask, baseline=inputs.baseline, input_ids=ids, attention_mask=inputs.attention_mask
        )
        after = critic(changed)
        torch.testing.assert_close(after[0, : t + 1], before[0, : t + 1])
        assert not torch.allclose(after[0, t + 1], before[0, t + 1])


@pytest.mark.parametrize("build", [llama, gpt2])
def test_padding_changes_nothing(build):
    critic = disturbed(build())
    inputs = batch()
    pad = torch.full((4, 2), 3)
    wider = CriticInputs(
        mask=torch.cat([inputs.mask, pad > 9], dim=1),
        baseline=inputs.baseline,
        input_ids=torch.cat([pad, inputs.input_ids, pad], dim=1),
        attention_mask=torch.cat([pad * 0, inputs.attention_mask, pad * 0], dim=1),
    )
    torch.testing.assert_close(critic(wider)[:, :TOKENS], critic(inputs), rtol=1e-5, atol=1e-5)
    assert (critic(wider)[:, TOKENS:] == 0).all()


def test_dropout_and_checkpointing_of_the_actor_stay_out():
    actor = llama()
    actor.activation_checkpointing_enable()
    actor.train()
    critic = disturbed(actor).train()
    assert critic.training
    # Transformers renamed the methods; the flag that its layers read kept its name.
    assert not any(getattr(part, "gradient_checkpointing", False) for part in critic.modules())
    inputs = batch()
    assert torch.equal(critic(inputs), critic(inputs))
    assert any(getattr(part, "gradient_checkpointing", False) for part in actor.modules())


def test_hooks_of_the_actor_do_not_fire_for_the_critic():
    actor, calls = llama(), []
    actor.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    disturbed(actor)(batch())
    assert not calls
    actor(batch().input_ids)
    assert calls


def test_adapters_are_merged_into_the_copy_and_left_on_the_actor():
    plain = llama()
    actor = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter += 0.5
    before = digest(actor)
    critic = disturbed(actor)
    assert not any("lora" in name for name, _ in critic.named_parameters())
    assert all(p.requires_grad for p in critic.parameters())
    inputs = batch()
    actor.eval()
    merged = critic.backbone(input_ids=inputs.input_ids, use_cache=False).last_hidden_state
    own = actor(input_ids=inputs.input_ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(merged, own, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(disturbed(plain)(inputs), critic(inputs), atol=1e-3)
    assert digest(actor) == before
    assert any("lora" in name for name, _ in actor.named_parameters())


def test_dtype_of_the_copy():
    critic = disturbed(llama().to(torch.bfloat16), dtype=torch.float32)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    kept = disturbed(llama().to(torch.bfloat16))
    assert kept.backbone.dtype == torch.bfloat16
    assert kept(batch()).dtype == torch.float32


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ConfigError, match="found no backbone in Linear"):
        StandardCritic(nn.Linear(2, 2))
    critic = disturbed(llama())
    inputs = batch()
    with pytest.raises(EvidenceError, match="attention_mask is missing"):
        critic(CriticInputs(mask=inputs.mask, input_ids=inputs.input_ids))
    with pytest.raises(EvidenceError, match="only 5 tokens long"):
        short = inputs.input_ids[:, PROMPT:]
        critic(CriticInputs(mask=inputs.mask, input_ids=short, attention_mask=torch.ones_like(short)))
