"""What comppo relies on in TRL: a row-constant (B, T) advantage gives TRL's own loss for one advantage per response."""

import sys
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from comppo.errors import ConfigError
from comppo.trainers.trl.config import SUPPORTED_LOSS_TYPES, CompPOConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
import tiny


def batch(rows=6, prompt=5, tokens=9):
    torch.manual_seed(3)
    completion_mask = (torch.arange(tokens)[None] < torch.tensor([9, 1, 4, 7, 9, 2])[:, None]).long()
    return {
        "prompt_ids": torch.randint(3, 20, (rows, prompt)),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, 20, (rows, tokens)),
        "completion_mask": completion_mask,
        "num_items_in_batch": completion_mask.sum(),
        # Off-policy enough that some ratios are clipped on both sides
        "old_per_token_logps": -3.2 + 0.4 * torch.randn(rows, tokens),
    }


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", SUPPORTED_LOSS_TYPES)
def test_row_constant_advantages_give_trls_loss_and_gradient(loss_type, level, tmp_path):
    run = tiny.trainer(
        tmp_path,
        cls=GRPOTrainer,
        config=GRPOConfig,
        loss_type=loss_type,
        importance_sampling_level=level,
        # cispo's bound is on the ratio itself
        epsilon_high=5.0 if loss_type == "cispo" else None,
    )
    run.current_gradient_accumulation_steps = 1
    per_response = torch.tensor([1.3, -0.7, 0.0, 2.0, -1.1, 0.4])
    losses, gradients = [], []
    for advantages in (per_response, per_response[:, None].expand(-1, 9).contiguous()):
        run.model.train()
        run.model.zero_grad()
        loss = run.compute_loss(run.model, batch() | {"advantages": advantages})
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    assert losses[0].abs() > 1e-3
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)


def test_token_advantages_reach_the_loss_token_by_token(tmp_path):
    """Moving credit from one token to another changes the gradient although every row's sum stays."""
    run = tiny.trainer(tmp_path, cls=GRPOTrainer, config=GRPOConfig)
    run.current_gradient_accumulation_steps = 1
    flat = torch.ones(6, 9)
    skewed = flat.clone()
    skewed[:, 0], skewed[:, 1] = 2.0, 0.0
    gradients = []
    for advantages in (flat, skewed):
        run.model.train()
        run.model.zero_grad()
        run.compute_loss(run.model, batch() | {"advantages": advantages}).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4


@pytest.mark.parametrize("loss_type", ["vespo", "nonsense"])
def test_other_loss_types_are_refused_by_name(loss_type, tmp_path):
    with pytest.raises(ConfigError, match=f"loss_type='{loss_type}'"):
        CompPOConfig(output_dir=str(tmp_path), loss_type=loss_type)


def test_groups_of_one_keep_trls_other_checks(tmp_path):
    """The stand-in that lets a group of one pass must not let anything else pass."""
    args = CompPOConfig(output_dir=str(tmp_path), num_generations=1, per_device_train_batch_size=3, use_cpu=True)
    assert (args.num_generations, args.num_generations_eval, args.generation_batch_size) == (1, 1, 3)
    with pytest.raises(ValueError, match="generation_batch_size"):
        CompPOConfig(
            output_dir=str(tmp_path),
            num_generations=1,
            generation_batch_size=5,
            per_device_train_batch_size=2,
            use_cpu=True,
        )
    with pytest.raises(ConfigError, match="at least 2 responses"):
        CompPOConfig(output_dir=str(tmp_path), num_generations=1, per_device_train_batch_size=1, use_cpu=True)
    with pytest.raises(ConfigError, match="without a group"):
        CompPOConfig(output_dir=str(tmp_path), num_generations=1, operator="group_relative", use_cpu=True)


def test_the_trainers_take_the_same_arguments_in_the_same_order():
    import inspect

    from comppo import CompPOTrainer

    assert list(inspect.signature(CompPOTrainer).parameters) == list(inspect.signature(GRPOTrainer).parameters)


def test_every_vision_input_of_trl_is_read():
    """A key that TRL hands to its loss and comppo does not read would be dropped silently."""
    import inspect

    from comppo.trainers.trl.trainer import VISION_INPUTS

    scored = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    own = {
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    }
    assert set(VISION_INPUTS) == set(scored) - own
