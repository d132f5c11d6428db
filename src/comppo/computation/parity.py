"""Parity of the reader with Transformers: what it reads against the attention matrices that eager attention returns.

`check_parity` works on one loaded model of any size: it switches the model to eager attention and back.
`compare_with_matrices` compares a reader with matrices that the caller has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comppo.computation.matrices import STATISTICS, Comparison, Tally, compare_with_matrices
from comppo.computation.reader import ComputationReader
from comppo.computation.registry import eager_function
from comppo.computation.support import map_model
from comppo.errors import ConfigError, UnreadableModelError

__all__ = ["Comparison", "ParityReport", "check_parity", "compare_with_matrices"]

_States = Sequence[Sequence[Tensor]]  # what each decoder layer was fed, call by call


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """What `check_parity` found."""

    implementation: str
    """Attention implementation that the model was loaded with."""
    dtype: str
    """Of the model's first parameter, as PyTorch writes it."""
    layers: tuple[int, ...]
    """`layer_idx` of the layers that were read and compared."""
    model_layers: int
    """Number of decoder layers."""
    eager: Comparison
    """Reading the same eager forward that returned the matrices. In half precision most of the errors are the matrices'
    own: their scores were rounded before the softmax, and they after it."""
    precise: Comparison | None
    """As `eager`, with the model's eager attention function given the same queries and keys in float32, so that errors
    of reading remain. That of `eager` in a float32 model; None in half precision outside Transformers' registry."""
    fed: Comparison | None
    """Reading the loaded implementation, each layer fed the hidden states of the eager forward, so that differences of
    earlier layers do not count, against the matrices of `precise` (of `eager` where there are none); None where that
    implementation is eager."""
    own: Comparison | None
    """Reading a forward of the loaded implementation as it is, so that the differences between the two implementations
    through all layers count as well; None where it is eager."""
    forward_difference: float
    """Greatest difference of the logits between the two implementations at real tokens, in standard deviations of the
    logits: how far `own` compares two different computations. 0 where the implementation is eager."""
    own_rows: bool
    """Whether the model makes its attention rows itself, outside the registry, and so perhaps others under eager."""
    outputs_identical: bool | None
    """Whether the logits with and without reading are equal to the bit, in every implementation that ran; None where
    they differ, but two forwards without reading differ as well."""


@torch.no_grad()
def check_parity(
    model: nn.Module,
    input_ids: Int[Tensor, "rows tokens"],
    attention_mask: Int[Tensor, "rows tokens"],
    *,
    sink_tokens: int = 1,
) -> ParityReport:
    """Compare what the reader reads of `model` with the matrices of its eager attention, in every readable layer.

    The model runs up to three forwards with eager attention and three with the implementation that it was loaded with.
    Nothing else is loaded, and the implementation is as before afterwards. Eager attention keeps its matrices, so give
    it short rows, one of them padded on the left: two of 32 to 64 tokens, or a little more than the model's window.

    `precise` and `fed` tell whether reading is right, in any dtype; `own` and `eager` add what two implementations and
    half precision do to the model itself.

    Args:
        model: a causal language model of Transformers, wrapped or not, in eval mode.
        input_ids: on the model's device.
        attention_mask: 1 at real tokens; at least one per row.
        sink_tokens: real keys at the beginning of each row that count as attention sink.

    Returns:
        Errors of each comparison, the layers, and whether reading left the outputs as they were.

    Raises:
        ConfigError: the model is in training mode.
        UnreadableModelError: no layer can be read, or the model cannot return its attention matrices.
        EvidenceError: no row could be compared.
    """
    if model.training:
        raise ConfigError("the model is in training mode, where dropout may change every forward: call model.eval().")
    run = _Run(model, input_ids, attention_mask, sink_tokens)
    output, states = run.forward("eager", matrices=True)
    matrices = run.matrices_of(output)
    run.compare_sink_mass = not _hides_learned_sinks(run.decoder, matrices, attention_mask)
    eager = run.compare(matrices)
    precise: Comparison | None = eager
    logits = {"eager": output.logits}
    if matrices[run.readers.layers[0]].dtype in (torch.float16, torch.bfloat16):
        with _float32_attention():
            output, precise_states = run.forward("eager", matrices=True)
        precise_matrices, precise = run.matrices_of(output), None
        if all(matrix.dtype == torch.float32 for matrix in precise_matrices.values()):
            matrices, states = precise_matrices, precise_states
            precise = run.compare(matrices)
    fed = own = None
    if run.loaded != "eager":
        run.forward(run.loaded, states)
        fed = run.compare(matrices)
        output, _ = run.forward(run.loaded)
        own = run.compare(matrices)
        logits[run.loaded] = output.logits
    real = attention_mask.bool()
    spread = logits["eager"][real].float().std()
    return ParityReport(
        implementation=run.loaded,
        dtype=str(run.decoder.dtype).removeprefix("torch."),
        layers=run.readers.layers,
        model_layers=len(run.layers),
        eager=eager,
        precise=precise,
        fed=fed,
        own=own,
        forward_difference=float((logits[run.loaded] - logits["eager"])[real].float().abs().max() / spread),
        own_rows=bool(map_model(model).bypassing),
        outputs_identical=run.same_without_reading(logits),
    )


