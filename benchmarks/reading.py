"""What it costs to read attention: a plain forward, eager attention with its matrices, and comppo's reader.

    python benchmarks/reading.py --json reading.json

The model has SmolLM2-135M's shapes and random weights, batch 1, one thread; logits are made for the last position only,
so that their memory and time hide nothing. The modes take turns within each round of one process, in alternating
order; time is this process's CPU time, and ratios are taken within a round.

- plain: forward under sdpa.
- eager: `output_attentions=True` under eager attention, and the sink-excluded collision from its matrices.
- all_layers: the same from `ComputationReader(statistics=("collision",), layers="all")` under sdpa.
- default: `ComputationReader` with its default settings.

First the statistics are compared, eager against all_layers; nothing is timed if they differ. Eager attention at 8192
tokens needs 2.4 GB per layer and as much again for a while, so there the model has three layers, of which the default
reads one. Peak memory is that of the model's weights and the highest running sum of what torch allocates during one
forward, results included; `working_mb` leaves the weights out.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from measure import age_allocator, comppo_version, peak_bytes, processor, spread
from torch import Tensor

from comppo.computation import DEFAULT_STATISTIC, ComputationReader

LENGTHS = "512:30,2048:30,8192:3"
MODES = ("plain", "eager", "all_layers", "default")


def make_model(layers: int, implementation: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def sides(tokens: int, layers: int, modes: list[str]) -> tuple[dict[str, Callable[[], Any]], int]:
    """One callable per mode, each of which returns what it read, (tokens, layers); and the bytes of the weights."""
    model = make_model(layers, "sdpa")
    eager = make_model(layers, "eager") if "eager" in modes else None
    ids = torch.randint(3, 49000, (1, tokens), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}

    def from_matrices() -> Tensor:
        collisions = []
        for matrix in eager(**inputs, output_attentions=True).attentions:
            rest = matrix[..., 1:]
            collisions.append((rest.square().sum(-1) / rest.sum(-1).square().clamp_min(1e-30)).mean(1))
        return torch.stack(collisions, -1)[0]

    def reading(**settings: Any) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with ComputationReader(model, **settings) as reader:
                model(**inputs)
            return reader.statistic(settings.get("statistics", (DEFAULT_STATISTIC,))[0]).mean(-1)[0]

        return read

    every: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(**inputs),
        "eager": from_matrices,
        "all_layers": reading(statistics=("collision",), layers="all"),
        "default": reading(),
    }
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {mode: every[mode] for mode in modes}, weights


def check_answers(run: dict[str, Callable[[], Any]]) -> None:
    if "eager" in run and "all_layers" in run:
        gap = float((run["eager"]() - run["all_layers"]())[1:].abs().max())
        if not gap <= 1e-5:
            sys.exit(f"the reader differs from eager attention's matrices by {gap:.2g}: nothing is timed")
        print(f"  largest difference from eager attention's matrices: {gap:.1e}")


@torch.no_grad()
def measure(tokens: int, layers: int, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    run, weights = sides(tokens, layers, modes)
    check_answers(run)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(rounds + 1):
        for mode in modes[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            result = run[mode]()
            elapsed = time.process_time() - start
            del result
            if turn:  # the first round warms up
                seconds[mode].append(elapsed)
    peaks = {mode: peak_bytes(run[mode]) for mode in modes}
    records = []
    for mode in modes:
        ratios = [own / plain for own, plain in zip(seconds[mode], seconds["plain"], strict=True)]
        records.append(
            {
                "tokens": tokens,
                "mode": mode,
                "cpu_s": statistics.median(seconds[mode]),
                "peak_mb": (weights + peaks[mode]) / 1e6,
                "ratio_to_plain": statistics.median(ratios),
                "ratio_spread": spread(ratios),
                "peak_ratio_to_plain": (weights + peaks[mode]) / (weights + peaks["plain"]),
                "working_mb": peaks[mode] / 1e6,
                "working_ratio_to_plain": peaks[mode] / peaks["plain"],
                "layers": layers,
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "versions": {"comppo": comppo_version(), "torch": torch.__version__},
                "processor": processor(),
            }
        )
    return records


def show(record: dict[str, Any]) -> None:
    ratio = record["ratio_spread"]
    print(
        f"  {record['mode']:<10} {record['cpu_s']:8.2f} s  x{record['ratio_to_plain']:.3f} "
        f"(min {ratio['min']:.3f}, max {ratio['max']:.3f})  peak {record['peak_mb']:8.1f} MB  "
        f"x{record['peak_ratio_to_plain']:.2f}  without weights {record['working_mb']:7.1f} MB  "
        f"x{record['working_ratio_to_plain']:.2f}",
        flush=True,
    )


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Write the records here.")
@click.option("--lengths", default=LENGTHS, show_default=True, help="TOKENS:LAYERS, separated by commas.")
@click.option("--modes", default=",".join(MODES), show_default=True, help="Which modes, plain among them.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Timed rounds per length.")
def main(path: Path | None, lengths: str, modes: str, rounds: int) -> None:
    """Time the reading of attention on SmolLM2-135M's shapes."""
    chosen = modes.split(",")
    if "plain" not in chosen or set(chosen) - set(MODES):
        raise click.BadParameter(f"{modes!r}: choose among {', '.join(MODES)}, with plain.", param_hint="--modes")
    try:
        sizes = [(int(tokens), int(layers)) for tokens, layers in (size.split(":") for size in lengths.split(","))]
    except ValueError:
        raise click.BadParameter(f"{lengths!r}: pass pairs such as 512:30.", param_hint="--lengths") from None
    torch.set_num_threads(1)
    age_allocator()
    print(f"{processor()}, 1 thread, float32, torch {torch.__version__}, {rounds} rounds")
    records = []
    for tokens, layers in sizes:
        print(f"{tokens} tokens, {layers} layers", flush=True)
        for record in measure(tokens, layers, chosen, rounds):
            records.append(record)
            show(record)
        if path:
            path.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
