"""A context manager that reads attention rows and hidden states while a model runs, changing none of its results."""

from collections.abc import Hashable, Sequence
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comppo.computation.listener import Listener, Plan
from comppo.computation.router import ROUTER_STATISTICS
from comppo.computation.summaries import DEFAULT_STATISTIC, AttentionStatistic, chosen_statistics, name_of
from comppo.computation.support import DEFAULT_LAYERS, Layers, choose_layers, choose_routers, map_model
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
        statistics: Sequence[str | AttentionStatistic] = (DEFAULT_STATISTIC,),
        layers: Layers = DEFAULT_LAYERS,
        heads: Heads = None,
        sink_tokens: int = 1,
        positions: slice | None = None,
        hidden_layers: Sequence[int] = (),
        routed_width: int = 0,
    ) -> None:
        """Choose what to read.

        Args:
            model: a causal language model of Transformers, wrapped or not.
            statistics: names from `ATTENTION_STATISTICS` (of which "sink_mass" is always read), names from
                `ROUTER_STATISTICS`, or statistics of your own.
            layers: the "first", "middle" or "last" third of the layers with readable attention, "all" of them, or a
                sequence of `layer_idx` (an empty one reads no attention). Routers are read in those of these layers
                that have one; a third is then one of those.
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
        if isinstance(statistics, str | AttentionStatistic):
            statistics = (statistics,)
        if not isinstance(sink_tokens, int) or sink_tokens < 0:
            raise ConfigError(f"sink_tokens={sink_tokens!r}: pass 0 (no sink) or a positive number of keys.")
        if positions is not None and (not isinstance(positions, slice) or positions.step not in (None, 1)):
            raise ConfigError(f"positions={positions!r}: pass a slice without a step, or None for all positions.")
        numbers = isinstance(heads, Sequence) and len(heads) and all(type(head) is int for head in heads)
        if heads is not None and heads != "mean" and not numbers:
            raise ConfigError(f'heads={heads!r}: pass None, "mean" or a sequence of one or more head numbers.')
        if routed_width < 0:
            raise ConfigError(f"routed_width={routed_width!r}: pass 0 (no summary) or a positive width.")
        router_statistics = tuple(dict.fromkeys(s for s in statistics if s in tuple(ROUTER_STATISTICS)))
        of_attention = [s for s in statistics if s not in router_statistics]
        chosen = chosen_statistics((*of_attention, "sink_mass"))
        model_map = map_model(model)
        reads_attention = bool(of_attention) or not router_statistics or bool(routed_width)
        self.layers: tuple[int, ...] = choose_layers(model_map, layers if reads_attention else ())
        """`layer_idx` of the layers whose attention is read, ascending."""
        routers = choose_routers(model_map, layers) if router_statistics else {}
        self.router_layers: tuple[int, ...] = tuple(routers)
        """Positions of the layers whose routers are read, ascending."""
        depth = len(model_map.layers)
        if isinstance(hidden_layers, int):
            raise ConfigError(f"hidden_layers={hidden_layers!r}: pass a sequence, such as ({hidden_layers},).")
        self.hidden_layers = tuple(i + depth + 1 if i < 0 else i for i in hidden_layers)
        """Indices of the hidden states that are kept, from 0."""
        if any(not 0 <= i <= depth for i in self.hidden_layers):
            raise ConfigError(
                f"hidden_layers={tuple(hidden_layers)!r}: this model has indices -{depth + 1} to {depth}."
            )
        self._listener = Listener(
            Plan(
                model=model_map,
                statistics=chosen,
                layers=self.layers,
                heads=heads if heads is None or isinstance(heads, str) else tuple(heads),
                sink_tokens=sink_tokens,
                positions=positions,
                hidden_layers=self.hidden_layers,
                routed_width=routed_width,
                routers=routers,
                router_statistics=router_statistics,
            )
        )

    def __enter__(self) -> "ComputationReader":
        """Start reading; what an earlier use of this reader read is forgotten."""
        self._listener.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop reading and leave model and registry as they were."""
        self._listener.close()

    # What was read ------------------------------------------------------------------------------------------------

    @property
    def forwards(self) -> int:
        """Forward passes seen since the context was entered."""
        return self._listener.forwards

    def statistic(self, statistic: str | AttentionStatistic) -> Float[Tensor, "rows tokens layers heads"]:
        """A statistic of every row, position, layer and head.

        Those of routers have one head; their layers are `router_layers`.

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
        """How many keys each position may attend to in each layer, sinks included; the mean where heads differ."""
        return torch.stack(self._of_layers("visible_keys", self.layers), -1)

    def routed(self) -> Float[Tensor, "rows tokens layers width"]:
        """What attention reads of earlier positions: their hidden states, projected and weighted by its rows.

        Each layer's input is scaled to unit root mean square, projected to `routed_width` columns by a fixed random
        matrix, and averaged with the layer's attention, sinks left out, and over the chosen heads.
        """
        if not self._listener.plan.routed_width:
            raise ConfigError("routed_width=0 reads no routed summary: pass its width, such as 16.")
        return torch.stack(self._of_layers("routed", self.layers), 2)

    def hidden(self) -> Float[Tensor, "rows tokens width"]:
        """Hidden states of `hidden_layers`, concatenated in that order; float32, detached."""
        return self._hidden_states("hidden")

    def hidden_change(self) -> Float[Tensor, "rows tokens"]:
        """||h_t - h_(t-1)|| / ||h_(t-1)|| of `hidden()`; 0 at the sequence's first position."""
        hidden, before = self._hidden_states("hidden"), self._hidden_states("hidden_before")
        norm = before.norm(dim=-1)
        return torch.where(norm > 0, (hidden - before).norm(dim=-1) / torch.where(norm > 0, norm, 1.0), 0.0)

    def _named(self, statistic: str | AttentionStatistic) -> list[Tensor]:
        """One (rows, tokens, heads) per layer."""
        name, plan = name_of(statistic), self._listener.plan
        if name in plan.router_statistics:
            return [values.unsqueeze(-1) for values in self._of_layers(name, self.router_layers)]
        if name not in plan.statistics:
            read = ", ".join((*plan.statistics, *plan.router_statistics))
            raise ConfigError(f"statistic={name!r} was not read: this reader reads {read}.")
        return self._of_layers(("attention", name), self.layers)  # the user's may be called like what else is read

    def _of_layers(self, name: Hashable, layers: tuple[int, ...]) -> list[Tensor]:
        self._need_forward()
        if not layers:
            raise ConfigError("layers=() reads no attention: pass the layers to read.")
        unseen = [i for i in layers if self._listener.store.parts((name, i)) < self.forwards]
        if unseen and layers is self.layers:
            raise UnreadableModelError(
                f"the attention of layers {unseen} did not go through Transformers' attention registry, or the forward "
                'stopped before them: load the model with attn_implementation="sdpa" and leave these layers out.'
            )
        if unseen:
            raise UnreadableModelError(
                f"the routers of layers {unseen} did not run as modules (a kernel may replace the whole block), or the "
                "forward stopped before them: load the model without such kernels, or leave these layers out."
            )
        return [self._listener.store.whole((name, i)) for i in layers]

    def _hidden_states(self, kind: str) -> Tensor:
        self._need_forward()
        if not self.hidden_layers:
            raise ConfigError("hidden_layers=() reads no hidden states: pass their indices, such as (-1,).")
        store = self._listener.store
        if any(store.parts((kind, i)) < self.forwards for i in self.hidden_layers):
            raise EvidenceError(
                f"hidden states {self.hidden_layers} were not all seen: the forward stopped before them."
            )
        return torch.cat([store.whole((kind, i)) for i in self.hidden_layers], -1)

    def _need_forward(self) -> None:
        if not self.forwards:
            raise EvidenceError("nothing was read: run the model's forward inside the reader's context.")
