"""Every statistic in every layer and head, held against the tokens' true importance."""

from typing import Any

import torch
from torch import Tensor

from comppo.audit.operators import Rollouts
from comppo.audit.proxy import proxy_test
from comppo.audit.truth import TrueAdvantages
from comppo.computation import ComputationReader, emitting_positions, evaluation_mode, readable_layers, score_plainly

STATISTICS = ("collision", "whole_effective_keys", "entropy", "distance", "sink_mass")
"""Attention statistics that are tested, in every layer and head."""
OUTPUT = ("output_entropy", "statistic")
"""Further channels, one number per token: entropy of the output, and the gate's default statistic."""


def read_proxies(
    model: Any, rollouts: Rollouts, truth: TrueAdvantages, every: int, seed: int, micro_batch_size: int
) -> dict[str, Any]:
    """Test all channels together.

    Args:
        model: the behaviour policy.
        rollouts: the audited responses.
        truth: their true advantages.
        every: tokens between valued states.
        seed: of the permutations.
        micro_batch_size: rows per forward.

    Returns:
        JSON types: by statistic its layers and, for each layer a list over heads, `correlation`, `partial` and
        `p_value` (None where undefined); numbers without layer and head have one list of one.
    """
    batch, computation = rollouts.batch, rollouts.computation
    layers = tuple(readable_layers(model))
    channels = [computation.entropies[..., None], computation.statistic[..., None]]
    shapes: list[tuple[str, list[int], int]] = [(name, [], 1) for name in OUTPUT]
    if layers:
        for name, values in _read(model, rollouts, micro_batch_size).items():
            channels.append(values.flatten(2))
            shapes.append((name, list(layers), values.shape[3]))
    tokens = batch.mask.shape[1]
    report = proxy_test(
        torch.cat(channels, 2),
        truth.advantages,
        truth.mask,
        token_ids=batch.completion_ids,
        input_tokens=batch.input_ids[:, -tokens - 1 : -1],
        surprisal=-computation.logps,
        prompts=batch.prompts,
        segments=truth.segments if every > 1 else None,
        seed=seed,
    )
    found: dict[str, Any] = {"units": report.units, "channels": len(report.partial), "statistics": {}}
    at = 0
    for name, own, heads in shapes:
        size = heads * max(1, len(own))
        found["statistics"][name] = {"layers": own} | {
            kind: _rows(getattr(report, kind)[at : at + size], heads) for kind in ("correlation", "partial", "p_value")
        }
        at += size
    return found


def _read(model: Any, rollouts: Rollouts, micro_batch_size: int) -> dict[str, Tensor]:
    """(rows, tokens, layers, heads) of each statistic; 0 at padding."""
    batch = rollouts.batch
    tokens = batch.mask.shape[1]
    positions = emitting_positions(tokens)
    reader = ComputationReader(model, statistics=STATISTICS, layers="all", positions=positions)
    with torch.no_grad(), evaluation_mode(model), reader:
        for ids, attention in zip(
            torch.split(batch.input_ids, micro_batch_size),
            torch.split(batch.attention_mask, micro_batch_size),
            strict=True,
        ):
            score_plainly(model, ids, attention, tokens)
    keep = batch.mask[..., None, None]
    return {name: torch.where(keep, reader.statistic(name).float(), 0.0) for name in STATISTICS}


def _rows(values: Tensor, heads: int) -> list[list[float | None]]:
    return [[None if value != value else value for value in row] for row in values.view(-1, heads).tolist()]
