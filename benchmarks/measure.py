"""What every benchmark measures in the same way: peak memory, spreads, and what it ran on."""

import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import comppo


def peak_bytes(side: Callable[[], Any]) -> int:
    """Highest running sum of the allocator's events during `side`, results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = side()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    del result
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak


def spread(numbers: list[float]) -> dict[str, float]:
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers)}


def comppo_version() -> str:
    from importlib.metadata import version

    return version(comppo.__name__)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def age_allocator() -> None:
    """Free one block just below the 32 MiB up to which glibc learns to keep memory."""
    torch.ones(31 << 18)
