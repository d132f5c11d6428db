"""The sums behind `attention_statistics`, block by block, in plain torch.

Per query and set of keys, with scores s_j and features F_j,

    m = max_j s_j,  l1 = sum_j e^(s_j - m),  l2 = sum_j e^(2 (s_j - m)),  t = sum_j e^(s_j - m) (s_j - m),
    f = sum_j e^(s_j - m) F_j,

give entropy = log l1 - t / l1, collision = l2 / l1^2, maximum = 1 / l1, and the mean f / l1. When the maximum moves by
d = m_old - m_new <= 0: l1 <- e^d l1, l2 <- e^(2d) l2, t <- e^d (t + d l1), f <- e^d f.

Within a block the sums come from torch's softmax, which is one fused pass: with p = softmax(s - m) of the block's keys,
l1 = 1 / max p, l2 = l1^2 |p|^2, t = l1 sum p (s - m), f = l1 p F.

Sink keys go to sums of their own, merged at the end: subtracting them from the whole afterwards would cancel, since the
sink often holds nearly all of the mass.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from comppo.computation.attention_rows import LOWEST_MAXIMUM, MASKED, AttentionStatistics, joined

SCRATCH_SCORES = 2**18  # scores per block: 1 MiB in float32, about what a CPU core keeps close
SCRATCH_ON_DEVICE = 2**24  # the same on an accelerator, where a block has to be worth its kernels' starts
LEAST_QUERIES = 16  # queries per block that make a product worth its call
MOST_QUERIES = 256


@runtime_checkable
class ScoreSource(Protocol):
    """Where blocks of scores come from."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, heads, queries, keys."""

    @property
    def like(self) -> Tensor:
        """Any tensor with the sums' dtype and device."""

    def of_rows(self, part: slice) -> "ScoreSource":
        """The same for some rows of the batch."""

    def keys_of(self, q0: int, q1: int) -> tuple[int, int]:
        """First and last + 1 of the keys that queries q0 .. q1 - 1 may see."""

    def block(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor | None, Tensor | None]:
        """Scores, to be overwritten, MASKED where hidden; and which keys are visible, None meaning all of them.

        The former is None where no key of the block is visible."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Options:
    """What to reduce, beside the scores; as the arguments of `attention_statistics`."""

    sinks: Tensor | None
    features: Tensor | None
    s_aux: Tensor | None
    entropy: bool
    distance: bool

    def of_rows(self, part: slice) -> "Options":
        """For some rows only."""
        return replace(
            self,
            sinks=None if self.sinks is None else self.sinks[part],
            features=None if self.features is None else self.features[part],
        )


def reduce(
    source: ScoreSource,
    options: Options,
    queries: tuple[int, int],
    *,
    block_queries: int | None = None,
    block_keys: int = 1024,
) -> AttentionStatistics:
    """Statistics of queries `queries[0] .. queries[1] - 1`, a few rows of the batch and a few queries at a time.

    Args:
        source: the scores.
        options: what to reduce of them.
        queries: first and last + 1.
        block_queries: queries per block; None fits the block to the cache.
        block_keys: keys per block.

    Returns:
        The statistics of all rows.
    """
    n_rows, n_heads, _, n_keys = source.shape
    scratch = SCRATCH_SCORES if source.like.device.type == "cpu" else SCRATCH_ON_DEVICE
    at_once = n_heads * min(block_keys, max(n_keys, 1))
    block_rows = min(n_rows, max(1, scratch // (at_once * min(LEAST_QUERIES, max(queries[1] - queries[0], 1)))))
    size = block_queries or min(MOST_QUERIES, max(8, scratch // (at_once * max(block_rows, 1))))
    parts = []
    for r0 in range(0, max(n_rows, 1), max(block_rows, 1)):
        part = slice(r0, min(r0 + block_rows, n_rows))
        scores, some = source.of_rows(part), options.of_rows(part)
        starts = range(queries[0], max(queries[1], queries[0] + 1), size)  # no query is one empty block
        done = [_queries(scores, some, q0, min(q0 + size, queries[1]), block_keys) for q0 in starts]
        parts.append(joined(done, 2))
    return joined(parts, 0)


def _queries(source: ScoreSource, options: Options, q0: int, q1: int, block_keys: int) -> AttentionStatistics:
    """The statistics of queries q0 .. q1 - 1."""
    n_rows, n_heads, n_queries, n_keys = source.shape
    like = source.like
    shape, offset = (n_rows, n_heads, q1 - q0), n_keys - n_queries
    width = options.distance + (0 if options.features is None else options.features.shape[-1])
    rest, sink = (_Sums.empty(shape, like, width, options.entropy) for _ in range(2))
    visible, rest_visible = like.new_zeros(shape), like.new_zeros(shape)
    lowest, highest = source.keys_of(q0, q1) if q1 > q0 else (0, 0)
    for k0 in range(lowest, highest, block_keys):
        k1 = min(k0 + block_keys, highest)
        scores, keep = source.block(q0, q1, k0, k1)
        if scores is None:
            continue
        features = _features(options, offset + q1 - 1, k0, k1, like)
        count = float(k1 - k0) if keep is None else keep.sum(-1)
        visible = visible + count
        if options.sinks is not None:
            count = count - _take_sinks(scores, keep, sink, options.sinks[:, k0:k1], features, options.entropy)
        rest_visible = rest_visible + count
        rest.add(scores, features, options.entropy)
    # Distances were summed from the block's last query; they are those from each query after this.
    lead = torch.arange(q1 - q0 - 1, -1, -1, device=like.device, dtype=like.dtype)
    return _finish(rest, sink, visible, rest_visible, lead, options)


def _features(options: Options, last: int, k0: int, k1: int, like: Tensor) -> Tensor | None:
    """Columns to average over keys k0 .. k1 - 1: the given features, and the distance from key position `last`."""
    columns = [] if options.features is None else [options.features[:, k0:k1].to(like.dtype)]
    if options.distance:
        away = last - torch.arange(k0, k1, device=like.device, dtype=like.dtype)
        columns.append(away[None, :, None])
    if len(columns) == 2:
        columns[1] = columns[1].expand(columns[0].shape[0], -1, -1)
    return torch.cat(columns, -1) if columns else None


def _take_sinks(
    scores: Tensor, keep: Tensor | None, sink: "_Sums", is_sink: Tensor, features: Tensor | None, entropy: bool
) -> Tensor | float:
    """Move the block's sink keys from `scores` to `sink`; returns how many visible ones each query lost."""
    columns = is_sink.any(0).nonzero().flatten()
    if not len(columns):
        return 0.0
    part = slice(int(columns[0]), int(columns[-1]) + 1)
    is_sink = is_sink[:, None, None, part]
    scores = scores[..., part]
    sink.add(scores.masked_fill(~is_sink, MASKED), None if features is None else features[:, part], entropy)
    scores.masked_fill_(is_sink, MASKED)
    return (is_sink if keep is None else keep[..., part] & is_sink).sum(-1)


