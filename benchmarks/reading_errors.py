"""Rounding errors of the streaming sums: float32 sums of float32 and bfloat16 inputs against float64 softmax rows.

    python benchmarks/reading_errors.py --json errors.json

Random queries and keys, causal, one head of width 64, the first key a sink. `spread` is the standard deviation of the
scores: 1 attends to nearly everything, 20 to a single key. The reference takes the same (rounded) inputs and computes
everything in float64, so what is shown is the sums' own error and that of the scores, not the inputs' rounding. Errors
are relative for collision, maximum and sink mass, absolute in nats for entropy and in tokens for distance.
"""

import json
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from comppo.computation import attention_statistics

LENGTHS, SPREADS = (64, 512, 4096), (1.0, 5.0, 20.0)


def reference(query: Tensor, key: Tensor, sinks: Tensor) -> dict[str, Tensor]:
    scores = (query.double() @ key.double().transpose(-1, -2))[0, 0]
    n = len(scores)
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril()
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    rest = scores.masked_fill(hidden | sinks[0], -torch.inf).softmax(-1).nan_to_num(0.0)
    away = torch.arange(n)[:, None] - torch.arange(n)
    return {
        "rest_collision": rest.square().sum(-1),
        "rest_maximum": rest.amax(-1),
        "sink_mass": (p * sinks[0]).sum(-1),
        "rest_entropy": torch.special.entr(rest).sum(-1),
        "rest_distance": (rest * away).sum(-1),
    }


def measure(tokens: int, spread: float, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    query = (torch.randn(1, 1, tokens, 64, generator=generator) * spread / 8).to(dtype)
    key = torch.randn(1, 1, tokens, 64, generator=generator).to(dtype)
    sinks = torch.arange(tokens)[None] < 1
    got = attention_statistics(query, key, scale=1.0, sinks=sinks, distance=True)
    errors = {}
    for name, want in reference(query, key, sinks).items():
        error = (getattr(got, name)[0, 0].double() - want).abs()
        if name not in ("rest_entropy", "rest_distance"):
            error = error / want.clamp_min(1e-12)
        errors[name] = float(error[1:].max())
    return {"tokens": tokens, "spread": spread, "dtype": str(dtype).removeprefix("torch."), "errors": errors}


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the records here.")
def main(path: Path | None) -> None:
    """Compare the streaming sums with float64 rows."""
    records = []
    names = "rest_collision", "rest_maximum", "sink_mass", "rest_entropy", "rest_distance"
    print("| tokens | spread | inputs | " + " | ".join(name.removeprefix("rest_") for name in names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in LENGTHS:
            for spread in SPREADS:
                record = measure(tokens, spread, dtype)
                records.append(record)
                errors = " | ".join(f"{record['errors'][name]:.1e}" for name in names)
                print(f"| {tokens} | {spread:g} | {record['dtype']} | {errors} |", flush=True)
    if path:
        path.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
