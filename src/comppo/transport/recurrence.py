"""The scan behind every recursive operator: A[t] = deltas[t] + decays[t] * A[t+1], backwards over the tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from comppo.errors import EvidenceError

# Tokens per chunk. On one CPU thread at (64, 8192) and (512, 2048), 8 took less time than 16 and 32, and stepping
# through the chunks with strides less than transposing them into contiguous memory first.
CHUNK = 8
FEW = 32  # up to here one step per token is quicker


@torch.no_grad()
def carry_back(
    deltas: Float[Tensor, "rows tokens"],
    decays: Float[Tensor, "rows tokens"],
    *,
    terminal: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Solve A[t] = deltas[t] + decays[t] * A[t+1] with A[T] = `terminal`, in O(log T) rounds.

    Nothing is divided, so a decay may be 0. Nothing is differentiated: the result is detached.

    Args:
        deltas: what each token adds, any unit.
        decays: share of later credit that token t keeps, unitless; 1 where masked.
        terminal: A[T] per row, in the unit of the deltas; None means 0.

    Returns:
        A, in the unit of the deltas, with their dtype and device; half precisions are accumulated in float32.

    Raises:
        EvidenceError: the shapes differ.

    Source:
        Linear recurrences as scans: Blelloch 1990, "Prefix sums and their applications", sec. 1.4; chunked so that
        every element is touched a constant number of times.
    """
    if deltas.ndim != 2 or deltas.shape != decays.shape:
        raise EvidenceError(
            f"deltas {tuple(deltas.shape)} and decays {tuple(decays.shape)} must have one shape (rows, tokens)."
        )
    if terminal is not None and terminal.shape != deltas.shape[:1]:
        raise EvidenceError(f"terminal has shape {tuple(terminal.shape)}, but there are {deltas.shape[0]} rows.")
    dtype = working_dtype(deltas, decays)
    credit = deltas.detach().to(dtype, copy=True).contiguous()
    last = credit.new_zeros(credit.shape[0]) if terminal is None else terminal.detach().to(dtype)
    carry_back_(credit, decays.detach().to(dtype, copy=True).contiguous(), last)
    return credit.to(deltas.dtype)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: the widest of `tensors`, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def carry_back_(credit: Tensor, decays: Tensor, terminal: Tensor) -> None:
    """`carry_back` in place: `credit` (rows, tokens) holds the deltas and becomes A; `decays` is used up as scratch."""
    tokens = credit.shape[1]
    chunks = tokens // CHUNK if tokens > FEW else 0
    whole = chunks * CHUNK
    # The ragged end first, token by token; its first entry is what enters the whole chunks.
    ends = credit[:, whole:].unbind(1)
    for delta, decay in zip(reversed(ends), reversed(decays[:, whole:].unbind(1)), strict=True):
        terminal = delta.addcmul_(decay, terminal)
    if not chunks:
        return
    credit, decays = credit[:, :whole].unflatten(1, (chunks, CHUNK)), decays[:, :whole].unflatten(1, (chunks, CHUNK))
    steps, shares = credit.unbind(2), decays.unbind(2)
    for t in range(CHUNK - 2, -1, -1):  # all chunks at once, as if nothing entered them
        steps[t].addcmul_(shares[t], steps[t + 1])
        shares[t].mul_(shares[t + 1])
    heads = steps[0].contiguous()  # what leaves each chunk at its first token
    carry_back_(heads, shares[0].contiguous(), terminal)
    entering = torch.cat((heads[:, 1:], terminal[:, None]), dim=1)
    credit.addcmul_(decays, entering[..., None])
