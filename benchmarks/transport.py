"""Comp-GAE against a loop over tokens, torchrl's vectorised GAE and a plain copy of its inputs, on one CPU thread.

    python benchmarks/transport.py --json transport.json

First the answers are compared with a float64 loop over compacted rows; nothing is timed if they differ. The sides then
take turns within each repeat, and ratios are taken within a repeat. Ours includes its checks of shapes and contents.

Page faults can cost more than the arithmetic: a young process returns each freed block to the kernel, and every new one
is paid for again. A training process frees large blocks early on, after which glibc keeps memory up to twice that size.
The benchmark does the same first (one tensor of 31 MiB), for all sides alike; --young leaves it out.

Peak memory is what the allocator reports through torch.profiler's memory events: the highest running sum of bytes
allocated minus bytes freed between the start and the end of one call, results included, over the bytes of one input.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import age_allocator, comppo_version, peak_bytes, processor, spread
from torch import Tensor

from comppo.transport import comp_gae
from comppo.transport.reference import comp_gae_loop

SIZES = [(64, 512), (64, 2048), (64, 8192), (512, 2048)]
GAMMA, LAM = 1.0, 0.95
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TORCHRL_ROUNDS = 3  # it takes seconds each
TORCHRL_TENSORS = 2.4  # peak in (rows, tokens, tokens) tensors, by `peak_bytes` at (16, 256)


def make_inputs(batch: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Right-padded rows of 40 to 100 % of the length, a reward at the end, gates near 1, NaN where masked."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(int(0.4 * tokens), tokens + 1, (batch, 1), generator=generator)
    position = torch.arange(tokens)
    mask = position < lengths
    rewards = torch.where(position == lengths - 1, torch.randn(batch, 1, generator=generator), 0.0)
    values = torch.randn(batch, tokens, generator=generator)
    gates = 0.9 + 0.1 * torch.rand(batch, tokens, generator=generator)
    inputs = {"rewards": rewards, "values": values, "gates": gates}
    return {name: torch.where(mask, tensor, torch.nan) for name, tensor in inputs.items()} | {"mask": mask}


def ours(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    credit = comp_gae(**inputs, gamma=GAMMA, lam=LAM)  # type: ignore[arg-type]
    return credit.advantages, credit.returns


def loop(rewards: Tensor, values: Tensor, gates: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One Python step per token over columns of all rows; masked tokens hand value and trace on unchanged."""
    keep = mask.to(values.dtype)
    next_value = torch.zeros_like(values[:, 0])
    trace = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(values.shape[1])):
        discount = GAMMA * gates[:, t]
        delta = rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + LAM * discount * trace
        next_value = keep[:, t] * values[:, t] + (1 - keep[:, t]) * next_value
        trace = keep[:, t] * advantage + (1 - keep[:, t]) * trace
        columns.append(trace)
    advantages = torch.stack(columns[::-1], dim=1) * keep
    return advantages, (advantages + values) * keep


def copy(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in inputs.values()]


