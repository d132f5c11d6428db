"""What reading costs on this machine: time and peak memory of a forward with and without it."""

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comppo.computation.reader import ComputationReader
from comppo.computation.summaries import DEFAULT_STATISTIC
from comppo.errors import ConfigError

MODES = ("plain", "default", "all_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One way to run a forward at one length."""

    tokens: int
    """Of the one row."""
    mode: str
    """"plain" (nothing is read), "default" (a reader's default settings) or "all_layers" (the same in every layer)."""
    layers: int
    """How many layers were read."""
    seconds: float
    """Median over the rounds; CPU time of this process (summed over its threads), or time on the GPU."""
    ratio: float
    """To the plain forward of the same round; median."""
    least_ratio: float
    """The least over the rounds."""
    greatest_ratio: float
    """The greatest over the rounds."""
    peak_bytes: int
    """Most memory that tensors held above what they held before, results included."""
    peak_ratio: float
    """To the plain forward; NaN where that allocated nothing."""


@torch.no_grad()
def measure_cost(
    model: nn.Module,
    input_ids: Int[Tensor, "1 tokens"],
    *,
    layers: Sequence[int],
    rounds: int = 3,
) -> tuple[Cost, ...]:
    """Time a plain forward, one that is read with the default settings, and one that is read in all layers.

    The modes take turns within each round, in alternating order, after one round that warms up and measures memory.
    Logits are made for the last position only, where the model can do so: their memory and time would hide the rest.

    Args:
        model: a causal language model of Transformers, in eval mode.
        input_ids: on the model's device.
        layers: `layer_idx` of all layers that can be read, for "all_layers".
        rounds: timed rounds, at least 1.

    Returns:
        One per mode, in the order of `MODES`.

    Raises:
        ConfigError: `rounds` is not positive.
        UnreadableModelError: a layer cannot be read.
    """
    if rounds < 1:
        raise ConfigError(f"rounds={rounds!r}: pass a positive number of rounds.")
    inputs = {"input_ids": input_ids, "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    readers = {"default": ComputationReader(model), "all_layers": ComputationReader(model, layers=tuple(layers))}

    def plain() -> Any:
        return model(**inputs)

    def reading(reader: ComputationReader) -> Callable[[], Any]:
        def read() -> Any:
            with reader:
                output = model(**inputs)
            return output, reader.summary(DEFAULT_STATISTIC)

        return read

    sides = {"plain": plain} | {mode: reading(reader) for mode, reader in readers.items()}
    peaks = {mode: peak_bytes(side, input_ids.device) for mode, side in sides.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(rounds):
        for mode in MODES[:: 1 if turn % 2 else -1]:
            seconds[mode].append(_seconds_of(sides[mode], input_ids.device))
    return tuple(_cost(mode, input_ids.shape[1], readers, seconds, peaks) for mode in MODES)


def _cost(
    mode: str,
    tokens: int,
    readers: dict[str, ComputationReader],
    seconds: dict[str, list[float]],
    peaks: dict[str, int],
) -> Cost:
    ratios = [own / plain if plain else 1.0 for own, plain in zip(seconds[mode], seconds["plain"], strict=True)]
    return Cost(
        tokens=tokens,
        mode=mode,
        layers=len(readers[mode].layers) if mode in readers else 0,
        seconds=statistics.median(seconds[mode]),
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
        peak_bytes=peaks[mode],
        peak_ratio=peaks[mode] / peaks["plain"] if peaks["plain"] else float("nan"),
    )


def _seconds_of(side: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        result = side()
        end.record()
        torch.cuda.synchronize(device)
        elapsed = float(start.elapsed_time(end)) / 1e3
    else:
        began = time.process_time()
        result = side()
        elapsed = time.process_time() - began
    del result
    return elapsed


def peak_bytes(side: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most memory that tensors held at once during `side`, above what they held before.

    Args:
        side: what is run; its result counts as long as it runs.
        device: whose memory; on a CPU the allocator's events are added up, which a profiler records.

    Returns:
        Bytes.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = side()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = side()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak
