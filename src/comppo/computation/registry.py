"""Listening to Transformers' attention registry: what every attention call was given, results untouched.

The *existing* entries of `AttentionInterface._global_mapping` are wrapped in place. A new attention name would lose the
model's padding and window masks, which Transformers looks up by name. The wrappers live as long as the process: a fresh
one per call would make torch.compile recompile.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from comppo.errors import UnreadableModelError

AttentionFunction = Callable[..., Any]


@runtime_checkable
class Observer(Protocol):
    """Sees the inputs of attention calls."""

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called after each attention call of any model in the process; must filter by `module`."""


# The registry is global to the process, and so is what listens to it.
_observers: list[Observer] = []
_wrappers: dict[tuple[str, AttentionFunction | None], AttentionFunction] = {}
_wrapped: dict[AttentionFunction, AttentionFunction | None] = {}
_lock = threading.Lock()


def attach(observer: Observer) -> None:
    """Start showing attention calls to `observer`."""
    with _lock:
        if not _observers:
            _install()
        _observers.append(observer)


def detach(observer: Observer) -> None:
    """Stop; with the last observer the registry is as it was before the first."""
    with _lock:
        _observers[:] = [other for other in _observers if other is not observer]
        if not _observers:
            _restore()


def _mapping() -> dict[str, AttentionFunction]:
    from transformers.modeling_utils import AttentionInterface

    mapping: dict[str, AttentionFunction] = AttentionInterface._global_mapping
    return mapping


def _install() -> None:
    mapping = _mapping()
    # "eager" is no entry: models hand their own function over as the default of the look-up.
    for name in [*mapping, "eager"]:
        if mapping.get(name) not in _wrapped:
            mapping[name] = _wrapper(name, mapping.get(name))


def _restore() -> None:
    mapping = _mapping()
    for name, function in list(mapping.items()):
        if function in _wrapped:  # an entry that somebody registered in the meantime stays
            original = _wrapped[function]
            if original is None:
                del mapping[name]
            else:
                mapping[name] = original


def _wrapper(name: str, function: AttentionFunction | None) -> AttentionFunction:
    if (name, function) in _wrappers:
        return _wrappers[name, function]
    tell = torch.compiler.disable(_tell)  # here, not as a decorator: it loads the compiler

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = eager_function(type(module)) if function is None else function
        result = call(module, query, key, value, attention_mask, *args, **kwargs)
        tell(name, module, query, key, attention_mask, kwargs)
        return result

    _wrappers[name, function] = attention
    _wrapped[attention] = function
    return attention


def _tell(name: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
    for observer in tuple(_observers):
        observer.observe(name, module, query, key, mask, options)


def eager_function(attention_class: type[nn.Module]) -> AttentionFunction:
    """The eager attention function that `attention_class` itself would have used.

    Args:
        attention_class: the class of the module that calls it.

    Returns:
        The function that its `forward` names, or the one of its Python module.

    Raises:
        UnreadableModelError: its modules define none.
    """
    for cls in attention_class.__mro__:
        scope = vars(sys.modules.get(cls.__module__, object))
        forward = getattr(vars(cls).get("forward"), "__code__", None)
        names = forward.co_names if forward is not None else ()
        for name in ("eager_attention_forward", *(n for n in names if n.endswith("eager_attention_forward"))):
            function = scope.get(name)
            if callable(function):
                return function  # type: ignore[no-any-return]
    raise UnreadableModelError(
        f"{attention_class.__module__}.{attention_class.__name__} runs eager attention through a function that cannot "
        'be found; load the model with attn_implementation="sdpa".'
    )