@dataclass(slots=True, eq=False)
class _Sums:
    """The running numbers of one set of keys; see the module's docstring.

    `t` is None where no entropy is wanted; `f` has one column per feature, or is None.
    """

    m: Tensor
    l1: Tensor
    l2: Tensor
    t: Tensor | None
    f: Tensor | None
    fresh: bool = False
    """Whether no key was taken in yet."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], like: Tensor, width: int, entropy: bool) -> "_Sums":
        """Of no keys."""
        zero = like.new_zeros(shape)
        f = like.new_zeros(*shape, width) if width else None
        return cls(torch.full_like(zero, LOWEST_MAXIMUM), zero, zero, zero if entropy else None, f, fresh=True)

    def add(self, scores: Tensor, features: Tensor | None, entropy: bool) -> None:
        """Take in a block of scores, which is overwritten; `features` is (rows or 1, keys, width)."""
        m = scores.amax(-1)
        some = ~(m <= LOWEST_MAXIMUM)  # NaN counts as a key, here and below, so that it is not read as 0
        p = torch.softmax(scores.sub_(m.unsqueeze(-1)), -1) if entropy else torch.softmax(scores, -1, out=scores)
        # The greatest p is e^0 / l1. Without keys p is 1 / keys everywhere, and every sum is 0.
        l1 = torch.where(some, 1.0 / p.amax(-1), 0.0)
        l2 = (torch.linalg.vector_norm(p, dim=-1) * l1).square_()
        f = None if features is None else l1.unsqueeze(-1) * _over_keys(p, features)
        t = scores.mul_(p).sum(-1) * l1 if entropy else None
        block = _Sums(torch.where(some, m, LOWEST_MAXIMUM), l1, l2, t, f)
        both = block if self.fresh else self.merged(block)
        self.m, self.l1, self.l2, self.t, self.f, self.fresh = both.m, both.l1, both.l2, both.t, both.f, False

    def merged(self, other: "_Sums") -> "_Sums":
        """The sums over both sets of keys."""
        m = torch.maximum(self.m, other.m)
        a, b = self._relative_to(m), other._relative_to(m)
        t, f = (None if x is None or y is None else x + y for x, y in ((a.t, b.t), (a.f, b.f)))
        return _Sums(m, a.l1 + b.l1, a.l2 + b.l2, t, f)

    def _relative_to(self, m: Tensor) -> "_Sums":
        """The same sums for a maximum `m >= self.m`."""
        d = self.m - m
        r = d.exp()
        f = None if self.f is None else r.unsqueeze(-1) * self.f
        t = None if self.t is None else r * (self.t + d * self.l1)  # without keys d may be huge, and l1 is 0
        return _Sums(m, r * self.l1, r * r * self.l2, t, f)

    def reductions(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Entropy, collision, maximum and mean features; 0 where there was no key, None where not wanted."""
        some = self.l1 != 0
        l1 = torch.where(some, self.l1, 1.0)  # at least 1 wherever there is a key: the greatest score adds e^0
        entropy = None if self.t is None else (l1.log() - self.t / l1).clamp_min(0.0)
        mean = None if self.f is None else self.f / l1.unsqueeze(-1)
        return entropy, self.l2 / (l1 * l1), torch.where(some, 1.0 / l1, 0.0), mean


