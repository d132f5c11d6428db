"""Credit on the wrong tokens of the right response: rows that every audit must rank last."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def reversed_in_time(
    credit: Float[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens"]:
    """The last unmasked token gets the credit of the first, and so on; 0 at masked slots."""
    place = mask.cumsum(1) - 1
    length = mask.sum(1, keepdim=True)
    return _reordered(credit, mask, torch.where(mask, length - 1 - place, 0))


def shuffled_in_time(
    credit: Float[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"], generator: torch.Generator
) -> Float[Tensor, "rows tokens"]:
    """Each response's credit in random order over its unmasked tokens; 0 at masked slots.

    The order follows from the generator's state and the mask alone.
    """
    keys = torch.rand(mask.shape, generator=generator, dtype=torch.float64, device=mask.device)
    order = torch.where(mask, keys, 2.0).argsort(1)  # slots of the unmasked tokens in random order, then the masked
    place = (mask.cumsum(1) - 1).clamp(min=0)
    return torch.where(mask, credit.gather(1, order.gather(1, place)), 0.0)


def _reordered(credit: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Credit of the `source`-th unmasked token."""
    slots = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # unmasked slots first, in their order
    return torch.where(mask, credit.gather(1, slots.gather(1, source)), 0.0)
