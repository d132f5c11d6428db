"""What of a rollout is trained, how long it is, and whether it was cut off."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError


def trainable_mask(
    completion_mask: Bool[Tensor, "rows tokens"] | Int[Tensor, "rows tokens"],
    tool_mask: Bool[Tensor, "rows tokens"] | Int[Tensor, "rows tokens"] | None = None,
    scorable: Bool[Tensor, " rows"] | None = None,
) -> Bool[Tensor, "rows tokens"]:
    """True where the policy chose the token and it is trained.

    Args:
        completion_mask: 1 at real response tokens, 0 at padding.
        tool_mask: 1 where the policy wrote the token, 0 at tool output and observations; None: it wrote all.
        scorable: false where no reward function could score the response; None: all were scored.

    Returns:
        The conjunction of the three.

    Raises:
        EvidenceError: the shapes differ.
    """
    mask = completion_mask.bool()
    if mask.ndim != 2:
        raise EvidenceError(f"completion_mask must be (rows, tokens), got shape {tuple(mask.shape)}.")
    if tool_mask is not None:
        if tool_mask.shape != mask.shape:
            raise EvidenceError(
                f"tool_mask has shape {tuple(tool_mask.shape)}, but completion_mask has {tuple(mask.shape)}: "
                "pad both to the same length."
            )
        mask = mask & tool_mask.bool()
    if scorable is not None:
        if scorable.shape != mask.shape[:1]:
            raise EvidenceError(
                f"scorable has shape {tuple(scorable.shape)}, but there are {mask.shape[0]} rows: pass one per row."
            )
        mask = mask & scorable[:, None]
    return mask


def response_lengths(mask: Bool[Tensor, "rows tokens"]) -> Int[Tensor, " rows"]:
    """Number of trainable tokens in each response."""
    return mask.sum(dim=1)


def last_trainable(mask: Bool[Tensor, "rows tokens"]) -> Int[Tensor, " rows"]:
    """Index of each response's last trainable token, -1 where it has none."""
    if mask.shape[1] == 0:
        return mask.new_full(mask.shape[:1], -1, dtype=torch.long)
    return torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1).amax(dim=1)


def truncated_rows(
    completion_ids: Int[Tensor, "rows tokens"],
    completion_mask: Bool[Tensor, "rows tokens"] | Int[Tensor, "rows tokens"],
    eos_token_ids: int | Sequence[int],
) -> Bool[Tensor, " rows"]:
    """True where the response was cut off by the length limit: its last real token is no end-of-sequence token.

    Args:
        completion_ids: token ids.
        completion_mask: 1 at real response tokens (tool output too), 0 at padding, on either side. Pass the mask as it
            was before truncated responses were taken out of the loss.
        eos_token_ids: every id that ends a response.

    Returns:
        One flag per response; false for an empty response, where nothing was cut off.

    Raises:
        ConfigError: `eos_token_ids` is empty.
        EvidenceError: the shapes differ.
    """
    ends = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    if not ends:
        raise ConfigError("eos_token_ids is empty, so every response would count as cut off: pass the tokenizer's ids.")
    if completion_ids.shape != completion_mask.shape:
        raise EvidenceError(
            f"completion_ids has shape {tuple(completion_ids.shape)}, but completion_mask has "
            f"{tuple(completion_mask.shape)}: pass equal shapes."
        )
    last = last_trainable(completion_mask.bool())
    if completion_ids.shape[1] == 0:
        return last >= 0
    final_ids = completion_ids.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
    return (last >= 0) & ~torch.isin(final_ids, torch.tensor(ends, device=final_ids.device, dtype=final_ids.dtype))
