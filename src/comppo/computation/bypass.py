"""Attention that does not go through Transformers' registry: Falcon, GPT-Neo, BLOOM, MPT, XGLM and others.

Such modules call `scaled_dot_product_attention` or a softmax themselves. While one of the chosen modules runs, a
`TorchFunctionMode` sees these calls of its thread and shows what they were given; the calls themselves are made as the
model wrote them, so its results are the same to the bit.
"""

import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from comppo.computation.bypass_kind import bypass_kind
from comppo.computation.hooks import Hook
from comppo.errors import ConfigError, UnreadableModelError


@runtime_checkable
class BypassObserver(Protocol):
    """Sees what attention calls outside the registry were given."""

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called after `scaled_dot_product_attention`, in the manner of `registry.Observer`.

        Args:
            implementation: "sdpa".
            module: the attention module.
            query: (rows, heads, queries, width).
            key: (rows, kv_heads, keys, width); without the keys that a causal call hides from every query.
            mask: None, or boolean (true = visible) or additive, (rows | 1, heads | 1, queries, keys).
            options: "scaling", None for 1 / sqrt(width), and "is_causal".
        """

    def observe_scores(self, module: nn.Module, scores: Float[Tensor, "rows heads queries keys"]) -> None:
        """Called after a softmax over keys.

        Args:
            module: the attention module.
            scores: what the softmax was given, in the precision that it worked in or a lower one: scaled, with position
                biases and masks. Hidden keys hold what the model gives them: -inf, the lowest number of the model's
                dtype, or -1e4 (OpenAI GPT and older code), perhaps plus a score.
        """


_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "kv")
"""Arguments that make a module's attention one to another sequence."""


class Bypass:
    """A context in which the attention of chosen modules is shown to an observer.

    Every forward of these modules counts, in any thread and mode, except the second one of gradient checkpointing,
    inside a backward. What is shown is detached, and the observer runs without gradients. Several contexts may be open
    at once, also on the same modules; open and close each while none of its modules runs.

    Compiled code runs uncompiled as long as a context is open, in the whole process: code compiled before would not
    notice that somebody listens.

    Example:
        with Bypass([layer.self_attention for layer in model.transformer.h], observer):
            model(input_ids=input_ids)
    """

    def __init__(self, modules: Iterable[nn.Module], observer: BypassObserver) -> None:
        """Choose what to show.

        Args:
            modules: attention modules whose classes have a `bypass_kind`.
            observer: what is shown to.

        Raises:
            UnreadableModelError: the class of a module has no `bypass_kind`.
        """
        self._modules = tuple(modules)
        unreadable = sorted({type(m).__name__ for m in self._modules if bypass_kind(type(m)) is None})
        if unreadable:
            raise UnreadableModelError(
                f"{', '.join(unreadable)} cannot be read outside Transformers' attention registry: no single softmax "
                "over keys is found in its code. Leave its layers out of `layers`."
            )
        self._observer = observer
        self._open = ExitStack()
        self._entered = False
        self._running = threading.local()

    def __enter__(self) -> "Bypass":
        """Start showing."""
        if self._entered:
            raise ConfigError("this Bypass is open already: leave its context first, or make a second one.")
        with ExitStack() as stack:
            stack.enter_context(_Uncompiled())
            for module in self._modules:
                names = tuple(inspect.signature(module.forward).parameters)
                before = module.register_forward_pre_hook(Hook(self._starter(names)), with_kwargs=True)
                stack.callback(before.remove)
                # Prepended, so that softmaxes in other hooks are not taken for the module's
                after = module.register_forward_hook(Hook(self._ender()), prepend=True, always_call=True)
                stack.callback(after.remove)
            self._open = stack.pop_all()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and leave modules, modes and compiler as they were."""
        self._entered = False
        self._end()  # an interrupt is no Exception, so that no hook ran after it
        self._open.close()

    def _starter(self, names: tuple[str, ...]) -> Callable[..., None]:
        def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._end()
            if not self._entered or torch._C._current_graph_task_id() != -1:  # inside a backward
                return
            given = dict(zip(names, args, strict=False)) | kwargs
            if any(given.get(name) is not None for name in _OTHER_SEQUENCE):
                raise UnreadableModelError(
                    f"{type(module).__name__} attends to another sequence: leave its layer out of `layers`."
                )
            self._running.watch = _Watch(module, given.get(names[0]), self._observer)
            self._running.watch.__enter__()

        return start

    def _ender(self) -> Callable[..., None]:
        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch = self._end()
            if watch is not None and output is not None:  # None where the module raised an error
                watch.require()

        return end

    def _end(self) -> "_Watch | None":
        watch: _Watch | None = getattr(self._running, "watch", None)
        self._running.watch = None
        if watch is not None:
            watch.__exit__(None, None, None)
        return watch


class _Uncompiled:
    """A context in which compiled code runs as it was written; one for all that are open, whichever ends first."""

    _lock = threading.Lock()
    _users = 0
    _stance: Any = None

    def __enter__(self) -> None:
        cls = type(self)
        with cls._lock:
            if not cls._users:
                cls._stance = torch.compiler.set_stance("force_eager")
            cls._users += 1

    def __exit__(self, *error: object) -> None:
        cls = type(self)
        with cls._lock:
            cls._users -= 1
            if not cls._users:
                cls._stance.__exit__(None, None, None)


_quiet = threading.local()
"""`on` while an observer runs, whose own calls are nobody's attention."""


