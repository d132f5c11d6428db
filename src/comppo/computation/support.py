"""Which layers of a model can be read, decided from its classes alone, so before any weight is loaded."""

import copy
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from comppo.computation.bypass_kind import bypass_kind
from comppo.computation.router import Router, find_routers, why_no_router
from comppo.errors import ConfigError, UnreadableModelError

logger = logging.getLogger(__name__)

Layers = str | Sequence[int]
"""Which layers: the "first", "middle" or "last" third of the readable ones, "all" of these, or `layer_idx` numbers
(perhaps none)."""

LAYER_NAMES = ("first", "middle", "last", "all")
DEFAULT_LAYERS = "last"
"""See `DEFAULT_STATISTIC`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelMap:
    """Where the parts of a causal language model are, whatever wraps it."""

    decoder: nn.Module
    """The innermost Transformers model that holds the layers: its output is what feeds the output head."""
    layers: nn.ModuleList
    """The decoder layers, in order."""
    attention: dict[int, nn.Module]
    """Readable attention modules by `layer_idx`."""
    bypassing: frozenset[int] = frozenset()
    """Those of them that do not go through the attention registry: see `bypass.py`."""
    why_not: dict[int, str] = field(default_factory=dict)
    """For each other layer, why it cannot be read."""


def readable_layers(model_or_config: Any) -> list[int]:
    """The `layer_idx` of every layer whose attention can be read, ascending; empty where there is none.

    Args:
        model_or_config: a model (wrapped by PEFT or DDP or not), or a Transformers configuration; for the latter no
            weights are made.

    Returns:
        Layer numbers.

    Raises:
        UnreadableModelError: it is no generative model, or a configuration does not tell (code of the model's own).
    """
    model = as_model(model_or_config)
    if model is None:
        raise UnreadableModelError(
            f"{type(model_or_config).__name__} does not tell which layers can be read, as no model can be made from it "
            "without its weights or its own code: load the model and pass that."
        )
    return sorted(map_model(model).attention)


def require_readable(
    config_or_model: Any,
    *,
    layers: Layers = DEFAULT_LAYERS,
    attn_implementation: str | Mapping[str, str] | None = None,
    routers: bool = False,
) -> tuple[int, ...] | None:
    """Check, before weights are loaded, that `layers` can be read; refuses on evidence only.

    Args:
        config_or_model: as in `readable_layers`.
        layers: one of `LAYER_NAMES`, or a sequence of `layer_idx`.
        attn_implementation: the attention that the model will be loaded with, as in `from_pretrained`; None for that
            of `config_or_model`.
        routers: check the routers of mixture-of-experts layers instead of attention, as `choose_routers` says.

    Returns:
        The layers that will be read, ascending; or None where a configuration does not tell and the answer is unknown
        until the model is loaded (`ComputationReader` checks it again then): the model brings its own code, or cannot
        be made without weights.

    Raises:
        ConfigError: `layers` is neither a known name nor a sequence of integers.
        UnreadableModelError: a layer cannot be read, or no router; the message names the layers, the reason and a
            remedy.
    """
    check_layers(layers)
    config = getattr(config_or_model, "config", config_or_model)
    for implementation in _implementations(config, attn_implementation):
        check_implementation(implementation)
    model = as_model(config_or_model)
    if model is None:
        return None
    found = map_model(model)
    return tuple(choose_routers(found, layers)) if routers else choose_layers(found, layers)


def _implementations(config: Any, requested: str | Mapping[str, str] | None) -> list[str | None]:
    """The attention implementations that the decoder may run with, by name."""
    if isinstance(requested, Mapping):  # one per part of the model; "" is the model as a whole
        return [requested.get("text_config", requested.get(""))]
    if requested is not None:
        return [requested]
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return [getattr(text, "_attn_implementation", None)]


def check_implementation(implementation: str | None) -> None:
    """Raise UnreadableModelError where an attention implementation hides its masks."""
    if implementation is not None and "paged" in implementation:
        raise UnreadableModelError(
            f"attn_implementation={implementation!r} cannot be read: its keys lie in pages of a shared cache. "
            'Load the model with attn_implementation="sdpa".'
        )


def as_model(model_or_config: Any) -> nn.Module | None:
    """The model itself, or one on the meta device (no memory, no weights) made from a configuration.

    Args:
        model_or_config: as in `readable_layers`.

    Returns:
        The model; None where none can be made from the configuration, which is no verdict on the model.

    Raises:
        UnreadableModelError: Transformers itself implements the configuration, but no generative model for it.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    config = copy.deepcopy(model_or_config)
    make = _factory(config)
    if make is None:
        if type(config).__module__.startswith("transformers.models."):
            raise UnreadableModelError(
                f"{type(config).__name__} is not a causal language model: Transformers has no generative model for it."
            )
        return None
    try:
        with torch.device("meta"):
            # Eager is available everywhere, and a model's classes do not depend on the choice.
            model: nn.Module = make(config, attn_implementation="eager")
    except Exception:  # whatever a model's code needs at this point: packages, files, real numbers
        logger.debug("no model without weights from %s", type(config).__name__, exc_info=True)
        return None
    return model


def _factory(config: Any) -> Callable[..., Any] | None:
    """What makes the model that would be loaded: the class that the configuration names, else that of an auto class."""
    import transformers

    name = next((name for name in getattr(config, "architectures", None) or () if isinstance(name, str)), "")
    named: Any = getattr(transformers, name, None) if name else None
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if is_model and named.config_class is type(config) and named.can_generate():
        make: Callable[..., Any] = named._from_config
        return make
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        cls = getattr(transformers, auto, None)
        if cls is not None and type(config) in cls._model_mapping:
            return functools.partial(cls.from_config, trust_remote_code=False)
    return None


def map_model(model: nn.Module) -> ModelMap:
    """Find decoder, layers and readable attention modules.

    Args:
        model: a causal language model, wrapped or not.

    Returns:
        Where these parts are.

    Raises:
        UnreadableModelError: there is no stack of decoder layers in it.
    """
    if not isinstance(model, nn.Module):
        raise UnreadableModelError(f"model={model!r} is no module: load it with Transformers' from_pretrained first.")
    outer = _outermost(model)
    layers = _layer_list(outer)
    decoder = _innermost_owner(outer, layers)
    attention: dict[int, nn.Module] = {}
    why_not: dict[int, str] = {}
    bypassing = set()
    for position, layer in enumerate(layers):
        found = [m for m in layer.modules() if _is_readable(m)]
        outside = not found
        if outside:
            found = [m for name, m in layer.named_modules() if bypass_kind(type(m)) and not _CROSS.search(name)]
        indices = [_layer_index(m, position) for m in found]
        if len(set(indices)) < len(found):
            why_not[position] = f"{len(found)} self-attention modules in one layer"
        elif any(module in attention.values() or index < 0 for module, index in zip(found, indices, strict=True)):
            why_not[position] = f"{type(found[0]).__name__} is shared between layers"
        elif found:
            for module, index in zip(found, indices, strict=True):
                attention.setdefault(index, module)
            if outside:
                bypassing.update(indices)
        else:
            why_not[position] = _reason(layer)
    return ModelMap(
        decoder=decoder, layers=layers, attention=attention, bypassing=frozenset(bypassing), why_not=why_not
    )


_CROSS = re.compile(r"encoder_attn|cross_?attn|cross_?attention")
"""In the name of modules that attend to another sequence with a class that also attends to its own."""


def _layer_index(module: nn.Module, position: int) -> int:
    """The module's `layer_idx`, -1 where several layers share it; its layer's where modules have none."""
    index = getattr(module, "layer_idx", position)
    return -1 if index is None else int(index)


def check_layers(layers: Layers) -> None:
    """Raise ConfigError where `layers` is neither a known name nor a sequence of integers."""
    if isinstance(layers, str):
        if layers not in LAYER_NAMES:
            names = ", ".join(f'"{name}"' for name in LAYER_NAMES)
            raise ConfigError(f"layers={layers!r} is unknown: pass {names} or a sequence of layer numbers.")
    elif isinstance(layers, int):
        raise ConfigError(f"layers={layers!r}: pass a sequence of layer numbers, such as ({layers},).")
    elif not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
        raise ConfigError(f"layers={layers!r}: layer numbers are integers.")


def choose_layers(found: ModelMap, layers: Layers) -> tuple[int, ...]:
    """Turn the user's choice into ascending `layer_idx`; errors as in `require_readable`."""
    check_layers(layers)
    readable = sorted(found.attention)
    if isinstance(layers, str):
        if not readable:
            raise UnreadableModelError(f"No layer can be read: {_explain(found, found.why_not)}.{_REMEDY}")
        return tuple(_part(readable, layers))
    chosen = sorted(set(layers))
    missing = [i for i in chosen if i not in found.attention]
    if missing:
        raise UnreadableModelError(
            f"layers {missing} cannot be read: {_explain(found, missing)}. Readable layers: {readable or 'none'}."
            + ("" if readable else _REMEDY)
        )
    return tuple(chosen)


def _part(readable: list[int], name: str) -> list[int]:
    """One of `LAYER_NAMES` of ascending layers: at least one layer where there is any."""
    n, third = len(readable), len(readable) // 3
    parts = {"first": (0, max(third, 1)), "middle": (third, n - third), "last": (n - max(third, 1), n), "all": (0, n)}
    start, stop = parts[name]
    return readable[max(start, 0) : stop]


def choose_routers(found: ModelMap, layers: Layers) -> dict[int, Router]:
    """The routers to read, by position of their layer, ascending.

    Args:
        found: where the parts of the model are.
        layers: a third of the layers with a router, or "all" of them; or layer numbers, of which those without a router
            are passed over.

    Returns:
        At least one.

    Raises:
        ConfigError: `layers` is neither a known name nor a sequence of integers.
        UnreadableModelError: none of these layers has a router that can be read.
    """
    check_layers(layers)
    routers = find_routers(found.decoder, found.layers)
    wanted = _part(sorted(routers), layers) if isinstance(layers, str) else layers
    chosen = {i: routers[i] for i in sorted(routers) if i in wanted}
    if not chosen:
        reasons = why_no_router(found.decoder, found.layers)
        why = "; ".join(sorted({reason for i, reason in reasons.items() if isinstance(layers, str) or i in layers}))
        raise UnreadableModelError(
            f"layers={layers!r} have no router that can be read: {why}. Layers with one: {sorted(routers) or 'none'}."
        )
    return chosen


_REMEDY = (
    " Use a model with softmax attention (Llama, Qwen, Gemma, Mistral, Phi, OLMo, GPT-2, Falcon and most others; "
    'docs/architectures.md has a list), or layers=() with a statistic that needs no attention ("output_entropy", '
    '"hidden_change").'
)


def _explain(found: ModelMap, layers: Sequence[int] | dict[int, str]) -> str:
    by_reason: dict[str, list[int]] = {}
    for i in layers:
        by_reason.setdefault(found.why_not.get(i, f"the model has layers 0 to {len(found.layers) - 1}"), []).append(i)
    return "; ".join(f"layers {numbers}: {reason}" for reason, numbers in by_reason.items())


def _reason(layer: nn.Module) -> str:
    classes = sorted({type(m).__name__ for m in layer.modules() if "attention" in type(m).__name__.lower()})
    if classes:
        return f"{', '.join(classes)} makes its rows in a way that is not read"
    return f"{type(layer).__name__} has no softmax attention"


def _is_readable(module: nn.Module) -> bool:
    """Whether a method of the module's class looks functions up in the attention registry: a fact of its code."""
    if getattr(module, "is_cross_attention", False) is True:
        return False
    from transformers.modeling_utils import AttentionInterface

    for cls in type(module).__mro__:
        if cls is nn.Module:
            return False
        method = inspect.unwrap(vars(cls)["forward"]) if "forward" in vars(cls) else None
        if method is not None:
            scope = getattr(method, "__globals__", {})
            names = _names(method.__code__) if hasattr(method, "__code__") else iter(())
            return any(isinstance(scope.get(name), AttentionInterface) for name in names)
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _outermost(model: nn.Module) -> Any:
    """The Transformers model inside wrappers such as PEFT's and DDP's."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnreadableModelError(
        f"{type(model).__name__} holds no Transformers model: pass one, wrapped by PEFT or DDP or not."
    )


def _layer_list(outer: Any) -> nn.ModuleList:
    """The stack of decoder layers: the first list as long as the (text) configuration says."""
    config = outer.config
    text = config.get_text_config(decoder=True)
    # LongCat counts two hidden layers in each of its decoder layers
    numbers = {int(getattr(text, n)) for n in ("num_hidden_layers", "num_layers") if getattr(text, n, None) is not None}
    root = outer.get_decoder() if hasattr(outer, "get_decoder") else outer
    for module in (*root.modules(), *outer.modules()):
        if isinstance(module, nn.ModuleList) and len(module) in numbers:
            return module
    raise UnreadableModelError(f"{type(outer).__name__} has no list of {sorted(numbers)} decoder layers.")


def _innermost_owner(outer: nn.Module, layers: nn.ModuleList) -> Any:
    from transformers import PreTrainedModel

    owners = [m for m in outer.modules() if isinstance(m, PreTrainedModel) and any(c is layers for c in m.modules())]
    return min(owners, key=lambda m: sum(1 for _ in m.modules()))
