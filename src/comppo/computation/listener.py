"""What happens between the lines of a forward pass while a reader is open: from hooks to stored numbers."""

import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comppo.computation import registry
from comppo.computation.attention_calls import documents_apart, statistics_of_call, statistics_of_scores
from comppo.computation.attention_rows import AttentionStatistics
from comppo.computation.bypass import Bypass
from comppo.computation.hooks import Hook
from comppo.computation.routed import project
from comppo.computation.router import ROUTER_STATISTICS, Router, RouterHook
from comppo.computation.sequences import Sequences, cache_of, made_cache, sequences_of
from comppo.computation.store import Store
from comppo.computation.summaries import AttentionStatistic
from comppo.computation.support import ModelMap, check_implementation
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """What is to be read of a model; settings as in `ComputationReader`, checked there."""

    model: ModelMap
    statistics: dict[str, AttentionStatistic]
    layers: tuple[int, ...]
    heads: str | tuple[int, ...] | None
    sink_tokens: int
    positions: slice | None
    hidden_layers: tuple[int, ...]
    routed_width: int
    routers: dict[int, Router]
    """By position of their decoder layer."""
    router_statistics: tuple[str, ...]

    def of_heads(self, values: Tensor, axis: int) -> Tensor:
        """Values of the chosen heads along an axis."""
        if self.heads is None:
            return values
        if isinstance(self.heads, str):
            return values.mean(axis, keepdim=True)
        if any(not 0 <= h < values.shape[axis] for h in self.heads):
            raise ConfigError(f"heads={self.heads!r}: this model has heads 0 to {values.shape[axis] - 1}.")
        return values.index_select(axis, torch.tensor(self.heads, device=values.device))


