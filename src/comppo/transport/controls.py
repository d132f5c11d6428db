"""Controls: gate transforms that keep what a gate's values are and change where they stand.

If an arm gains only because its gates are small or large on average, or early or late, a control gains as much.
"""

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.errors import ConfigError
from comppo.transport._checks import require_shapes
from comppo.transport.gate import Reduce


class GateControl(Protocol):
    """Gates and mask, both (rows, tokens), to gates of the same shape; 1 at masked slots."""

    def __call__(
        self,
        gates: Float[Tensor, "rows tokens"],
        mask: Bool[Tensor, "rows tokens"],
        *,
        generator: torch.Generator | None = None,
        reduce: Reduce | None = None,
    ) -> Float[Tensor, "rows tokens"]: ...


@torch.no_grad()
def shuffled(
    gates: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    generator: torch.Generator | None = None,
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """A response's gates in random order over its unmasked tokens. Keeps the multiset of each response.

    Args:
        gates: unitless.
        mask: true where the policy chose the token.
        generator: source of the order, on the device of the gates; required, so that runs can be repeated.
        reduce: not used.

    Returns:
        Gates, dtype as given; 1 at masked slots.

    Raises:
        ConfigError: no generator.
        EvidenceError: the shapes differ.
    """
    require_shapes(mask, gates=gates)
    if generator is None:
        raise ConfigError("shuffled needs generator, which is None: pass torch.Generator(device).manual_seed(seed).")
    keys = torch.rand(mask.shape, generator=generator, device=mask.device, dtype=torch.float64)
    return _move(gates, mask, source=torch.where(mask, keys, 2.0).argsort(1), target=_unmasked_first(mask))


@torch.no_grad()
def inverted(
    gates: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    generator: torch.Generator | None = None,
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """A response's gates in reverse rank: the largest goes where the smallest was. Keeps the multiset of each response.

    Among equal gates the earlier token counts as the smaller one.

    Args:
        gates: unitless.
        mask: true where the policy chose the token.
        generator: not used.
        reduce: not used.

    Returns:
        Gates, dtype as given; 1 at masked slots.

    Raises:
        EvidenceError: the shapes differ.
    """
    require_shapes(mask, gates=gates)
    rising = torch.where(mask, gates.detach(), torch.inf).argsort(dim=1, stable=True)  # masked slots last
    lengths = mask.sum(1, keepdim=True)
    rank = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    mirrored = torch.where(rank < lengths, lengths - 1 - rank, rank)
    return _move(gates, mask, source=rising.gather(1, mirrored), target=rising)


@torch.no_grad()
def position_mean(
    gates: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    generator: torch.Generator | None = None,
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Every gate becomes the batch mean at its position, counted in unmasked tokens.

    Keeps the batch mean at each position, and with it the batch mean, but neither the spread at a position nor the
    multiset of a response. Where rows have different bounds, a mean may lie outside a row's own, never outside [0, 1].

    Args:
        gates: unitless.
        mask: true where the policy chose the token.
        generator: not used.
        reduce: sums a tensor of shape (2, tokens) over processes, which must all have the same number of tokens.

    Returns:
        Gates, dtype as given; 1 at masked slots.

    Raises:
        EvidenceError: the shapes differ.
    """
    require_shapes(mask, gates=gates)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    kept = torch.where(mask, gates.detach(), 0).double()
    sums = torch.zeros(2, mask.shape[1], dtype=torch.float64, device=mask.device)
    sums[0].scatter_add_(0, position.flatten(), kept.flatten())
    sums[1].scatter_add_(0, position.flatten(), mask.double().flatten())
    total, count = (reduce(sums) if reduce else sums).unbind()
    means = (total / count.clamp(min=1))[position]
    return torch.where(mask, means, 1).to(gates.dtype)


@torch.no_grad()
def constant(
    gates: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    generator: torch.Generator | None = None,
    reduce: Reduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Every gate becomes the batch mean. Keeps the batch mean and nothing else.

    Args:
        gates: unitless.
        mask: true where the policy chose the token.
        generator: not used.
        reduce: sums a tensor of shape (2,) over processes.

    Returns:
        Gates, dtype as given; 1 at masked slots.

    Raises:
        EvidenceError: the shapes differ.
    """
    require_shapes(mask, gates=gates)
    sums = torch.stack((torch.where(mask, gates.detach(), 0).double().sum(), mask.sum().double()))
    total, count = (reduce(sums) if reduce else sums).unbind()
    return torch.where(mask, total / count.clamp(min=1), 1).to(gates.dtype)


def _unmasked_first(mask: Tensor) -> Tensor:
    """Indices of the unmasked slots of each row in order, then of the masked ones."""
    return (~mask).to(torch.uint8).argsort(dim=1, stable=True)


def _move(gates: Tensor, mask: Tensor, *, source: Tensor, target: Tensor) -> Tensor:
    moved = torch.empty_like(gates).scatter_(1, target, gates.detach().gather(1, source))
    return torch.where(mask, moved, 1)


CONTROLS: dict[str, GateControl] = {
    "shuffled": shuffled,
    "position_mean": position_mean,
    "constant": constant,
    "inverted": inverted,
}
