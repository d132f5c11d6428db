"""What a reader read, compared with whole attention matrices: the reference is computed in float64 from these alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.computation.reader import ComputationReader
from comppo.errors import EvidenceError

STATISTICS = ("collision", "entropy", "maximum", "concentration", "sink_mass")
"""What is compared, beside "visible_keys"."""

REST_FLOOR = 0.01
"""Least probability outside the sinks at which a row is compared: a matrix keeps few digits of a small remainder, and
renormalising it would compare the matrix's own rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Greatest absolute differences between what a reader read and what matrices say."""

    errors: Mapping[str, float]
    """By statistic: nats for "entropy", keys for "visible_keys", else unitless. Names that begin with "whole_" are of
    rows with no key left out. No "sink_mass" where the matrices hide a learned sink."""
    by_layer: Mapping[int, float]
    """The greatest of the errors in each layer, by `layer_idx`."""
    compared: float
    """Share of (row, real token, layer, head) that was compared, in (0, 1]; the others have less than `REST_FLOOR` of
    their probability outside the sinks."""
    counted: float
    """Share at which keys were counted as well, for "visible_keys" and "concentration", in [0, 1]: a matrix tells how
    many keys a query sees only where all heads agree, as a probability that underflows to 0 looks like a hidden key."""

    @property
    def worst(self) -> float:
        """The greatest of the errors; NaN where one is."""
        return _greatest_of(self.errors.values())


def reference_statistics(
    matrix: Float[Tensor, "rows heads tokens keys"],
    attention_mask: Int[Tensor, "rows tokens"] | Bool[Tensor, "rows tokens"],
    *,
    sink_tokens: int,
) -> dict[str, Float[Tensor, "rows tokens heads"]]:
    """The reader's statistics of one layer from its whole matrix, in float64.

    Args:
        matrix: probabilities; a learned sink's share is missing from the rows.
        attention_mask: 1 (or true) at real tokens.
        sink_tokens: real keys at the beginning of each row that are left out, the row renormalised over the others.

    Returns:
        Those of `STATISTICS`, "visible_keys" (sinks included), "rest_mass" (the probability outside the sinks) and
        "counts_agree" (1 where every head gives the same keys a probability above 0).
    """
    p = matrix.detach().double()
    sink_end = (attention_mask.bool().long().argmax(-1) + sink_tokens).to(p.device)
    # A layer may have keys beyond the positions (summaries of blocks), which are no sinks.
    sink = torch.arange(p.shape[-1], device=p.device) < sink_end[:, None]
    kept = p.masked_fill(sink[:, None, None, :], 0.0)
    mass = kept.sum(-1)
    q = kept / torch.where(mass > 0, mass, 1.0).unsqueeze(-1)
    entropy, n = -torch.xlogy(q, q).sum(-1), (kept > 0).sum(-1)
    values = {
        "collision": q.square().sum(-1),
        "entropy": entropy,
        "maximum": q.amax(-1),
        "concentration": torch.where(n > 1, 1.0 - entropy / n.clamp_min(2).double().log(), 0.0),
        "sink_mass": 1.0 - mass,
        "visible_keys": (p > 0).sum(-1).double(),
        "rest_mass": mass,
        "counts_agree": ((p > 0) == (p > 0).any(1, keepdim=True)).all(-1).double(),
    }
    return {name: value.transpose(1, 2) for name, value in values.items()}


def compare_with_matrices(
    reader: ComputationReader,
    matrices: Sequence[Float[Tensor, "rows heads tokens keys"]],
    attention_mask: Int[Tensor, "rows tokens"] | Bool[Tensor, "rows tokens"],
    *,
    sink_tokens: int,
    sink_mass: bool = True,
) -> Comparison:
    """Compare what `reader` read of one forward with the matrices of that forward, or of another one.

    Only real tokens count, and only rows with more than `REST_FLOOR` of their probability outside the sinks.

    Args:
        reader: it read all of `STATISTICS`, every position and every head.
        matrices: one tensor per layer in `reader.layers`, as `output_attentions=True` returns them.
        attention_mask: the one that the forward was given.
        sink_tokens: the reader's.
        sink_mass: whether to compare it; False for matrices whose rows sum to 1 in spite of a learned sink.

    Returns:
        Greatest absolute difference by statistic.

    Raises:
        EvidenceError: the number of matrices is not that of the layers, or no row can be compared.
    """
    if len(matrices) != len(reader.layers):
        raise EvidenceError(
            f"{len(matrices)} attention matrices for {len(reader.layers)} layers: pass those of layers {reader.layers}."
        )
    tally = Tally(sink_mass=sink_mass)
    for i, (layer, matrix) in enumerate(zip(reader.layers, matrices, strict=True)):
        read = {name: reader.statistic(name)[:, :, i] for name in STATISTICS}
        tally.add(layer, read, reader.visible_keys()[:, :, i], matrix, attention_mask, sink_tokens)
    return tally.result()


class Tally:
    """Errors collected over layers, with and without sinks."""

    def __init__(self, *, sink_mass: bool) -> None:
        self._names = tuple(name for name in STATISTICS if sink_mass or name != "sink_mass")
        self._errors: dict[str, list[float]] = {}
        self._by_layer: dict[int, list[float]] = {}
        self._usable = self._counted = self._entries = 0

    def add(
        self,
        layer: int,
        read: Mapping[str, Tensor],
        visible_keys: Tensor,
        matrix: Tensor,
        attention_mask: Tensor,
        sink_tokens: int,
        prefix: str = "",
    ) -> None:
        """Compare one layer: statistics (rows, tokens, heads) and counts (rows, tokens) with its matrix."""
        want = reference_statistics(matrix, attention_mask, sink_tokens=sink_tokens)
        mass = want["rest_mass"]
        real = attention_mask.bool().to(mass.device)[:, :, None].expand_as(mass)
        usable = real & (mass > REST_FLOOR)
        # Float16 keeps what is below 6e-8 as 0, in all heads alike.
        counted = real & (want["counts_agree"] > 0) & (matrix.dtype != torch.float16)
        where = {"sink_mass": real, "concentration": usable & counted}
        errors = {name: _greatest(read[name], want[name], where.get(name, usable)) for name in self._names}
        # The reader tells one count per layer, the mean over its heads.
        errors["visible_keys"] = _greatest(visible_keys, want["visible_keys"].mean(-1), counted.all(-1))
        for name, error in errors.items():
            self._errors.setdefault(prefix + name, []).append(error)
        self._by_layer.setdefault(layer, []).extend(errors.values())
        self._usable += int(usable.sum())
        self._counted += int(counted.sum())
        self._entries += int(real.sum())

    def result(self) -> Comparison:
        """All that was added, as one comparison."""
        if not self._usable:
            raise EvidenceError(
                f"no row has more than {REST_FLOOR} of its probability outside the sinks: pass longer sequences, or "
                "fewer sink_tokens."
            )
        return Comparison(
            errors=MappingProxyType({name: _greatest_of(errors) for name, errors in self._errors.items()}),
            by_layer=MappingProxyType({layer: _greatest_of(errors) for layer, errors in self._by_layer.items()}),
            compared=self._usable / self._entries,
            counted=self._counted / self._entries,
        )


def _greatest(got: Tensor, want: Tensor, where: Tensor) -> float:
    difference = (got.to(want.device).double() - want).abs()[where]
    return float(difference.max()) if difference.numel() else 0.0


def _greatest_of(errors: Iterable[float]) -> float:
    return float(torch.tensor(tuple(errors), dtype=torch.float64).max())  # unlike max(), it keeps NaN