def torchrl_side(inputs: dict[str, Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    """torchrl's vectorised GAE with one discount per token. Its tensors are laid out before the clock starts."""
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    mask = inputs["mask"]
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    values = inputs["values"].nan_to_num()[..., None]
    following = torch.nn.functional.pad(values[:, 1:], (0, 0, 0, 1))
    rewards, discount = inputs["rewards"].nan_to_num()[..., None], GAMMA * inputs["gates"].nan_to_num()[..., None]

    def side() -> tuple[Tensor, Tensor]:
        advantages, returns = vec_generalized_advantage_estimate(
            discount, LAM, values, following, rewards, last[..., None], last[..., None]
        )
        return advantages[..., 0] * mask, returns[..., 0] * mask

    return side


def check(name: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Stop unless the answers agree to float32's rounding."""
    for part, left, right in zip(("advantages", "returns"), got, expected, strict=True):
        gap = float((left.double() - right.double()).abs().max())
        if not gap <= 1e-4:
            sys.exit(f"{name}: {part} differ by {gap:.3g}; nothing is timed.")


def check_answers(inputs: dict[str, Tensor], clean: dict[str, Tensor]) -> None:
    batch = min(len(inputs["mask"]), 8)  # the float64 loop is slow, and rows are independent
    few = {name: tensor[:batch] for name, tensor in inputs.items()}
    result = ours(inputs)
    check(
        "ours against the float64 loop",
        (result[0][:batch], result[1][:batch]),
        comp_gae_loop(**few, gamma=GAMMA, lam=LAM),
    )
    check("ours against the float32 loop", result, loop(**clean))


def milliseconds(side: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    result = side()
    elapsed = clock() - start
    del result  # freed after the clock has stopped, for every side alike
    return 1e3 * elapsed


def measure(batch: int, tokens: int, repeats: int, limit: float, clock: str) -> dict[str, Any]:
    inputs = make_inputs(batch, tokens)
    clean = {name: tensor.nan_to_num() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    check_answers(inputs, clean)
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(inputs),
        "loop": lambda: loop(**clean),
        "copy": lambda: copy(inputs),
    }
    estimate = TORCHRL_TENSORS * 4 * batch * tokens**2
    skipped = f"skipped: memory (about {estimate / 1e9:.1f} GB)" if estimate > limit * 1e9 else ""
    if not skipped:
        try:
            sides["torchrl"] = torchrl_side(inputs)
            check("torchrl", sides["torchrl"](), ours(inputs))
        except ImportError:
            skipped = "skipped: torchrl is not installed"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            if name == "torchrl" and repeat > TORCHRL_ROUNDS:
                continue
            elapsed = milliseconds(sides[name], CLOCKS[clock])
            if repeat:  # the first round warms up
                times[name].append(elapsed)
    mine = times["ours"]
    ratios = {name: [theirs / own for theirs, own in zip(times[name], mine, strict=False)] for name in times}
    return {
        "batch": batch,
        "tokens": tokens,
        **{
            f"{name}_ms": statistics.median(times[name]) if name in times else None
            for name in ("ours", "loop", "copy", "torchrl")
        },
        "loop_over_ours": statistics.median(ratios["loop"]),
        "copy_ratio": statistics.median(1 / ratio for ratio in ratios["copy"]),
        "torchrl_over_ours": statistics.median(ratios["torchrl"]) if "torchrl" in ratios else None,
        "torchrl_note": skipped,
        "peak_extra_tensors": peak_bytes(sides["ours"]) / (4 * batch * tokens),
        "loop_over_ours_spread": spread(ratios["loop"]),
        "copy_ratio_spread": spread([1 / ratio for ratio in ratios["copy"]]),
        "repeats": repeats,
        "clock": clock,
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "versions": {"comppo": comppo_version(), "torch": torch.__version__, "python": platform.python_version()},
        "processor": processor(),
    }


def show(record: dict[str, Any]) -> None:
    ratio, copies = record["loop_over_ours_spread"], record["copy_ratio_spread"]
    torchrl = f"{record['torchrl_ms']:.1f} ms" if record["torchrl_ms"] else record["torchrl_note"]
    print(
        f"({record['batch']}, {record['tokens']}): ours {record['ours_ms']:.2f} ms, loop {record['loop_ms']:.1f} ms, "
        f"copy {record['copy_ms']:.2f} ms, torchrl {torchrl}\n"
        f"    loop / ours  min {ratio['min']:.1f}  median {ratio['median']:.1f}  max {ratio['max']:.1f}\n"
        f"    ours / copy  min {copies['min']:.1f}  median {copies['median']:.1f}  max {copies['max']:.1f}\n"
        f"    peak memory of ours: {record['peak_extra_tensors']:.2f} tensors of the input's size, results included",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds per size")
    parser.add_argument("--torchrl-gb", type=float, default=6.0, help="skip torchrl above this estimate of its memory")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu counts this process's own time: for a machine that is shared",
    )
    parser.add_argument("--sizes", nargs="*", default=[], metavar="BxT", help="other sizes, such as 64x512")
    parser.add_argument("--young", action="store_true", help="leave the allocator as it is at the start of a process")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes] or SIZES
        sizes = [(batch, tokens) for batch, tokens in sizes]
    except ValueError:
        parser.error("--sizes takes pairs such as 64x512")
    torch.set_num_threads(1)
    if not arguments.young:
        age_allocator()
    print(
        f"{processor()}, 1 thread, float32, torch {torch.__version__}, "
        f"{arguments.repeats} repeats, {arguments.clock} clock"
    )
    records = []
    for batch, tokens in sizes:
        records.append(
            {"young": arguments.young}
            | measure(batch, tokens, arguments.repeats, arguments.torchrl_gb, arguments.clock)
        )
        show(records[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
