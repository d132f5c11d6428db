"""Blocks of attention scores: products of query and key with every kind of mask, or scores that a model made itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comppo.computation.attention_rows import INVISIBLE, INVISIBLE_SCORE, MASKED, MaskFunction, ScoreFunction


@dataclass(kw_only=True, slots=True, eq=False)
class Products:
    """Scores of query times key; fields as in `attention_statistics`, `key` contiguous in the sums' dtype."""

    query: Tensor
    key: Tensor
    scale: float
    mask: Tensor | MaskFunction | None
    causal: bool
    window: int | None
    softcap: float | None
    score_function: ScoreFunction | None
    documents: Tensor | None
    first_row: int = 0
    """Index of row 0 in the whole call, for the functions."""
    _scaled: tuple[int, int, Tensor] | None = None
    """The queries of the current block, made once for all of its keys."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def like(self) -> Tensor:
        """A tensor with the sums' dtype and device."""
        return self.key

    def of_rows(self, part: slice) -> "Products":
        """The same for some rows of the batch."""
        shared = not isinstance(self.mask, Tensor) or self.mask.shape[0] == 1
        return replace(
            self,
            query=self.query[part],
            key=self.key[part],
            mask=self.mask if shared else self.mask[part],  # type: ignore[index]
            documents=None if self.documents is None else self.documents[part],
            first_row=self.first_row + part.start,
            _scaled=None,
        )

    def keys_of(self, q0: int, q1: int) -> tuple[int, int]:
        """First and last + 1 of the keys that queries q0 .. q1 - 1 may see."""
        n_keys = self.key.shape[2]
        offset = n_keys - self.query.shape[2]
        lowest = 0 if self.window is None else max(0, offset + q0 - self.window + 1)
        return lowest, min(n_keys, offset + q1) if self.causal else n_keys

    def block(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor | None, Tensor | None]:
        """Scores of a block and which keys are visible; see `ScoreSource`."""
        keep = self._keep(q0, q1, k0, k1)
        if keep is not None and keep.device.type == "cpu" and not bool(keep.any()):
            return None, None  # on an accelerator the question would cost more than the block
        key = self.key.flatten(0, 1)[:, k0:k1]
        scores = torch.bmm(self._queries(q0, q1), key.transpose(1, 2)).view(*self.shape[:2], q1 - q0, k1 - k0)
        return self._adjust(scores, keep, q0, q1, k0, k1), keep

    def _queries(self, q0: int, q1: int) -> Tensor:
        """Scaled queries; heads that share a key head become further rows of one product, so no key is repeated."""
        if self._scaled is None or self._scaled[:2] != (q0, q1):
            n_rows, kv_heads, _, width = self.key.shape
            query = self.query[:, :, q0:q1].to(self.key.dtype) * self.scale
            folded = (q1 - q0) * (self.query.shape[1] // kv_heads)
            self._scaled = q0, q1, query.reshape(n_rows * kv_heads, folded, width)
        return self._scaled[2]

    def _keep(self, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
        """Which keys of the block are visible, broadcastable to (rows, heads, queries, keys); None = all of them."""
        keep = None
        if isinstance(self.mask, Tensor):
            part = self.mask[..., q0:q1, k0:k1]
            keep = part if part.dtype == torch.bool else part > INVISIBLE
        elif self.mask is not None:
            keep = self._from_function(self.mask, q0, q1, k0, k1)
        offset = self.key.shape[2] - self.query.shape[2]
        positions = torch.arange(q0 + offset, q1 + offset, device=self.key.device)
        keys = torch.arange(k0, k1, device=self.key.device)
        cut_above = self.causal and k1 - 1 > offset + q0
        cut_below = self.window is not None and k0 <= offset + q1 - 1 - self.window
        if cut_above or cut_below:
            near = keys <= positions[:, None]
            if self.window is not None:
                near &= keys > positions[:, None] - self.window
            keep = near[None, None] if keep is None else keep & near
        if self.documents is not None:
            own = (self.documents[:, positions, None] == self.documents[:, None, k0:k1])[:, None]
            keep = own if keep is None else keep & own
        return keep

    def _adjust(self, scores: Tensor, keep: Tensor | None, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """Softcap, the caller's function, additive mask and hidden keys."""
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.score_function is not None:
            changed = self._from_function(self.score_function, q0, q1, k0, k1, scores)
            scores = changed.to(scores.dtype).contiguous()
        if isinstance(self.mask, Tensor) and self.mask.dtype != torch.bool:
            scores = scores.add_(self.mask[..., q0:q1, k0:k1].to(scores.dtype))
        return scores if keep is None else scores.masked_fill_(~keep, MASKED)

    def _from_function(
        self, function: Callable[..., Tensor], q0: int, q1: int, k0: int, k1: int, *scores: Tensor
    ) -> Tensor:
        """A function of single indices, mapped over the block as FlexAttention maps it."""
        over = 0 if scores else None
        lead = (over,) * len(scores)
        for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            function = torch.vmap(function, in_dims=(*lead, *axes))
        n_rows, n_heads = self.query.shape[:2]
        rows = torch.arange(self.first_row, self.first_row + n_rows, device=self.key.device)
        ranges = ((0, n_heads), (q0, q1), (k0, k1))
        heads, queries, keys = (torch.arange(*ends, device=self.key.device) for ends in ranges)
        return function(*scores, rows, heads, queries, keys)


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """Scores that exist already, masks added."""

    scores: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, heads, queries, keys."""
        rows, heads, queries, keys = self.scores.shape
        return rows, heads, queries, keys

    @property
    def like(self) -> Tensor:
        """A tensor with the sums' dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.scores.device)

    def of_rows(self, part: slice) -> "Given":
        """The same for some rows of the batch."""
        return replace(self, scores=self.scores[part])

    def keys_of(self, q0: int, q1: int) -> tuple[int, int]:
        """All of them: what is hidden is in the scores."""
        return 0, self.scores.shape[3]

    def block(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor | None, Tensor | None]:
        """A copy of the block's scores and which keys are visible; see `ScoreSource`."""
        part = self.scores[:, :, q0:q1, k0:k1].to(self.dtype)
        keep = ~(part <= INVISIBLE_SCORE)  # so that NaN is a key
        return part.masked_fill(~keep, MASKED), keep
