"""Rows of evidence prepared for the scan: in one dtype, masked slots made transparent, in reused memory."""

import torch
from torch import Tensor

from comppo.transport.recurrence import carry_back_

# Elements per block of rows: small enough that the scratch of a block stays in a CPU's last-level cache and adds little
# to the peak memory, large enough that the price of about 100 calls does not show.
BLOCK = 1 << 18


def row_blocks(mask: Tensor) -> list[slice]:
    """The blocks of rows to work on in turn: all at once unless on a CPU."""
    rows, tokens = mask.shape
    step = max(1, BLOCK // max(1, tokens)) if mask.device.type == "cpu" else max(1, rows)
    return [slice(start, min(start + step, rows)) for start in range(0, rows if tokens else 0, step)]


class Scratch:
    """Named buffers that the blocks take turns to use: fresh memory cost more here than the arithmetic on it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer with the shape of `like`, at most as many rows as at the first call. Holds anything."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return self._buffers[name][: like.shape[0]]


class Block:
    """Some rows of the evidence in the working dtype. `rewards` and `values` may hold anything at masked slots.

    `keep` has all bits set at unmasked slots and none at masked ones, as integers as wide as the floats: `x & keep`
    clears masked slots whatever stands there, NaN included. torch.where and masked_fill_ do the same, but took eight
    times as long on a CPU.
    """

    def __init__(
        self,
        rows: slice,
        scratch: Scratch,
        rewards: Tensor,
        values: Tensor,
        gates: Tensor,
        mask: Tensor,
        bootstrap: Tensor,
    ) -> None:
        self.dtype, self.scratch, self.bootstrap = bootstrap.dtype, scratch, bootstrap[rows]
        self.rewards, self.values = rewards[rows].detach().to(self.dtype), values[rows].detach().to(self.dtype)
        self.integers = torch.int64 if self.dtype == torch.float64 else torch.int32
        self.keep = scratch.take("keep", mask[rows], self.integers).copy_(mask[rows]).neg_()
        self.gates = self.clear_masked_(self.take("gates").copy_(gates[rows].detach()))

    def take(self, name: str) -> Tensor:
        return self.scratch.take(name, self.rewards, self.dtype)

    def clear_masked_(self, tensor: Tensor) -> Tensor:
        """`tensor` with 0 at masked slots, in place."""
        tensor.view(self.integers).bitwise_and_(self.keep)
        return tensor

    def masked_ones(self, ones: Tensor) -> Tensor:
        """Fill `ones` with 1 at masked slots and 0 elsewhere: as decays they let everything pass masked slots alone."""
        one = int(torch.ones((), dtype=self.dtype).view(self.integers).item())
        torch.bitwise_not(self.keep, out=ones.view(self.integers)).bitwise_and_(one)
        return ones

    def decays(self, scale: float | Tensor, gated: bool, *, spare: Tensor) -> Tensor:
        """`scale` times the gate (1 if not `gated`) at unmasked slots, 1 at masked ones; uses up `spare`."""
        decays = self.take("decays")
        if gated:
            torch.mul(self.gates, scale, out=decays)
        else:
            self.clear_masked_(decays.fill_(1).mul_(scale))
        decays.view(self.integers).bitwise_or_(self.masked_ones(spare).view(self.integers))
        return decays

    def next_values(self, *, work: Tensor, spare: Tensor) -> Tensor:
        """V at the next unmasked token of the row, or the bootstrap value after the last one; uses up its buffers."""
        carried = self.clear_masked_(work.copy_(self.values))
        carry_back_(carried, self.masked_ones(spare), self.bootstrap)
        return torch.cat((carried, self.bootstrap[:, None]), dim=1)[:, 1:]

    def td_errors(self, gamma: float, gate_bootstrap: bool, *, work: Tensor, spare: Tensor) -> Tensor:
        """delta_t in `work`, 0 at masked slots; uses up `spare`."""
        later = self.next_values(work=work, spare=spare)
        if gate_bootstrap:
            later.mul_(self.gates)
        errors = torch.add(self.rewards, later, alpha=gamma, out=work).sub_(self.values)
        return self.clear_masked_(errors)
