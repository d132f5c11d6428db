"""Random rollouts in float64 with holes, padding on both sides, empty rows and gates of exactly 0 and 1."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def make_rollout():
    def make(seed: int, rows: int, tokens: int, *, keep: float = 0.7) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        gates = (1.4 * uniform(rows, tokens) - 0.2).clamp(0, 1)
        position = torch.arange(tokens)
        start = (uniform(rows, 1) * tokens / 3).long()
        end = tokens - (uniform(rows, 1) * tokens / 3).long()
        mask = (uniform(rows, tokens) < keep) & (position >= start) & (position < end)
        return SimpleNamespace(
            rewards=normal(rows, tokens),
            values=normal(rows, tokens),
            gates=gates,
            mask=mask,
            bootstrap_values=normal(rows),
            weights=uniform(rows, tokens) * (uniform(rows, tokens) < 0.8),
            ids=torch.randint(0, 3, (rows, tokens), generator=generator),
        )

    return make


@pytest.fixture(scope="session")
def poison():
    def poison(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`tensor` with NaN, infinities and nonsense at masked slots."""
        junk = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30], dtype=tensor.dtype)
        index = torch.arange(mask.numel()).view(mask.shape) % 4
        return torch.where(mask, tensor, junk[index])

    return poison
