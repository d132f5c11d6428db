"""What a reader has read so far: a batch of rows per forward, or per run of forwards that share a growing cache."""

from collections.abc import Hashable

import torch
from torch import Tensor

from comppo.errors import EvidenceError


class Store:
    """Tensors (rows, tokens, ...) by key; batches follow each other along rows, a batch's parts along tokens."""

    def __init__(self) -> None:
        """Nothing was read."""
        self.batches: list[dict[Hashable, list[Tensor]]] = []
        self._added: list[Hashable] = []
        self._new_rows = True

    def begin(self, new_rows: bool) -> None:
        """A forward begins: with rows of its own, or with further tokens of the last one's."""
        self._added.clear()
        self._new_rows = new_rows or not self.batches
        if self._new_rows:
            self.batches.append({})

    def take_back(self) -> None:
        """Forget the last forward, which did not end."""
        for key in self._added:
            self.batches[-1][key].pop()
        self._added.clear()
        if self._new_rows and self.batches:
            self.batches.pop()

    def add(self, key: Hashable, values: Tensor) -> None:
        """Keep one forward's values, float32."""
        self._added.append(key)
        self.batches[-1].setdefault(key, []).append(values.float().contiguous())

    def last(self, key: Hashable) -> Tensor | None:
        """The last token's values that the current batch has so far, (rows, 1, ...)."""
        parts = self.batches[-1].get(key)
        return parts[-1][:, -1:] if parts else None

    def parts(self, key: Hashable) -> int:
        """How many forwards gave values for `key`."""
        return sum(len(batch.get(key, ())) for batch in self.batches)

    def whole(self, key: Hashable) -> Tensor:
        """All values of `key`, to be read only; EvidenceError where batches differ in their number of tokens.

        Nothing is copied that is in one piece already: hidden states are large.
        """
        rows = [_joined(batch[key], 1) for batch in self.batches]
        lengths = sorted({values.shape[1] for values in rows})
        if len(lengths) > 1:
            raise EvidenceError(
                f"forwards in one context read {lengths} tokens: pad all micro-batches to one length, choose as many "
                "`positions` in each, or read each in a context of its own."
            )
        return _joined(rows, 0)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