class _Run:
    """One model and its input: forwards that are read, and the comparisons of what was read last."""

    def __init__(self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, sink_tokens: int) -> None:
        found = map_model(model)
        self.decoder, self.layers = found.decoder, found.layers
        self.loaded = _implementation_of(self.decoder)
        self.readers = _Readers(model, sink_tokens)
        self.compare_sink_mass = True
        self._model = model
        self._attention_mask = attention_mask
        self._inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}

    def forward(self, name: str, given: _States | None = None, *, matrices: bool = False) -> tuple[Any, _States]:
        """Read a forward with implementation `name`; returns its output and what each layer was fed."""
        inputs = self._inputs | ({"output_attentions": True} if matrices else {})
        with _implementation(self.decoder, name), _layer_inputs(self.layers, given) as states:
            return self.readers.read(self._model, inputs), states

    def compare(self, matrices: Mapping[int, Tensor]) -> Comparison:
        """What was read last, against the matrix of each layer."""
        return self.readers.compare(matrices, self._attention_mask, self.compare_sink_mass)

    def matrices_of(self, output: Any) -> dict[int, Tensor]:
        """The matrices of the readable layers, which a model returns one per layer or one per attending layer."""
        layers, depth = self.readers.layers, len(self.layers)
        returned = tuple(output.attentions or ())
        matrices = [matrix for matrix in returned if matrix is not None]
        if len(matrices) != len(layers) and len(returned) == depth:  # linear attention returned something as well
            matrices = [returned[i] for i in layers]
        if len(matrices) != len(layers) or any(matrix is None for matrix in matrices):
            raise UnreadableModelError(
                f"{type(self._model).__name__} returned {len(matrices)} attention matrices for {len(layers)} readable "
                f"layers of {depth}: what is read of it cannot be compared."
            )
        return dict(zip(layers, matrices, strict=True))

    def same_without_reading(self, logits: Mapping[str, Tensor]) -> bool | None:
        """Whether the logits of each implementation are the same to the bit without reading; None: not repeatable."""
        same: list[bool | None] = []
        for name, with_reading in logits.items():
            with _implementation(self.decoder, name):
                without = self._model(**self._inputs).logits
                if _equal(with_reading, without):
                    same.append(True)
                else:
                    same.append(False if _equal(without, self._model(**self._inputs).logits) else None)
        return False if False in same else None if None in same else True


