"""A context manager that reads attention rows and hidden states while a model runs, changing none of its results."""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comppo.computation import registry
from comppo.computation.attention_calls import documents_apart, statistics_of_call
from comppo.computation.attention_rows import AttentionStatistics
from comppo.computation.routed import project
from comppo.computation.sequences import Sequences, sequences_of
from comppo.computation.store import Store
from comppo.computation.summaries import AttentionStatistic, chosen_statistics, name_of
from comppo.computation.support import Layers, check_implementation, choose_layers, map_model
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

Heads = str | Sequence[int] | None
"""Which heads: None (each one), "mean" (their average, as one head) or a sequence of head numbers."""


def emitting_positions(completion_length: int) -> slice:
    """The positions that emit the last `completion_length` tokens of a sequence: each is the one before its token.

    Args:
        completion_length: number of response tokens at the end of each sequence, at least 1.

    Returns:
        For `ComputationReader(positions=...)`.

    Raises:
        ConfigError: it is not positive.
    """
    if completion_length < 1:
        raise ConfigError(f"completion_length={completion_length!r}: pass a positive number of tokens.")
    return slice(-completion_length - 1, -1)


class ComputationReader:
    """Reads statistics of attention and hidden states of every forward pass inside the context.

    Several forwards in one context (micro-batches) are concatenated over rows; those that share a growing cache, as in
    `generate`, over tokens. The sinks of a row are its first `sink_tokens` unpadded keys, or those of each document
    where a row packs several. The model's outputs are the same to the bit, whatever wraps it (PEFT, DDP, torch.compile)
    and whatever mode it is in; attention runs in the implementation it was loaded with. Forwards of other models, and
    of other threads than the one that entered the context, pass unseen.

    Example:
        with ComputationReader(model, statistics=("collision", "entropy"), positions=slice(-101, -1)) as reader:
            model(input_ids=input_ids, attention_mask=attention_mask)
        collision = reader.statistic("collision")  # (rows, 100 tokens, layers, heads)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        statistics: Sequence[str | AttentionStatistic] = ("collision",),
        layers: Layers = "middle",
        heads: Heads = None,
        sink_tokens: int = 1,
        positions: slice | None = None,
        hidden_layers: Sequence[int] = (),
        routed_width: int = 0,
    ) -> None:
        """Choose what to read.

        Args:
            model: a causal language model of Transformers, wrapped or not.
            statistics: names from `ATTENTION_STATISTICS`, or statistics of your own; "sink_mass" is always read.
            layers: "middle" (the middle third of the layers with readable attention), "all" of them, or a sequence of
                `layer_idx` (an empty one reads no attention).
            heads: None keeps every head, "mean" averages them, a sequence of head numbers keeps these.
            sink_tokens: leading keys of each sequence that count as attention sink; 0 for none.
            positions: positions of each sequence to read, without a step; None reads every one. Ends below 0 count
                from the sequence's end: `emitting_positions(C)` are those that emit the last C tokens.
            hidden_layers: indices as in Transformers' `hidden_states`: 0 is the embedding, i the output of i layers,
                and the last (-1) what feeds the output head, after the final norm.
            routed_width: width of the summary of earlier hidden states that attention reads; 0 for none.

        Raises:
            ConfigError: a setting is unknown or out of range.
            UnreadableModelError: a chosen layer cannot be read.
        """
        if sink_tokens < 0:
            raise ConfigError(f"sink_tokens={sink_tokens!r}: pass 0 (no sink) or a positive number of keys.")
        if positions is not None and (not isinstance(positions, slice) or positions.step not in (None, 1)):
            raise ConfigError(f"positions={positions!r}: pass a slice without a step, or None for all positions.")
        if isinstance(heads, str) and heads != "mean":
            raise ConfigError(f'heads={heads!r}: pass None, "mean" or a sequence of head numbers.')
        if routed_width < 0:
            raise ConfigError(f"routed_width={routed_width!r}: pass 0 (no summary) or a positive width.")
        self._statistics = chosen_statistics((*statistics, "sink_mass"))
        self._map = map_model(model)
        self.layers: tuple[int, ...] = choose_layers(self._map, layers)
        """`layer_idx` of the layers that are read, ascending."""
        self._heads, self._sink_tokens, self._slice = heads, sink_tokens, positions
        self._routed_width = routed_width
        depth = len(self._map.layers)
        self.hidden_layers = tuple(i + depth + 1 if i < 0 else i for i in hidden_layers)
        """Indices of the hidden states that are kept, from 0."""
        if any(not 0 <= i <= depth for i in self.hidden_layers):
            raise ConfigError(
                f"hidden_layers={tuple(hidden_layers)!r}: this model has indices -{depth + 1} to {depth}."
            )
        self._layer_of = {id(self._map.attention[i]): i for i in self.layers}
        self._handles: list[Any] = []
        self._thread: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._store = Store()
        self._sequences: Sequences | None = None
        self._cache: weakref.ref[Any] | None = None
        self._rows: slice | None = None
        self._tokens: int | None = None
        self._apart: tuple[Tensor | None, Tensor | None] | None = None
        self._features: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self.forwards = 0
        """Forward passes seen since the context was entered."""

    def __enter__(self) -> "ComputationReader":
        """Start reading; what an earlier use of this reader read is forgotten."""
        if self._handles:
            raise ConfigError("this reader is already reading: leave its context first, or make a second reader.")
        self._forget()
        self._thread = threading.get_ident()
        decoder = self._map.decoder
        check_implementation(getattr(decoder.config, "_attn_implementation", None))
        untraced = torch.compiler.disable  # here, not as decorators: it loads the compiler
        self._handles.append(decoder.register_forward_pre_hook(untraced(self._begin), with_kwargs=True))
        for position, layer in enumerate(self._map.layers):
            routed = self._routed_layer(layer) if self._routed_width else None
            if position in self.hidden_layers or routed is not None:
                hook = untraced(self._taker(position, routed))
                self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if len(self._map.layers) in self.hidden_layers:
            self._handles.append(decoder.register_forward_hook(untraced(self._take_output)))
        registry.attach(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop reading and leave model and registry as they were."""
        registry.detach(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What was read ------------------------------------------------------------------------------------------------

    def statistic(self, statistic: str | AttentionStatistic) -> Float[Tensor, "rows tokens layers heads"]:
        """A statistic of every row, position, layer and head.

        Args:
            statistic: one of `statistics`, or "sink_mass".

        Returns:
            Float32, detached; layers and heads in ascending order, or heads in the order asked for.

        Raises:
            ConfigError: it was not among `statistics`.
            UnreadableModelError: a layer's attention was not seen, or layers differ in their number of heads.
            EvidenceError: no forward ran in the context.
        """
        per_layer = self._named(statistic)
        if len({part.shape[2] for part in per_layer}) > 1:
            raise UnreadableModelError(
                f"layers {self.layers} have {[p.shape[2] for p in per_layer]} heads: choose layers with equal "
                'numbers, or heads="mean".'
            )
        return torch.stack(per_layer, 2)

    def summary(self, statistic: str | AttentionStatistic) -> Float[Tensor, "rows tokens"]:
        """The same, averaged over the heads of each layer and then over layers; errors as in `statistic`."""
        return torch.stack([part.mean(-1) for part in self._named(statistic)]).mean(0)

    def visible_keys(self) -> Float[Tensor, "rows tokens layers"]:
        """How many keys each position may attend to in each layer, sinks included."""
        return torch.stack(self._collected("visible_keys"), -1)

    def routed(self) -> Float[Tensor, "rows tokens layers width"]:
        """What attention reads of earlier positions: their hidden states, projected and weighted by its rows.

        Each layer's input is scaled to unit root mean square, projected to `routed_width` columns by a fixed random
        matrix, and averaged with the layer's attention, sinks left out, and over the chosen heads.
        """
        if not self._routed_width:
            raise ConfigError("routed_width=0 reads no routed summary: pass its width, such as 16.")
        return torch.stack(self._collected("routed"), 2)

    def hidden(self) -> Float[Tensor, "rows tokens width"]:
        """Hidden states of `hidden_layers`, concatenated in that order; float32, detached."""
        return self._hidden_states("hidden")

    def hidden_change(self) -> Float[Tensor, "rows tokens"]:
        """||h_t - h_(t-1)|| / ||h_(t-1)|| of `hidden()`; 0 at the sequence's first position."""
        hidden, before = self._hidden_states("hidden"), self._hidden_states("hidden_before")
        norm = before.norm(dim=-1)
        return torch.where(norm > 0, (hidden - before).norm(dim=-1) / torch.where(norm > 0, norm, 1.0), 0.0)

    def _named(self, statistic: str | AttentionStatistic) -> list[Tensor]:
        name = name_of(statistic)
        if name not in self._statistics:
            raise ConfigError(f"statistic={name!r} was not read: this reader reads {', '.join(self._statistics)}.")
        return self._collected(name)

    def _collected(self, name: str) -> list[Tensor]:
        self._need_forward()
        if not self.layers:
            raise ConfigError("layers=() reads no attention: pass the layers to read.")
        unseen = [i for i in self.layers if self._store.parts((name, i)) < self.forwards]
        if unseen:
            raise UnreadableModelError(
                f"the attention of layers {unseen} did not go through Transformers' attention registry, or the forward "
                'stopped before them: load the model with attn_implementation="sdpa" and leave these layers out.'
            )
        return [self._store.whole((name, i)) for i in self.layers]

    def _hidden_states(self, kind: str) -> Tensor:
        self._need_forward()
        if not self.hidden_layers:
            raise ConfigError("hidden_layers=() reads no hidden states: pass their indices, such as (-1,).")
        if any(self._store.parts((kind, i)) < self.forwards for i in self.hidden_layers):
            raise EvidenceError(
                "hidden states were not seen: the forward stopped before them, or the model was compiled while other "
                "hooks were on it; call torch.compiler.reset() before the first forward in this context."
            )
        return torch.cat([self._store.whole((kind, i)) for i in self.hidden_layers], -1)

    def _need_forward(self) -> None:
        if not self.forwards:
            raise EvidenceError("nothing was read: run the model's forward inside the reader's context.")

    # While the model runs -----------------------------------------------------------------------------------------

    def _listens(self) -> bool:
        """Whether what happens now is a forward of this reader's thread, not a checkpoint run again for gradients."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the decoder: learn where its sequences begin."""
        if not self._listens():
            return
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        self._sequences = sequences_of(given)
        cache = given.get("past_key_values")
        continues = bool(self._sequences.past) and self._cache is not None and self._cache() is cache
        if continues and self._slice is not None:
            raise EvidenceError(
                f"positions={self._slice!r} choose from whole sequences, but this forward adds to a cache: "
                "read every position (positions=None) while a sequence grows."
            )
        self._cache = None if cache is None else weakref.ref(cache)
        if not continues:
            self._features.clear()
        self._rows = self._positions(self._sequences.total - self._sequences.past)
        self._check_length(continues)
        self._apart = None
        self._seen.clear()
        self._store.begin(new_rows=not continues)
        self.forwards += 1

    def _check_length(self, continues: bool) -> None:
        """Refuse micro-batches that cannot be joined as soon as they are seen."""
        assert self._rows is not None
        tokens = self._rows.stop - self._rows.start
        if continues:
            self._tokens = None  # a growing sequence: told at its end
        elif not self.forwards:
            self._tokens = tokens
        elif self._tokens is not None and tokens != self._tokens:
            raise EvidenceError(
                f"a forward that reads {tokens} positions follows one of {self._tokens} in the same context: pad all "
                "micro-batches to one length, choose as many `positions` in each, or read each in its own context."
            )

    def _positions(self, length: int) -> slice:
        """The positions to read of a forward of this length."""
        start, stop, _ = (self._slice or slice(None)).indices(length)
        wanted = self._slice
        outside = wanted is not None and any(
            end is not None and not -length <= end <= length for end in (wanted.start, wanted.stop)
        )
        if outside or start >= stop:
            raise EvidenceError(f"positions={wanted!r} are not within a sequence of {length} positions.")
        return slice(start, stop)

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called by the registry after each attention call; reduces its rows if it is one of the chosen layers."""
        layer = self._layer_of.get(id(module))
        if layer is None or not self._listens() or self._sequences is None:
            return
        self._check_once(layer)
        with torch.no_grad():
            if self._apart is None:
                documents = documents_apart(implementation, query, mask, options, self._sequences.documents)
                self._apart = documents, self._sinks(documents)
            documents, sinks = self._apart
            stats = statistics_of_call(
                implementation,
                module,
                query.detach(),
                key.detach(),
                mask,
                options,
                sinks=sinks,
                documents=documents,
                rows=self._rows or slice(None),
                features=self._features.get(layer),
                entropy=any(s.entropy for s in self._statistics.values()),
                distance=any(s.distance for s in self._statistics.values()),
            )
            self._keep(layer, stats)

    def _check_once(self, layer: int) -> None:
        if layer in self._seen:
            raise UnreadableModelError(f"layer {layer} attended twice in one forward: leave it out of `layers`.")
        self._seen.add(layer)

    def _sinks(self, documents: Tensor | None) -> Tensor | None:
        assert self._sequences is not None
        return self._sequences.sinks(self._sink_tokens, documents)

    def _keep(self, layer: int, stats: AttentionStatistics) -> None:
        for name, statistic in self._statistics.items():
            values = statistic.compute(stats)
            if values.shape != stats.visible_keys.shape:
                raise ConfigError(
                    f"statistic {name!r} gave {tuple(values.shape)}: return one value per row, head and token, "
                    f"{tuple(stats.visible_keys.shape)}."
                )
            self._store.add((name, layer), self._of_heads(values).transpose(1, 2))
        self._store.add(("visible_keys", layer), stats.visible_keys[:, 0])
        if stats.rest_features is not None:
            chosen = self._heads if isinstance(self._heads, str) else None
            routed = stats.rest_features if chosen or self._heads is None else stats.rest_features[:, list(self._heads)]
            self._store.add(("routed", layer), routed.mean(1))

    def _of_heads(self, values: Tensor) -> Tensor:
        if self._heads is None:
            return values
        if isinstance(self._heads, str):
            return values.mean(1, keepdim=True)
        if any(not 0 <= h < values.shape[1] for h in self._heads):
            raise ConfigError(f"heads={tuple(self._heads)!r}: this model has heads 0 to {values.shape[1] - 1}.")
        return values[:, list(self._heads)]

    def _routed_layer(self, layer: nn.Module) -> int | None:
        """The `layer_idx` of the attention that is read in this decoder layer."""
        return next((self._layer_of[id(m)] for m in layer.modules() if id(m) in self._layer_of), None)

    def _taker(self, position: int, routed: int | None) -> Callable[..., None]:
        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._listens() and self._sequences is not None:
                hidden = args[0] if args else kwargs["hidden_states"]
                if position in self.hidden_layers:
                    self._take_hidden(position, hidden)
                if routed is not None:
                    self._take_features(routed, hidden)

        return take

    def _take_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._listens() and self._sequences is not None:
            self._take_hidden(len(self._map.layers), output if isinstance(output, Tensor) else output[0])

    def _take_hidden(self, index: int, hidden: Tensor) -> None:
        """Keep the read positions, and each one's predecessor for `hidden_change`; copied, to free the rest."""
        assert self._rows is not None and self._sequences is not None
        rows, hidden = self._rows, hidden.detach()
        first = max(rows.start - 1, 0)
        before = hidden[:, first : rows.stop - 1]
        if rows.start == 0:
            earlier = self._store.last(("hidden", index)) if self._sequences.past else None
            lead = torch.zeros_like(hidden[:, :1]) if earlier is None else earlier.to(hidden)
            before = torch.cat([lead, before], 1)
        self._store.add(("hidden", index), hidden[:, rows].clone())
        self._store.add(("hidden_before", index), before.clone())

    def _take_features(self, layer: int, hidden: Tensor) -> None:
        """Project a layer's input; while a cache grows, the projections of earlier positions are kept as well."""
        assert self._sequences is not None
        projected = project(hidden.detach(), self._routed_width, layer)
        if layer in self._features:
            projected = torch.cat([self._features[layer], projected], 1)
        if projected.shape[1] != self._sequences.total:
            raise EvidenceError(
                "a routed summary needs every position that attention reads, but the cache was begun before this "
                "context: run the whole sequence inside it."
            )
        self._features[layer] = projected
