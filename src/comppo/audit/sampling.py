"""Many continuations of given prefixes: each prefix goes through the model once, then its cache is repeated."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from comppo.errors import ConfigError, UnreadableModelError

CACHE_BYTES = 1 << 30
"""Keys and values of one batch of continuations."""
MOST_ROWS = 2048
"""More rows at a time are no faster, and a wide vocabulary needs memory for each."""
KEEP_SHARE = 0.75
"""Finished rows are taken out of the batch once fewer than this share goes on."""


def rows_that_fit(model: Any, tokens: int, *, cache_bytes: int = CACHE_BYTES) -> int:
    """How many rows of `tokens` tokens have keys and values of at most `cache_bytes`; between 1 and `MOST_ROWS`.

    Args:
        model: a causal language model of Transformers.
        tokens: prompt and response, at least 1.
        cache_bytes: memory for keys and values, bytes.

    Returns:
        Rows, decided by the model's configuration alone: the same on every machine.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return int(max(1, min(MOST_ROWS, cache_bytes // max(1, per_token * tokens))))


@torch.no_grad()
def sample_continuations(
    model: Any,
    prefixes: Sequence[Sequence[int]],
    *,
    count: int,
    limits: Sequence[int],
    eos_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Sample `count` continuations of each prefix from the whole distribution, without cuts.

    The model must be in evaluation mode. Prefixes of one length need no padding; others are padded on the left, and
    positions count from each row's first real token.

    Args:
        model: a causal language model of Transformers with a cache of keys and values.
        prefixes: token ids of prompt and response so far, none empty.
        count: continuations per prefix, at least 1.
        limits: most new tokens, one per prefix, at least 1.
        eos_ids: ids that end a response.
        pad_id: id that fills up on the left.
        temperature: divides the logits, above 0.
        generator: source of random numbers, on the model's device; None: torch's own.

    Returns:
        `count` lists of new ids for the first prefix, then for the second, and so on; each ends with its first id of
        `eos_ids`, where it came within the limit.

    Raises:
        ConfigError: a number out of range, an empty prefix, or not one limit per prefix.
        UnreadableModelError: the model keeps no cache.
    """
    _check(prefixes, count, limits, temperature)
    ids, mask = _left_padded(prefixes, pad_id, model.device)
    padded = not bool(mask.all())
    ends = torch.tensor(list(eos_ids), device=model.device, dtype=torch.long)
    cache, logits, length = _prefill(model, ids, mask if padded else None)
    cache.batch_repeat_interleave(count)
    logits, mask = logits.repeat_interleave(count, 0), mask.repeat_interleave(count, 0)
    limit = torch.tensor(list(limits), device=model.device).repeat_interleave(count)
    rows = torch.arange(len(limit), device=model.device)  # which continuation each row of the batch is
    going = torch.ones_like(rows, dtype=torch.bool)
    new = torch.full((len(limit), max(limits)), pad_id, device=model.device, dtype=torch.long)
    lengths = torch.zeros_like(rows)
    for step in range(max(limits)):
        chosen = _draw(logits, temperature, generator)
        new[rows[going], step] = chosen[going]
        lengths[rows[going]] = step + 1
        going &= ~torch.isin(chosen, ends) & (limit[rows] > step + 1)
        remaining = int(going.sum())
        if not remaining:
            break
        if remaining < KEEP_SHARE * len(rows):
            kept = going.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, mask, chosen, going = rows[kept], mask[kept], chosen[kept], going[kept]
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        logits = _forward(model, chosen[:, None], mask if padded else None, length + step, cache)
    return [row[:n] for row, n in zip(new.tolist(), lengths.tolist(), strict=True)]


def _check(prefixes: Sequence[Sequence[int]], count: int, limits: Sequence[int], temperature: float) -> None:
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count!r}.")
    if not temperature > 0.0:
        raise ConfigError(f"temperature must be above 0, got {temperature!r}.")
    if len(limits) != len(prefixes) or min(limits, default=0) < 1:
        raise ConfigError(f"limits must be one number of at least 1 per prefix, got {list(limits)!r:.80}.")
    if not all(prefixes):
        raise ConfigError("a prefix is empty: each needs at least one token to continue from.")


def _left_padded(
    prefixes: Sequence[Sequence[int]], pad_id: int, device: Any
) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    width = max(map(len, prefixes))
    ids = torch.tensor([[pad_id] * (width - len(prefix)) + list(prefix) for prefix in prefixes], device=device)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
    return ids, torch.arange(width, device=device) >= width - lengths[:, None]


def _prefill(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Any, Tensor, int]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = _forward(model, ids, mask, 0, cache)
    if not cache.get_seq_length():
        raise UnreadableModelError(
            f"{type(model).__name__} keeps no cache of keys and values, which continuations of a prefix need: audit a "
            "model with attention."
        )
    return cache, logits, ids.shape[1]


def _forward(model: Any, ids: Tensor, mask: Tensor | None, start: int, cache: Any) -> Tensor:
    """Logits after the last token of `ids`, whose first one stands at column `start`."""
    if mask is None:
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    else:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:]
    accepted = inspect.signature(model.forward).parameters
    given = {
        "attention_mask": None if mask is None else mask.long(),
        "position_ids": positions,
        "cache" if "cache" in accepted else "past_key_values": cache,
        "logits_to_keep": 1,
    }
    kept = {name: value for name, value in given.items() if name in accepted or name == "past_key_values"}
    logits: Tensor = model(input_ids=ids, use_cache=True, **kept).logits[:, -1]
    return logits


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Int[Tensor, " rows"]:
    probabilities = torch.softmax(logits.float() / temperature, -1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