class _Readers:
    """For each readable layer two readers of the same forwards: one leaves the sinks out, the other nothing.

    One layer at a time, because layers may differ in their number of heads.
    """

    def __init__(self, model: nn.Module, sink_tokens: int) -> None:
        self.layers = ComputationReader(model, layers="all").layers
        self._readers = [
            (prefix, n, ComputationReader(model, statistics=STATISTICS, layers=(layer,), sink_tokens=n))
            for layer in self.layers
            for prefix, n in (("", sink_tokens), ("whole_", 0))
        ]

    def read(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """One forward; returns its output."""
        with ExitStack() as stack:
            for _, _, reader in self._readers:
                stack.enter_context(reader)
            return model(**inputs)

    def compare(self, matrices: Mapping[int, Tensor], attention_mask: Tensor, sink_mass: bool) -> Comparison:
        """What was read last, against the matrix of each layer."""
        tally = Tally(sink_mass=sink_mass)
        for prefix, sink_tokens, reader in self._readers:
            (layer,) = reader.layers
            read = {name: reader.statistic(name)[:, :, 0] for name in STATISTICS}
            visible = reader.visible_keys()[:, :, 0]
            tally.add(layer, read, visible, matrices[layer], attention_mask, sink_tokens, prefix)
        return tally.result()


def _implementation_of(decoder: Any) -> str:
    return decoder.config._attn_implementation or "eager"


@contextmanager
def _implementation(decoder: Any, name: str) -> Iterator[None]:
    """The decoder with attention implementation `name` inside, and its own again afterwards."""
    before = _implementation_of(decoder)
    try:
        _set_implementation(decoder, name)
        yield
    finally:
        _set_implementation(decoder, before)


def _set_implementation(decoder: Any, name: str) -> None:
    before = _implementation_of(decoder)
    if before == name:
        return
    if decoder._can_set_attn_implementation():
        decoder.set_attn_implementation(name)
    elif {before, name} == {"sdpa", "eager"}:
        decoder.config._attn_implementation = name  # models outside the registry (Falcon) look it up at each call
    if _implementation_of(decoder) != name:
        raise UnreadableModelError(
            f"{type(decoder).__name__} cannot change its attention once it is loaded: load it with "
            f"attn_implementation={name!r}."
        )


@contextmanager
def _float32_attention() -> Iterator[None]:
    """Models that run eager attention give their own function float32 copies of their queries, keys and masks."""
    from transformers.modeling_utils import AttentionInterface

    mapping = AttentionInterface._global_mapping
    before = mapping.get("eager")
    mapping["eager"] = _eager_in_float32
    try:
        yield
    finally:
        if before is None:
            del mapping["eager"]
        else:
            mapping["eager"] = before


def _eager_in_float32(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    wide = [_widened(value) for value in (query, *args)]
    named = {name: _widened(value) for name, value in kwargs.items()}
    output, matrix = eager_function(type(module))(module, *wide, **named)
    return output.to(query.dtype), matrix


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _layer_inputs(layers: nn.ModuleList, given: _States | None) -> Iterator[_States]:
    """Keep what each decoder layer is fed; or feed it what is `given` instead."""
    kept: list[list[Tensor]] = [[] for _ in layers]
    seen = [0] * len(layers)

    def hook(i: int) -> Any:
        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if given is None:
                kept[i].append((args[0] if args else kwargs["hidden_states"]).clone())
                return None
            hidden = given[i][seen[i]]
            seen[i] += 1
            return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

        return feed

    handles = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield kept if given is None else given
    finally:
        for handle in handles:
            handle.remove()


def _hides_learned_sinks(decoder: nn.Module, matrices: Mapping[int, Tensor], attention_mask: Tensor) -> bool:
    """Whether rows sum to 1 in spite of learned sinks: Granite SWA scales the attention's output instead."""
    if not any(isinstance(getattr(module, "sinks", None), Tensor) for module in decoder.modules()):
        return False
    sums = torch.stack([m.float().sum(-1).amin(1)[attention_mask.bool().to(m.device)].min() for m in matrices.values()])
    return bool((sums > 0.98).all())


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