class _Watch(TorchFunctionMode):
    """Sees the calls of one run of one attention module."""

    def __init__(self, module: nn.Module, given: Any, observer: BypassObserver) -> None:
        super().__init__()
        self.module, self._observer = module, observer
        self._given = tuple(given.shape) if isinstance(given, Tensor) else ()
        self._found = 0
        self._others: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = _READERS.get(func)
        if read is not None and not getattr(_quiet, "on", False):
            _quiet.on = True
            try:
                with torch.no_grad():
                    read(self, *args, **(kwargs or {}))
            finally:
                _quiet.on = False
        return result

    def require(self) -> None:
        """Raise UnreadableModelError where the module ran without attention that could be shown."""
        if not self._found:
            raise UnreadableModelError(
                f"{type(self.module).__name__} ran without a softmax over the keys of {self._given} inputs; it took "
                f'softmaxes of {self._others or "nothing"}. Load the model with attn_implementation="sdpa" or "eager", '
                "or leave its layers out of `layers`."
            )

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Show a call of `scaled_dot_product_attention`, whose arguments these are."""
        if query.ndim != 4 or not self._fits(query.shape[0], query.shape[2], key.shape[2]):
            self._others.append((*query.shape[:-1], key.shape[-2]))
            return
        self._count()
        queries, keys = query.shape[2], key.shape[2]
        if attn_mask is not None:
            attn_mask = attn_mask.detach()[(None,) * (4 - attn_mask.ndim)].expand(-1, -1, queries, keys)
        if is_causal and keys > queries:
            key = key[:, :, :queries]  # torch aligns causality at the first key, not at the last
        key = key.expand(query.shape[0], -1, -1, -1)
        options = {"scaling": scale, "is_causal": is_causal}
        self._observer.observe("sdpa", self.module, query.detach(), key.detach(), attn_mask, options)

    def scores(self, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show a call of a softmax, whose arguments these are."""
        scores = self._by_heads(input) if dim in (-1, input.ndim - 1) and input.is_floating_point() else None
        if scores is None or not self._fits(scores.shape[0], scores.shape[2], scores.shape[3]):
            self._others.append(tuple(input.shape))
            return
        self._count()
        dtype = next((given for given in (*args, *kwargs.values()) if isinstance(given, torch.dtype)), scores.dtype)
        if dtype.itemsize < scores.dtype.itemsize:
            scores = scores.to(dtype)  # as the softmax rounds its input, or the model's attention would be another
        self._observer.observe_scores(self.module, scores.detach())

    def _by_heads(self, scores: Tensor) -> Tensor | None:
        """As (rows, heads, queries, keys), from that or (rows * heads, queries, keys); None where it is neither."""
        if scores.ndim == 4:
            return scores
        rows = self._given[0] if self._given else 0
        if scores.ndim != 3 or not rows or scores.shape[0] % rows:
            return None
        heads = scores.shape[0] // rows
        counts = [n for name, n in vars(self.module).items() if "head" in name and isinstance(n, int)]
        # Else (rows, queries, experts) of a router would pass for one head
        return scores.unflatten(0, (rows, heads)) if heads in counts else None

    def _fits(self, rows: int, queries: int, keys: int) -> bool:
        """Whether these are the axes of self-attention over what the module was given, in any order of its axes."""
        axes = list(self._given[:-1])
        for axis in (rows, queries):
            if axis not in axes:
                return False
            axes.remove(axis)
        return keys >= queries

    def _count(self) -> None:
        self._found += 1
        if self._found > 1:
            raise UnreadableModelError(
                f"{type(self.module).__name__} attended twice in one forward: leave its layers out of `layers`."
            )


_READERS: dict[Any, Callable[..., None]] = {
    F.scaled_dot_product_attention: _Watch.attention,
    **dict.fromkeys((F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax), _Watch.scores),
}