class Listener:
    """Takes what a plan asks for out of each forward of the thread that opened it, into a `Store`.

    Keys of the store: (("attention", statistic), layer), (statistic of routers, layer), ("visible_keys", layer),
    ("routed", layer), ("hidden", index) and ("hidden_before", index).
    """

    def __init__(self, plan: Plan) -> None:
        """Nothing is heard before `open`."""
        self.plan = plan
        self._layer_of = {id(plan.model.attention[i]): i for i in plan.layers}
        # One for life: compiled code may hold on to it.
        self._routers = RouterHook(plan.routers, self._take_router)
        self._open: ExitStack | None = None
        self._thread: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.store = Store()
        self.forwards = 0
        self._sequences: Sequences | None = None
        self._rows = slice(0, 0)
        self._tokens: int | None = None
        self._cache: weakref.ref[Any] | None = None
        self._marks: tuple[Tensor | None, Tensor | None] | None = None
        self._features: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], ...]] = {}
        self._running = False

    def open(self) -> None:
        """Start anew; ConfigError where it is open already."""
        if self._open is not None:
            raise ConfigError("this reader is already reading: leave its context first, or make a second reader.")
        plan, model = self.plan, self.plan.model
        check_implementation(getattr(model.decoder.config, "_attn_implementation", None))
        self._forget()
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            hook: Any = model.decoder.register_forward_pre_hook(Hook(self._begin), with_kwargs=True)
            stack.callback(hook.remove)
            for position, layer in enumerate(model.layers):
                routed = self._attention_in(layer) if plan.routed_width else None
                if position in plan.hidden_layers or routed is not None:
                    taker = Hook(self._taker(position, routed))
                    hook = layer.register_forward_pre_hook(taker, with_kwargs=True)
                    stack.callback(hook.remove)
            hook = model.decoder.register_forward_hook(Hook(self._end))
            stack.callback(hook.remove)
            stack.enter_context(self._routers)
            bypassing = [model.attention[i] for i in plan.layers if i in model.bypassing]
            if bypassing:
                stack.enter_context(Bypass(bypassing, self))
            registry.attach(self)
            stack.callback(registry.detach, self)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Stop, and leave model and registry as they were."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self._sequences = self._marks = self._cache = None
            self._features, self._seen = {}, {}

    def _listens(self) -> bool:
        """Whether what happens now is a forward of this thread, not a checkpoint that is run again for gradients."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    # A forward begins ---------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the decoder: learn where its sequences begin."""
        if not self._listens():
            return
        if self._running:  # the forward before this one failed
            self.forwards -= 1
            self.store.take_back()
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        before, self._sequences = self._sequences, sequences_of(given)
        cache = cache_of(given)
        continues = bool(self._sequences.past) and self._cache is not None and self._cache() is cache
        if continues and before is not None and self._sequences.past != before.total:
            raise EvidenceError(
                f"the cache was cut from {before.total} to {self._sequences.past} positions between forwards, as "
                "speculative decoding does, so what was read of it no longer holds: generate without an assistant."
            )
        if continues and self.plan.positions is not None:
            raise EvidenceError(
                f"positions={self.plan.positions!r} choose from whole sequences, but this forward adds to a cache: "
                "read every position (positions=None) while a sequence grows."
            )
        self._cache = None if cache is None else weakref.ref(cache)
        if not continues:
            self._features.clear()
        self._rows = self._positions(self._sequences.total - self._sequences.past)
        self._check_length(continues)
        self._marks = None
        self._seen.clear()
        self.store.begin(new_rows=not continues)
        self.forwards += 1
        self._running = True

    def _check_length(self, continues: bool) -> None:
        """Refuse micro-batches that cannot be joined as soon as they are seen."""
        tokens = self._rows.stop - self._rows.start
        if continues:
            self._tokens = None  # a growing sequence: told at its end
        elif not self.forwards:
            self._tokens = tokens
        elif self._tokens is not None and tokens != self._tokens:
            raise EvidenceError(
                f"a forward that reads {tokens} positions follows one of {self._tokens} in the same context: pad all "
                "micro-batches to one length, choose as many `positions` in each, or read each in its own context; a "
                "sequence that grows needs a cache."
            )

    def _positions(self, length: int) -> slice:
        """The positions to read of a forward of this length."""
        wanted = self.plan.positions or slice(None)
        start, stop, _ = wanted.indices(length)
        ends = [end for end in (wanted.start, wanted.stop) if end is not None]
        if start >= stop or any(not -length <= end <= length for end in ends):
            raise EvidenceError(f"positions={wanted!r} are not within a sequence of {length} positions.")
        return slice(start, stop)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After each forward of the decoder: take its output, and remember the cache that it made itself."""
        if not self._listens() or self._sequences is None:
            return
        self._running = False
        if self._cache is None:
            cache = made_cache(output)
            self._cache = None if cache is None else weakref.ref(cache)
        if len(self.plan.model.layers) in self.plan.hidden_layers:
            self._take_hidden(len(self.plan.model.layers), output if isinstance(output, Tensor) else output[0])

    # Attention ----------------------------------------------------------------------------------------------------

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called after each attention call; reduces its rows if it is one of the chosen layers."""
        layer = self._begun(module, query, key)
        if layer is None:
            return
        with torch.no_grad():
            assert self._sequences is not None
            if self._marks is None:
                apart = documents_apart(implementation, query, mask, options, self._sequences.documents)
                self._marks = self._sequences.sinks(self.plan.sink_tokens, apart), apart
            sinks, documents = self._marks
            stats = statistics_of_call(
                implementation,
                module,
                query.detach(),
                key.detach(),
                mask,
                options,
                sinks=sinks,
                documents=documents,
                rows=self._rows,
                past=self._sequences.past,
                cached=self._cache is not None,
                **self._wanted(layer),
            )
            self._keep(layer, stats)

    def observe_scores(self, module: nn.Module, scores: Tensor) -> None:
        """Called where a model makes its own scores, masks added."""
        layer = self._begun(module, scores)
        if layer is None:
            return
        with torch.no_grad():
            assert self._sequences is not None
            sinks = self._sequences.sinks(self.plan.sink_tokens, None)
            self._keep(
                layer,
                statistics_of_scores(
                    scores, sinks=sinks, rows=self._rows, past=self._sequences.past, **self._wanted(layer)
                ),
            )

    def _begun(self, module: nn.Module, *given: Tensor) -> int | None:
        """The layer of a module that is to be read now; the same rows again (differential attention) are not."""
        layer = self._layer_of.get(id(module))
        if layer is None or self._sequences is None or not self._listens():
            return None
        seen = self._seen.get(layer)
        if seen is not None and all(before() is tensor for before, tensor in zip(seen, given, strict=True)):
            return None
        if seen is not None:
            raise UnreadableModelError(f"layer {layer} attended twice in one forward: leave it out of `layers`.")
        self._seen[layer] = tuple(weakref.ref(tensor) for tensor in given)  # their memory is soon another tensor's
        return layer

    def _wanted(self, layer: int) -> dict[str, Any]:
        statistics = self.plan.statistics.values()
        return {
            "features": self._features.get(layer),
            "entropy": any(statistic.entropy for statistic in statistics),
            "distance": any(statistic.distance for statistic in statistics),
        }

    def _keep(self, layer: int, stats: AttentionStatistics) -> None:
        shape = stats.visible_keys.shape
        for name, statistic in self.plan.statistics.items():
            try:
                values = statistic.compute(stats)
            except Exception as error:
                error.add_note(f"raised by the statistic {name!r}, whose function was given AttentionStatistics.")
                raise
            if not isinstance(values, Tensor) or values.shape != shape:
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ConfigError(
                    f"statistic {name!r} gave {got}: return one value per row, head and token, {tuple(shape)}."
                )
            self.store.add((("attention", name), layer), self.plan.of_heads(values.detach(), 1).transpose(1, 2))
        self.store.add(("visible_keys", layer), stats.visible_keys.double().mean(1))
        if stats.rest_features is not None:
            self.store.add(("routed", layer), self.plan.of_heads(stats.rest_features, 1).mean(1))

    # Routers ------------------------------------------------------------------------------------------------------

    def _take_router(self, layer: int, probabilities: Tensor) -> None:
        if self._sequences is None or not self._listens():
            return
        rows, length = self._sequences.real.shape[0], self._sequences.total - self._sequences.past
        if probabilities.shape[0] != rows * length:
            raise UnreadableModelError(
                f"the router of layer {layer} saw {probabilities.shape[0]} positions of {rows} x {length}: it cannot "
                "be told which is which."
            )
        for name in self.plan.router_statistics:
            values = ROUTER_STATISTICS[name](probabilities, self.plan.routers[layer].top_k)
            self.store.add((name, layer), values.view(rows, length)[:, self._rows].clone())

    # Hidden states ------------------------------------------------------------------------------------------------

    def _attention_in(self, layer: nn.Module) -> int | None:
        """The `layer_idx` of the attention that is read in this decoder layer."""
        return next((self._layer_of[id(m)] for m in layer.modules() if id(m) in self._layer_of), None)

    def _taker(self, position: int, routed: int | None) -> Callable[..., None]:
        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._listens() and self._sequences is not None:
                hidden = args[0] if args else kwargs["hidden_states"]
                if position in self.plan.hidden_layers:
                    self._take_hidden(position, hidden)
                if routed is not None:
                    self._take_features(routed, hidden)

        return take

    def _take_hidden(self, index: int, hidden: Tensor) -> None:
        """Keep the read positions, and each one's predecessor for `hidden_change`; copied, to free the rest."""
        assert self._sequences is not None
        hidden, rows = hidden.detach(), self._rows
        before = hidden[:, max(rows.start - 1, 0) : rows.stop - 1]
        if rows.start == 0:
            earlier = self.store.last(("hidden", index)) if self._sequences.past else None
            lead = torch.zeros_like(hidden[:, :1]) if earlier is None else earlier.to(hidden)
            before = torch.cat([lead, before], 1)
        self.store.add(("hidden", index), hidden[:, rows].clone())
        self.store.add(("hidden_before", index), before.clone())

    def _take_features(self, layer: int, hidden: Tensor) -> None:
        """Project a layer's input; while a cache grows, the projections of earlier positions are kept as well."""
        assert self._sequences is not None
        projected = project(hidden.detach(), self.plan.routed_width, layer)
        if layer in self._features:
            projected = torch.cat([self._features[layer], projected], 1)
        if projected.shape[1] != self._sequences.total:
            raise EvidenceError(
                "a routed summary needs every position that attention reads, but the cache was begun before this "
                "context: run the whole sequence inside it."
            )
        self._features[layer] = projected
