"""What can be read of a model and what cannot, told from its classes: no weights are needed."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from comppo.computation.bypass_kind import bypass_kind
from comppo.computation.router import find_routers, why_no_router
from comppo.computation.support import DEFAULT_LAYERS, as_model, choose_layers, choose_routers, map_model
from comppo.errors import UnreadableModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One attention module that can be read, or a decoder layer without one."""

    layer: int
    """Its `layer_idx` where it can be read, as in the reader's `layers`; else the decoder layer's position."""
    position: int
    """Of the decoder layer, from 0; the same as `layer` in most models."""
    attention: str
    """Class of the attention module that is read; "" where none is."""
    through: Literal["registry", "sdpa", "softmax", ""]
    """"registry" (Transformers' attention registry), or the call of the module's own code that is watched."""
    why_not: str
    """Why the attention cannot be read; "" where it can."""
    router: str
    """Class of the decoder layer's router that can be read; "" where none can."""
    why_no_router: str
    """Why none can; "" where one can."""
    implementation: str = ""
    """Which attention ran ("sdpa", "eager", ...); like the rest below, "" or None until the model was read."""
    heads: int | None = None
    """Of the queries."""
    key_value_heads: int | None = None
    """None where the model makes its own scores, as is `head_width`."""
    head_width: int | None = None
    """Of queries and keys."""
    backend: Literal["torch", "triton", "flex", ""] = ""
    """What computes the sums: PyTorch over blocks, the Triton kernel, or FlexAttention."""

    @property
    def readable(self) -> bool:
        """Whether its attention can be read."""
        return not self.why_not


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What can be read of a model, and what the reader's default reads."""

    model_class: str
    """Name of the class that Transformers makes."""
    parameters: int
    """Number of weights."""
    depth: int
    """Number of decoder layers."""
    layers: tuple[Layer, ...]
    """In the order of the decoder layers."""
    default_layers: tuple[int, ...]
    """Layers that `DEFAULT_LAYERS` stands for; () where none can be read."""
    default_routers: tuple[int, ...]
    """Positions of the layers whose routers it reads where router statistics are asked for."""

    @property
    def readable(self) -> tuple[int, ...]:
        """Layers whose attention can be read, ascending."""
        return tuple(sorted(layer.layer for layer in self.layers if layer.readable))

    @property
    def reasons(self) -> dict[str, tuple[int, ...]]:
        """Why the others cannot be read, and which they are."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            if layer.why_not:
                found[layer.why_not] = (*found.get(layer.why_not, ()), layer.layer)
        return found


def examine(model_or_config: Any) -> Structure | None:
    """Which layers can be read and why not the others, from the classes alone.

    Args:
        model_or_config: a causal language model of Transformers, or a configuration, for which no weights are made.

    Returns:
        The structure; None where a configuration does not tell, and the model has to be loaded.

    Raises:
        UnreadableModelError: it is no causal language model, or has no stack of decoder layers.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if getattr(config, "is_encoder_decoder", False) is True:
        raise UnreadableModelError(
            f"{type(config).__name__} is that of an encoder-decoder model: only causal language models, which are "
            "decoders alone, can be read."
        )
    model = as_model(model_or_config)
    if model is None:
        return None
    found = map_model(model)
    index_of = {id(module): i for i, module in found.attention.items()}
    routers, no_router = find_routers(found.decoder, found.layers), why_no_router(found.decoder, found.layers)
    layers: list[Layer] = []
    for position, decoder_layer in enumerate(found.layers):
        why_not = found.why_not.get(position, "")
        indices = [] if why_not else [index_of[id(m)] for m in decoder_layer.modules() if id(m) in index_of]
        for index in indices or (None,):
            module = None if index is None else found.attention[index]
            layers.append(
                Layer(
                    layer=position if index is None else index,
                    position=position,
                    attention="" if module is None else type(module).__name__,
                    through=_through(module, index in found.bypassing),
                    why_not=why_not,
                    router=routers[position].name if position in routers else "",
                    why_no_router=no_router.get(position, ""),
                )
            )
    return Structure(
        model_class=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        depth=len(found.layers),
        layers=tuple(layers),
        default_layers=choose_layers(found, DEFAULT_LAYERS) if found.attention else (),
        default_routers=tuple(choose_routers(found, DEFAULT_LAYERS)) if routers else (),
    )


def _through(module: nn.Module | None, outside: bool) -> Literal["registry", "sdpa", "softmax", ""]:
    if module is None:
        return ""
    return (bypass_kind(type(module)) or "") if outside else "registry"


def longest_input(config: Any) -> int | None:
    """How many positions a configuration allows; None where it does not say."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
