"""Whitening of advantages over every trainable token of every process."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from comppo.errors import EvidenceError
from comppo.types import accumulation_dtype

AllReduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over all processes and returns the sum."""


def distributed_sum(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Sum of `tensor` over all processes of the default group; the tensor itself where there is no group.

    Every process must call it, with the same shape and dtype. The input is left as it was.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor
    total = tensor.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def masked_whiten(
    x: Float[Tensor, "rows tokens"],
    mask: Bool[Tensor, "rows tokens"],
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    all_reduce: AllReduce | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Scale to unit variance over the trainable tokens of all processes: `(x - mean) / sqrt(variance + epsilon)`.

    Two passes in float64 (sums, then squared deviations) with the unbiased variance, so that any split of the rows over
    processes gives what one process gives. Exactly two reductions are made, on tensors of 2 numbers.

    Args:
        x: any unit. Whatever stands at masked slots (NaN too) is ignored.
        mask: true at the tokens that count.
        shift_mean: false adds the mean back after scaling, as TRL's and verl's function of this name does.
        epsilon: added to the variance, squared units of `x`.
        all_reduce: sums a small tensor over processes, for example `distributed_sum`; None: this process alone.

    Returns:
        Unitless, 0 at masked slots, dtype of `x`. Inputs that differ by no more than the rounding error of their dtype
        count as constant: they give 0 (the mean where `shift_mean` is false), as does a single token.

    Raises:
        EvidenceError: the shapes differ.
    """
    if x.shape != mask.shape:
        raise EvidenceError(
            f"x has shape {tuple(x.shape)}, but mask has {tuple(mask.shape)}: pass one mask value per value."
        )
    reduce = all_reduce or (lambda tensor: tensor)
    wide = torch.where(mask, x, 0.0).to(accumulation_dtype(x))
    total, count = reduce(torch.stack([wide.sum(), mask.sum().to(wide.dtype)])).unbind()
    mean = total / count.clamp(min=1)
    deviations = torch.where(mask, wide - mean, 0.0)
    squared_deviations, squares = reduce(torch.stack([deviations.square().sum(), wide.square().sum()])).unbind()
    variance = squared_deviations / (count - 1).clamp(min=1)
    # Below this floor the "variance" is rounding noise, which must not be blown up to 1.
    floor = squares / count.clamp(min=1) * torch.finfo(x.dtype).eps ** 2
    whitened = torch.where(variance > floor, deviations * torch.rsqrt(variance + epsilon), deviations * 0.0)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(x.dtype)
