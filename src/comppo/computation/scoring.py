"""Log-probabilities of emitted tokens and entropies of the output distribution, from a plain forward of the model."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from comppo.errors import UnreadableModelError

Score = Callable[[nn.Module, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(model, input_ids, attention_mask, completion_length) -> (logps, entropies), both (rows, tokens); one forward."""

TOKENS_AT_ONCE = 64  # the vocabulary is wide: float32 copies of the logits exist for this many positions only


def score_plainly(
    model: nn.Module,
    input_ids: Int[Tensor, "rows positions"],
    attention_mask: Shaped[Tensor, "rows positions"],
    completion_length: int,
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "rows tokens"], Float[Tensor, "rows tokens"]]:
    """Run one forward and score the last `completion_length` tokens.

    Positions count from each row's first unpadded token, as in generation, so that padding moves nothing even in models
    with learned positions.

    Args:
        model: a causal language model, wrapped or not.
        input_ids: prompt and response; the response is the last `completion_length` columns.
        attention_mask: 1 or true where a token is real.
        completion_length: C, at least 1 and less than the number of columns.
        temperature: logits are divided by it.

    Returns:
        Log-probabilities of the emitted tokens and entropies of the output distribution, nats, float32.

    Raises:
        UnreadableModelError: the model's output has no logits.
    """
    accepted = _parameters(model)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = completion_length + 1
    if "position_ids" in accepted and not bool(attention_mask.bool().all()):
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    logits = getattr(_unparallel(model)(**inputs), "logits", None)
    if logits is None:
        raise UnreadableModelError(f"the output of {type(model).__name__} has no logits: pass a causal language model.")
    return token_scores(logits[:, -completion_length - 1 : -1], input_ids[:, -completion_length:], temperature)


def token_scores(
    logits: Float[Tensor, "rows tokens vocabulary"], token_ids: Int[Tensor, "rows tokens"], temperature: float = 1.0
) -> tuple[Float[Tensor, "rows tokens"], Float[Tensor, "rows tokens"]]:
    """Log-probabilities of `token_ids` and entropies, nats, float32, a few positions at a time."""
    logps, entropies = [], []
    for part, ids in zip(logits.split(TOKENS_AT_ONCE, 1), token_ids.split(TOKENS_AT_ONCE, 1), strict=True):
        log_p = torch.log_softmax(part.float() / temperature, -1)
        logps.append(log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
        # A token ruled out entirely has log-probability -inf and adds nothing.
        entropies.append(-torch.where(log_p.isfinite(), log_p.exp() * log_p, 0.0).sum(-1))
    return torch.cat(logps, 1), torch.cat(entropies, 1)


def _unparallel(model: nn.Module) -> nn.Module:
    """Without DDP's wrapper, whose forward talks to the other processes."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _parameters(model: nn.Module) -> frozenset[str]:
    """Arguments that the Transformers model inside the wrappers accepts."""
    from transformers import PreTrainedModel

    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)
    return frozenset(inspect.signature(inner.forward).parameters)
