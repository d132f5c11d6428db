"""Reading a loaded model once, on a short input: which layers refuse, and whether its outputs stay as they are."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comppo.computation import flex, registry
from comppo.computation.bypass import Bypass
from comppo.computation.reader import ComputationReader
from comppo.computation.structure import Layer, Structure, longest_input
from comppo.computation.support import ModelMap, map_model
from comppo.errors import UnreadableModelError

SHORT = 48
"""Tokens per row of the short input."""


def random_ids(model: Any, rows: int, tokens: int) -> Int[Tensor, "rows tokens"]:
    """Token ids that stand for nothing special (no padding, no image), the same at each call.

    Args:
        model: a model of Transformers; its configuration tells the vocabulary and the special tokens.
        rows: of the result.
        tokens: per row.

    Returns:
        On the model's device.
    """
    text = model.config.get_text_config(decoder=True)
    size = min(int(text.vocab_size), int(model.get_input_embeddings().weight.shape[0]))
    special: set[int] = set()
    for config in (model.config, text):
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index")):
                special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    usual = torch.tensor([i for i in range(size) if i not in special] or [0])
    chosen = torch.randint(len(usual), (rows, tokens), generator=torch.Generator().manual_seed(0))
    return usual[chosen].to(model.device)


def short_input(model: Any) -> tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]:
    """Ids and mask of two rows of `SHORT` tokens (or as many as the model allows), the second padded on the left.

    Args:
        model: a model of Transformers.

    Returns:
        On the model's device.
    """
    tokens = min(SHORT, longest_input(model.config) or SHORT)
    ids = random_ids(model, 2, tokens)
    mask = torch.ones_like(ids)
    mask[1, : tokens // 4] = 0
    return ids, mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What happened when a model was read on a short input."""

    structure: Structure
    """With what was seen of each layer, and why those cannot be read that refused."""
    outputs_identical: bool | None
    """Whether the logits with and without reading are equal to the bit; None where they differ, but
    two forwards without reading differ as well."""
    finite: bool
    """Whether the logits of real tokens are numbers."""
    causal: bool
    """Whether the first position of an unpadded row sees itself alone."""


@torch.no_grad()
def try_reading(model: Any, structure: Structure, input_ids: Tensor, attention_mask: Tensor) -> Trial:
    """Read every readable layer of a short forward; layers that refuse are told apart.

    Args:
        model: a causal language model of Transformers, in eval mode.
        structure: of this model, from `examine`.
        input_ids: (rows, tokens), the first row without padding.
        attention_mask: (rows, tokens), 1 at real tokens.

    Returns:
        What was seen. Errors of the model's own forward are raised as they are.
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    found = map_model(model)
    plain = model(**inputs).logits
    watch = _Watch(found)
    refused: dict[int, str] = {}
    identical: list[bool] = []
    seen: list[Tensor] = []

    def read(layers: Sequence[int]) -> None:
        reader, logits = _read(model, found, layers, inputs, watch)
        seen.append(reader.visible_keys()[0, 0])
        identical.append(_equal(plain, logits))

    try:
        read(structure.readable)
    except UnreadableModelError:
        for layer in structure.readable:
            try:
                read((layer,))
            except UnreadableModelError as error:
                refused[layer] = _reason(str(error), layer)
    repeats = all(identical) or _equal(model(**inputs).logits, model(**inputs).logits)
    layers = tuple(_seen(layer, watch.calls.get(layer.layer), refused.get(layer.layer)) for layer in structure.layers)
    return Trial(
        structure=replace(structure, layers=layers),
        outputs_identical=all(identical) if repeats else None,
        finite=bool(plain[attention_mask.bool()].isfinite().all()),
        causal=all(bool((count <= 1).all()) for count in seen),
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """An attention call, in the fields of `Layer`."""

    implementation: str
    heads: int
    key_value_heads: int | None
    head_width: int | None
    backend: Literal["torch", "triton", "flex"]


class _Watch:
    """Notes the first attention call of each layer, beside the reader."""

    def __init__(self, found: ModelMap) -> None:
        self._layer_of = {id(module): i for i, module in found.attention.items()}
        self.calls: dict[int, _Call] = {}

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        layer = self._layer_of.get(id(module))
        if layer is not None:
            call = _Call(implementation, query.shape[1], key.shape[1], query.shape[3], _backend(query, key, mask))
            self.calls.setdefault(layer, call)

    def observe_scores(self, module: nn.Module, scores: Tensor) -> None:
        self.calls.setdefault(self._layer_of[id(module)], _Call("", scores.shape[1], None, None, "torch"))


def _backend(query: Tensor, key: Tensor, mask: Any) -> Literal["torch", "triton", "flex"]:
    """What `attention_statistics` computes the default statistic with."""
    if hasattr(mask, "mask_mod"):
        return "flex" if flex.supports(query) else "torch"
    if query.is_cuda:
        from comppo.computation import triton_launch

        if triton_launch.supports(query, key):
            return "triton"
    return "torch"


def _read(
    model: nn.Module, found: ModelMap, layers: Sequence[int], inputs: Mapping[str, Any], watch: _Watch
) -> tuple[ComputationReader, Tensor]:
    reader = ComputationReader(model, layers=tuple(layers))
    with ExitStack() as stack:
        outside = [found.attention[i] for i in layers if i in found.bypassing]
        if outside:
            stack.enter_context(Bypass(outside, watch))
        registry.attach(watch)
        stack.callback(registry.detach, watch)
        stack.enter_context(reader)
        logits = model(**inputs).logits
    reader.visible_keys()  # raises where a layer was not seen
    return reader, logits


def _reason(message: str, layer: int) -> str:
    """Without the layer's number and the remedy, so that equal reasons are equal."""
    return message.partition(": leave it")[0].removeprefix(f"layer {layer} ")


def _seen(layer: Layer, call: _Call | None, refused: str | None) -> Layer:
    if refused is not None:
        return replace(layer, why_not=refused, through="")
    if call is None or not layer.readable:
        return layer
    return replace(
        layer,
        implementation=call.implementation,
        heads=call.heads,
        key_value_heads=call.key_value_heads,
        head_width=call.head_width,
        backend=call.backend,
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
