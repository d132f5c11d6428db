"""The standard critic of the ablation: a Transformer of the actor's size with a scalar head."""

import copy
import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comppo.critic.bounded import Critic, CriticInputs
from comppo.errors import ConfigError, EvidenceError


class StandardCritic(Critic):
    """Values from a trainable copy of the actor's backbone; the actor itself is never touched.

    The copy has adapters merged in, every parameter trainable, no hooks of the original, no gradient checkpointing and
    no dropout (it stays in evaluation mode, so that micro-batches change nothing). The scalar head starts at zero: the
    critic starts as exactly the baseline. Building it draws no random numbers.

    Args:
        actor: a causal language model with the interface of Transformers, not wrapped for sharding; a PEFT model is
            unwrapped.
        reward_min: least reachable return, reward units; None: learn it.
        reward_max: greatest reachable return, reward units; None: learn it.
        dtype: of the copy; None keeps the actor's. Adam in bfloat16 loses small steps: prefer float32 where it fits.

    Raises:
        ConfigError: the actor has no backbone that can be found, or its weights are quantised.
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        reward_min: float | None = None,
        reward_max: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(reward_min, reward_max)
        backbone = copied_backbone(actor)
        first = next(backbone.parameters())
        if not all(p.is_floating_point() for p in backbone.parameters()):
            raise ConfigError(
                "the actor's weights are quantised, so a copy cannot be trained: load it without quantisation."
            )
        self.backbone = backbone.to(dtype) if dtype is not None else backbone
        self.backbone.requires_grad_(True)
        self.backbone.eval()
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        width = _hidden_width(self.backbone)
        # float32 whatever the backbone: the head's small early steps must not be rounded away.
        self.head_weight = nn.Parameter(torch.zeros(width, dtype=torch.float32, device=first.device))
        self.head_bias = nn.Parameter(torch.zeros((), dtype=torch.float32, device=first.device))

    def train(self, mode: bool = True) -> "StandardCritic":
        """Set the mode of the critic; its backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, inputs: CriticInputs) -> Float[Tensor, "rows tokens"]:
        """V(s_t) for every response token, read at the position that emits it.

        Args:
            inputs: with `input_ids` and `attention_mask`, at least one prompt slot before the response.

        Returns:
            Reward units, 0 at masked slots, dtype of the head.

        Raises:
            EvidenceError: `input_ids` or `attention_mask` is missing, or there is no slot before the response.
        """
        ids, attention = inputs.input_ids, inputs.attention_mask
        tokens = inputs.mask.shape[1]
        if ids is None or attention is None or ids.shape[1] <= tokens:
            got = "missing" if ids is None or attention is None else f"only {ids.shape[1]} tokens long"
            raise EvidenceError(
                f"input_ids or attention_mask is {got}: the standard critic reads prompt and response together, "
                f"at least one prompt token before the {tokens} response tokens."
            )
        positions: dict[str, Tensor] = {}
        if self._takes_positions:  # absolute embeddings must not see the padding
            positions["position_ids"] = (attention.long().cumsum(dim=1) - 1).clamp(min=0)
        output: Any = self.backbone(input_ids=ids, attention_mask=attention, use_cache=False, **positions)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        hidden = hidden[:, -tokens - 1 : -1].to(self.head_weight.dtype)
        hidden = torch.where(inputs.mask[..., None], hidden, 0.0)
        return self.bounded(hidden @ self.head_weight + self.head_bias, inputs)


def copied_backbone(actor: nn.Module) -> nn.Module:
    """Copy the Transformer without its language-model head, for a critic of its own.

    Args:
        actor: a causal language model or a PEFT model around one, unwrapped and unsharded; left as it is.

    Returns:
        A deep copy with adapters merged, forward and backward hooks removed, and activation checkpointing off; dtype
        and device of the actor.

    Raises:
        ConfigError: neither `get_decoder()` nor `base_model` gives a backbone with parameters.
    """
    model: Any = actor
    if hasattr(model, "merge_and_unload"):  # a PEFT model: the copy is merged, the original keeps its adapters
        backbone: Any = _backbone(_without_hooks(copy.deepcopy(model)).merge_and_unload())
    else:
        backbone = copy.deepcopy(_backbone(model))
    backbone = _without_hooks(backbone)
    for disable in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):  # renamed in Transformers 5
        if hasattr(backbone, disable):
            getattr(backbone, disable)()
            break
    return backbone  # type: ignore[no-any-return]


def _backbone(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    backbone = decoder if decoder is not None else getattr(model, "base_model", None)
    if not isinstance(backbone, nn.Module) or next(backbone.parameters(), None) is None:
        raise ConfigError(
            f"found no backbone in {type(model).__name__}: pass a causal language model with get_decoder() or "
            "base_model, unwrapped (accelerator.unwrap_model) and before its weights are sharded."
        )
    return backbone


def _without_hooks(module: Any) -> Any:
    """Hooks are copied by reference: those of the actor's reader would report the critic's passes as the actor's."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return module


def _hidden_width(backbone: Any) -> int:
    config = getattr(backbone, "config", None)
    width = getattr(config, "hidden_size", None)
    if width is None and hasattr(backbone, "get_input_embeddings"):
        width = getattr(backbone.get_input_embeddings(), "embedding_dim", None)
    if width is None:
        raise ConfigError(f"{type(backbone).__name__} does not say its hidden size: its config needs hidden_size.")
    return int(width)
