"""Where the sequences of a forward pass begin: which keys are sinks, and which rows pack several documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from comppo.computation.attention_rows import INVISIBLE
from comppo.errors import EvidenceError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """The rows of one forward pass, over all positions that its keys may come from, cached ones included."""

    past: int
    """Positions that were in the cache before."""
    total: int
    """`past` and those of this forward."""
    real: Bool[Tensor, "rows total"]
    """False at padding."""
    documents: Int[Tensor, "rows total"] | None
    """Number of each position's document, from 0, where the position ids begin anew within a row; else None."""

    def sinks(self, sink_tokens: int, documents: Int[Tensor, "rows total"] | None) -> Bool[Tensor, "rows total"] | None:
        """The first `sink_tokens` real positions of each row, or of each document where attention keeps them apart."""
        if not sink_tokens:
            return None
        seen = self.real.long().cumsum(-1)
        if documents is not None:
            begins = documents.diff(dim=-1, prepend=documents[:, :1] - 1) != 0
            before = torch.where(begins, seen - self.real.long(), 0).cummax(-1).values
            seen = seen - before
        return self.real & (seen <= sink_tokens)


def sequences_of(inputs: dict[str, Any]) -> Sequences:
    """Read a decoder's arguments.

    Args:
        inputs: by name, as its forward takes them.

    Returns:
        Where sequences begin.

    Raises:
        EvidenceError: there is neither `input_ids` nor `inputs_embeds`, or the attention mask has another shape than
            (rows, positions) or (rows, 1, queries, keys).
    """
    tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        raise EvidenceError("the decoder was given neither input_ids nor inputs_embeds: pass one of them as a tensor.")
    rows, length = tokens.shape[:2]
    cache = cache_of(inputs)
    past = 0 if cache is None else int(cache.get_seq_length())
    total = past + length
    mask = inputs.get("attention_mask")
    if isinstance(mask, dict):  # one per kind of layer; all hide the same padding
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    documents = None
    if mask is None:
        real = torch.ones(rows, total, dtype=torch.bool, device=tokens.device)
        documents = _documents(inputs.get("position_ids"), rows, length) if not past else None
    elif isinstance(mask, Tensor) and mask.ndim == 2:
        real = _to_length(mask.bool().to(tokens.device).expand(rows, -1), total)
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        visible = (mask if mask.dtype == torch.bool else mask > INVISIBLE).any(1).to(tokens.device).expand(rows, -1, -1)
        real = _to_length(visible.any(1), total)
        documents = _documents_of_matrix(visible) if visible.shape[1] == visible.shape[2] else None
    elif hasattr(mask, "mask_mod"):  # FlexAttention's: padding is hidden inside a function
        real = torch.ones(rows, total, dtype=torch.bool, device=tokens.device)
    else:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise EvidenceError(f"attention_mask {shape}: pass (rows, positions) or (rows, 1, queries, keys), or None.")
    return Sequences(past=past, total=total, real=real, documents=documents)


def cache_of(inputs: dict[str, Any]) -> Any:
    """The cache of keys that a decoder was given, under either of the names that Transformers 5 has had for it."""
    return inputs["cache"] if inputs.get("cache") is not None else inputs.get("past_key_values")


def made_cache(output: Any) -> Any:
    """The cache in what a decoder returned, None where there is none."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((part for part in parts if hasattr(part, "get_seq_length")), None)


def _documents(positions: Any, rows: int, length: int) -> Tensor | None:
    """Numbers of documents from position ids, as Transformers tells them apart; None where each row is one."""
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[-1] != length:
        return None  # positions in several dimensions (images) say nothing about documents
    positions = positions.expand(rows, -1)
    numbers = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return numbers if bool(numbers[:, -1].any()) else None


def _documents_of_matrix(visible: Tensor) -> Tensor | None:
    """The same from which key each query sees: a document begins where a query sees itself and nothing before.

    A query that only misses the position right before it (one that is hidden from all) begins none.
    """
    itself, before = visible.diagonal(dim1=1, dim2=2), visible.tril(-1).any(-1)
    numbers = torch.nn.functional.pad((itself & ~before)[:, 1:], (1, 0)).cumsum(-1)
    return numbers if bool(numbers[:, -1].any()) else None


def _to_length(real: Tensor, total: int) -> Tensor:
    """A mask over as many positions as exist: static caches come with room for more, PEFT's prefixes with more keys."""
    if real.shape[-1] >= total:
        return real[:, :total] if real.shape[-1] > total else real
    return torch.nn.functional.pad(real, (total - real.shape[-1], 0), value=True)


def over_keys(values: Tensor, keys: int) -> Tensor:
    """Values of all positions, (rows, total, ...), for the keys of one layer, whose cache may hold fewer or have room.

    A cache with a window holds the last positions; a static one the first, and room after them.
    """
    values = values[:, max(0, values.shape[1] - keys) :]
    missing = keys - values.shape[1]
    return torch.nn.functional.pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing else values