def _over_keys(p: Tensor, features: Tensor) -> Tensor:
    """sum_j p_j features_j: (rows, heads, queries, keys), (rows or 1, keys, width) -> (rows, heads, queries, width)."""
    flat = p.reshape(p.shape[0], p.shape[1] * p.shape[2], p.shape[-1])
    return torch.bmm(flat, features.expand(p.shape[0], -1, -1)).view(*p.shape[:-1], features.shape[-1])


def _finish(
    rest: _Sums, sink: _Sums, visible: Tensor, rest_visible: Tensor, lead: Tensor, options: Options
) -> AttentionStatistics:
    whole = rest.merged(sink)
    entropy, collision, maximum, mean = whole.reductions()
    rest_entropy, rest_collision, rest_maximum, rest_mean = rest.reductions()
    some = whole.l1 != 0
    mass = torch.where(some, sink.l1 * (sink.m - whole.m).exp() / torch.where(some, whole.l1, 1.0), 0.0)
    if options.s_aux is not None:
        total = torch.where(some, whole.l1, 1.0).log() + whole.m
        learned = torch.where(some, torch.sigmoid(options.s_aux.to(total.dtype)[None, :, None] - total), 0.0)
        mass = learned + (1.0 - learned) * mass
    more: dict[str, Tensor | None] = {}
    if options.entropy:
        more |= {"entropy": entropy, "rest_entropy": rest_entropy}
    if options.distance:
        assert mean is not None and rest_mean is not None
        more["distance"] = torch.where(some, mean[..., -1] - lead, 0.0)
        more["rest_distance"] = torch.where(rest.l1 != 0, rest_mean[..., -1] - lead, 0.0)
    if options.features is not None:
        assert rest_mean is not None
        more["rest_features"] = rest_mean[..., : options.features.shape[-1]]
    return AttentionStatistics(
        collision=collision,
        maximum=maximum,
        visible_keys=visible,
        sink_mass=mass,
        rest_collision=rest_collision,
        rest_maximum=rest_maximum,
        rest_visible_keys=rest_visible,
        **more,
    )
