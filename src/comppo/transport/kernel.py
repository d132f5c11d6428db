"""The causal kernel as a matrix, for inspection and tests: it takes tokens squared, training never builds it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from comppo.transport._checks import require_shapes


@torch.no_grad()
def transport_kernel(
    decays: Float[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens tokens"]:
    """K[b, t, u] = product of decays[b, i] over the unmasked i with t <= i < u, for unmasked t <= u; else 0.

    `(K @ deltas[..., None])[..., 0]` solves A[t] = deltas[t] + decays[t] * A[t+1].

    Args:
        decays: share of later credit that token t keeps, unitless; whatever stands at masked slots is ignored.
        mask: true where the policy chose the token.

    Returns:
        Unitless, at least float32, detached. 4 * rows * tokens**2 bytes in float32: meant for a few rows.

    Raises:
        EvidenceError: the shapes differ.

    Source:
        docs/mathematics.md, "Comp-GAE", property 2.
    """
    require_shapes(mask, decays=decays)
    decays = decays.detach().to(torch.promote_types(torch.float32, decays.dtype))
    tokens = mask.shape[1]
    steps = torch.where(mask, decays, 1)
    # Row t of the running product starts at u = t with 1 and takes in decays[u - 1] at each later u.
    factors = torch.cat((torch.ones_like(steps[:, :1]), steps[:, :-1]), dim=1)[:, :tokens]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(1)
    products = torch.where(later, factors[:, None, :], 1).cumprod(2)
    return products * (mask[:, :, None] & mask[:, None, :]).triu()
