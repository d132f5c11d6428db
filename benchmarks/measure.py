"""What every benchmark measures in the same way: peak memory, spreads, and what it ran on."""

import platform
import statistics
from pathlib import Path

import torch

import comppo
from comppo.computation.cost import peak_bytes

__all__ = ["age_allocator", "comppo_version", "peak_bytes", "processor", "spread"]


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
