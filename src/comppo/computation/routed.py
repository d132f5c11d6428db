"""The low-dimensional view of hidden states that a routed summary averages."""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor


@torch.no_grad()
def project(
    hidden: Float[Tensor, "rows positions hidden"], width: int, layer: int
) -> Float[Tensor, "rows positions width"]:
    """Scale each hidden state to unit root mean square and project it by a fixed random matrix.

    The matrix depends on layer and sizes alone, so that what a critic learnt from it means the same in the next run.
    Distances between states survive in expectation (Johnson & Lindenstrauss 1984).

    Args:
        hidden: a layer's input, any floating dtype.
        width: columns of the result.
        layer: chooses the matrix.

    Returns:
        Float32, of order 1, detached.
    """
    states = hidden.detach().float()
    scale = states.square().mean(-1, keepdim=True)
    unit = states * torch.where(scale > 0, scale.rsqrt(), 0.0)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the product to half precision
        projected: Tensor = unit @ _matrix(hidden.shape[-1], width, layer).to(hidden.device)
    return projected


@functools.lru_cache(maxsize=256)
def _matrix(hidden: int, width: int, layer: int) -> Tensor:
    # Whatever torch's default device and dtype are
    generator = torch.Generator("cpu").manual_seed(1_000_003 * layer + width)
    normal = torch.randn(hidden, width, generator=generator, device="cpu", dtype=torch.float32)
    return normal * (1.0 / math.sqrt(hidden))
