"""A context manager that reads attention rows and hidden states while a model runs, changing none of its results."""

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comppo.computation import registry
from comppo.computation.statistics import AttentionStatistics, attention_statistics
from comppo.computation.summaries import ATTENTION_STATISTICS, check_statistic
from comppo.computation.support import Layers, check_implementation, choose_layers, map_model
from comppo.errors import ConfigError, EvidenceError, UnreadableModelError

Heads = str | Sequence[int] | None
"""Which heads: None (each one), "mean" (their average, as one head) or a sequence of head numbers."""


class ComputationReader:
    """Reads statistics of attention and hidden states of every forward pass inside the context.

    Several forwards in one context (micro-batches) are concatenated over rows; all must have the same sequence length.
    With C = `completion_length`, index t of what is read belongs to response token t and was read at the position that
    emits it: the sequence's last C + 1 positions without the last. Without it, index t is position t.

    The sinks of a row are its first `sink_tokens` unpadded keys; the attention mask is taken from each forward. The
    model's outputs are the same to the bit, whatever wraps it (PEFT, DDP) and whatever mode it is in; attention runs in
    the implementation it was loaded with ("sdpa", "eager", or a flash kernel). Other models in the process pass unseen.

    Example:
        with ComputationReader(model, statistics=("collision",), completion_length=completion_ids.shape[1]) as reader:
            model(input_ids=input_ids, attention_mask=attention_mask)
        collision = reader.statistic("collision")  # (rows, tokens, layers, heads)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        statistics: Sequence[str] = ("collision",),
        layers: Layers = "middle",
        heads: Heads = None,
        sink_tokens: int = 1,
        completion_length: int | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        """Choose what to read.

        Args:
            model: a causal language model of Transformers, wrapped or not.
            statistics: names from `ATTENTION_STATISTICS`; "sink_mass" is always read.
            layers: "middle" (the middle third of the layers with readable attention), "all" of them, or a sequence of
                `layer_idx` (an empty one reads no attention).
            heads: None keeps every head, "mean" averages them, a sequence of head numbers keeps these.
            sink_tokens: leading keys of each row that count as attention sink; 0 for none.
            completion_length: number of response tokens at the end of each sequence; None reads every position.
            hidden_layers: indices as in Transformers' `hidden_states`: 0 is the embedding, i the output of i layers,
                and the last (-1) what feeds the output head, after the final norm.

        Raises:
            ConfigError: a setting is unknown or out of range.
            UnreadableModelError: a chosen layer cannot be read.
        """
        for name in statistics:
            check_statistic(name, tuple(ATTENTION_STATISTICS))
        if sink_tokens < 0:
            raise ConfigError(f"sink_tokens={sink_tokens!r}: pass 0 (no sink) or a positive number of keys.")
        if completion_length is not None and completion_length < 1:
            raise ConfigError(
                f"completion_length={completion_length!r}: pass a positive number, or None for all positions."
            )
        if isinstance(heads, str) and heads != "mean":
            raise ConfigError(f'heads={heads!r}: pass None, "mean" or a sequence of head numbers.')
        self._map = map_model(model)
        self.layers: tuple[int, ...] = choose_layers(self._map, layers)
        """`layer_idx` of the layers that are read, ascending."""
        self.forwards = 0
        """Forward passes seen since the context was entered."""
        self._names = tuple(dict.fromkeys((*statistics, "sink_mass")))
        self._heads, self._sink_tokens, self._completion_length = heads, sink_tokens, completion_length
        depth = len(self._map.layers)
        self.hidden_layers = tuple(i + depth + 1 if i < 0 else i for i in hidden_layers)
        """Indices of the hidden states that are kept, from 0."""
        if any(not 0 <= i <= depth for i in self.hidden_layers):
            raise ConfigError(
                f"hidden_layers={tuple(hidden_layers)!r}: this model has indices -{depth + 1} to {depth}."
            )
        self._layer_of = {id(self._map.attention[i]): i for i in self.layers}
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self.forwards = 0
        self._length: int | None = None
        self._first_key: Tensor | None = None
        self._seen: set[int] = set()
        self._read: dict[tuple[int, str], list[Tensor]] = {}
        self._hidden: dict[int, list[Tensor]] = {i: [] for i in self.hidden_layers}

    def __enter__(self) -> "ComputationReader":
        """Start reading; what an earlier use of this reader read is forgotten."""
        if self._handles:
            raise ConfigError("this reader is already reading: leave its context first, or make a second reader.")
        self._forget()
        decoder, layers = self._map.decoder, self._map.layers
        check_implementation(getattr(decoder.config, "_attn_implementation", None))
        self._handles.append(decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        for index in set(self.hidden_layers):
            if index == len(layers):
                self._handles.append(decoder.register_forward_hook(self._take_output))
            else:
                self._handles.append(layers[index].register_forward_pre_hook(self._taker(index), with_kwargs=True))
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

    def statistic(self, name: str) -> Float[Tensor, "rows tokens layers heads"]:
        """A statistic of every row, position, layer and head.

        Args:
            name: one of `statistics`, or "sink_mass".

        Returns:
            Float32, detached; layers and heads in ascending order, or heads in the order asked for.

        Raises:
            ConfigError: it was not among `statistics`.
            UnreadableModelError: a layer's attention was not seen, or layers differ in their number of heads.
            EvidenceError: no forward ran in the context.
        """
        check_statistic(name, self._names)
        per_layer = self._collected(name)
        if len({part.shape[1] for part in per_layer}) > 1:
            raise UnreadableModelError(
                f"layers {self.layers} have {[p.shape[1] for p in per_layer]} heads: choose layers with equal "
                'numbers, or heads="mean".'
            )
        return torch.stack(per_layer, -1).permute(0, 2, 3, 1).contiguous()

    def visible_keys(self) -> Float[Tensor, "rows tokens layers"]:
        """How many keys each position may attend to in each layer, sinks included."""
        return torch.stack([part[:, 0] for part in self._collected("visible_keys")], -1)

    def hidden(self) -> Float[Tensor, "rows tokens width"]:
        """Hidden states of `hidden_layers`, concatenated in that order; float32, detached."""
        return self._hidden_with_lead()[:, 1:]

    def hidden_change(self) -> Float[Tensor, "rows tokens"]:
        """||h_t - h_(t-1)|| / ||h_(t-1)|| of `hidden()`; 0 at the sequence's first position."""
        hidden = self._hidden_with_lead()
        before = hidden[:, :-1].norm(dim=-1)
        change = (hidden[:, 1:] - hidden[:, :-1]).norm(dim=-1)
        return torch.where(before > 0, change / torch.where(before > 0, before, 1.0), 0.0)

    def _collected(self, name: str) -> list[Tensor]:
        self._need_forward()
        if not self.layers:
            raise ConfigError("layers=() reads no attention: pass the layers to read.")
        rows = {i: sum(part.shape[0] for part in self._read.get((i, name), [])) for i in self.layers}
        unseen = [i for i in self.layers if rows[i] < max(max(rows.values()), 1)]
        if unseen:
            raise UnreadableModelError(
                f"the attention of layers {unseen} did not go through Transformers' attention registry, or the forward "
                'stopped before them: load the model with attn_implementation="sdpa" and leave these layers out.'
            )
        return [torch.cat(self._read[i, name]) for i in self.layers]

    def _hidden_with_lead(self) -> Tensor:
        self._need_forward()
        if not self.hidden_layers:
            raise ConfigError("hidden_layers=() reads no hidden states: pass their indices, such as (-1,).")
        return torch.cat([torch.cat(self._hidden[i]) for i in self.hidden_layers], -1)

    def _need_forward(self) -> None:
        if not self.forwards:
            raise EvidenceError("nothing was read: run the model's forward inside the reader's context.")

    # While the model runs -----------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the decoder: take its attention mask."""
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise EvidenceError("attention_mask must be (rows, positions) while computation is read, or None.")
        if mask is None and isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any()):
            raise EvidenceError(
                "packed sequences are not read: pass one sequence per row with a padded attention_mask."
            )
        self._first_key = None if mask is None else mask.bool().long().argmax(-1)
        self._seen.clear()
        self.forwards += 1

    def observe(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Called by the registry after each attention call; reduces its rows if it is one of the chosen layers."""
        layer = self._layer_of.get(id(module))
        if layer is None:
            return
        if layer in self._seen and torch.is_grad_enabled():
            return  # a checkpointed layer runs again in the backward pass
        if layer in self._seen:
            raise UnreadableModelError(f"layer {layer} attended twice in one forward: leave it out of `layers`.")
        self._seen.add(layer)
        with torch.no_grad():
            self._reduce(layer, implementation, module, query.detach(), key.detach(), mask, options)

    def _reduce(
        self,
        layer: int,
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> None:
        rows = self._positions(query.shape[2])
        sink_end = None
        if self._sink_tokens:
            first = query.new_zeros(query.shape[0], dtype=torch.long) if self._first_key is None else self._first_key
            sink_end = first.to(query.device).expand(query.shape[0]) + self._sink_tokens
        stats = _reduce_call(implementation, module, query, key, mask, options, sink_end, rows)
        for name in self._names:
            self._keep(layer, name, self._of_heads(ATTENTION_STATISTICS[name](stats)))
        self._keep(layer, "visible_keys", stats.visible_keys[:, :1])

    def _keep(self, layer: int, name: str, values: Tensor) -> None:
        self._read.setdefault((layer, name), []).append(values.float().contiguous())

    def _of_heads(self, values: Tensor) -> Tensor:
        if self._heads is None:
            return values
        if isinstance(self._heads, str):
            return values.mean(1, keepdim=True)
        if any(not 0 <= h < values.shape[1] for h in self._heads):
            raise ConfigError(f"heads={tuple(self._heads)!r}: this model has heads 0 to {values.shape[1] - 1}.")
        return values[:, list(self._heads)]

    def _positions(self, length: int) -> slice:
        """The positions to read of a sequence of this length; all forwards must agree on it."""
        if self._length is None:
            self._length = length
        if length != self._length:
            raise EvidenceError(
                f"a forward of {length} positions follows one of {self._length} in the same context: pad all "
                "micro-batches to one length, or read each in a context of its own."
            )
        if self._completion_length is None:
            return slice(0, length)
        if length <= self._completion_length:
            raise EvidenceError(
                f"completion_length={self._completion_length} leaves no prompt in a sequence of {length} positions: "
                "the position before the first response token emits it."
            )
        return slice(length - self._completion_length - 1, length - 1)

    def _take_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self._take_hidden(len(self._map.layers), hidden)

    def _taker(self, index: int) -> Any:
        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take_hidden(index, args[0] if args else kwargs["hidden_states"])

        return take

    def _take_hidden(self, index: int, hidden: Tensor) -> None:
        """Keep the read positions and the one before, for `hidden_change`; copied, so that the rest can be freed."""
        rows = self._positions(hidden.shape[1])
        kept = hidden.new_zeros(hidden.shape[0], rows.stop - rows.start + 1, hidden.shape[2], dtype=torch.float32)
        start = max(rows.start - 1, 0)
        kept[:, start - rows.start + 1 :] = hidden.detach()[:, start : rows.stop]
        self._hidden[index].append(kept)


def _reduce_call(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    options: dict[str, Any],
    sink_end: Tensor | None,
    rows: slice,
) -> AttentionStatistics:
    """Statistics of one attention call, as its implementation understands its arguments."""
    check_implementation(implementation)
    if options.get("position_bias") is not None or options.get("cu_seq_lens_q") is not None:
        raise UnreadableModelError(
            f"{type(module).__name__} uses a position bias or packed sequences, which are not read: pass one sequence "
            "per row, or leave its layer out of `layers`."
        )
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and query.shape[2] > 1
    window = None
    if "flash" in implementation:  # padding is a 2-D mask, the window an argument
        window = options.get("sliding_window")
        mask = None if mask is None else mask.bool()[:, None, None, :].expand(-1, 1, query.shape[2], -1)
    elif mask is not None:  # 4-D, with causality and window inside
        causal = False
        mask = mask[..., : key.shape[2]]
    elif implementation == "eager":
        causal = False  # eager attention hides nothing by itself
    elif causal and key.shape[2] > query.shape[2]:
        key = key[:, :, : query.shape[2]]  # as sdpa does with a preallocated, empty cache
    scale = options.get("scaling")
    return attention_statistics(
        query,
        key,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        causal=causal,
        window=window if causal else None,
        softcap=options.get("softcap"),
        sink_end=sink_end,
        rows=rows,
        s_aux=options.get("s_aux"),
    )
