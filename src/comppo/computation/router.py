"""Routers of mixture-of-experts layers, read while the model runs: their distribution over experts at each position.

The distribution is the router's own opinion of every expert, before it is cut to the chosen ones: before top-k
renormalisation, scaling, group limits and correction biases (which only shift the choice). It is

- softmax(logits) where the model scores with a softmax, over all experts or over the chosen ones;
- score / sum of scores where it scores each expert by itself, with a sigmoid (DeepSeek V3, GLM 4, MiniMax M2, Llama 4)
  or sqrt(softplus) (DeepSeek V4). Such scores are no distribution, but they weigh the chosen experts in proportion:
  most of these models divide the chosen scores by their sum, and this is the same division over all experts. So the
  odds of two experts are those with which the model mixes them.

Experts without parameters that a router may choose (LongCat's identity, ZAYA's skip) count as experts; those that
always run (shared experts) do not. How a router hands its scores over is a fact of its class, written down here from
the sources of Transformers 5.24; a class that is not in the table is refused, never guessed at.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from comppo.computation.hooks import Hook
from comppo.errors import ConfigError, UnreadableModelError

# Statistics -------------------------------------------------------------------------------------------------------


def router_entropy(probabilities: Float[Tensor, "*positions experts"], k: int) -> Float[Tensor, "*positions"]:
    """Entropy of the distribution over experts.

    Args:
        probabilities: non-negative, summing to 1 over experts.
        k: experts that the model uses per position; of no effect here, taken so that all statistics are called alike.

    Returns:
        Nats, in [0, log experts]; float32, detached.
    """
    information: Tensor = torch.special.entr(probabilities.detach().float())  # -p log p, 0 where p is 0
    return information.sum(-1)


def router_top_k_mass(probabilities: Float[Tensor, "*positions experts"], k: int) -> Float[Tensor, "*positions"]:
    """Probability of the k most probable experts together.

    Where a correction bias or a group limit moves the model's choice, the chosen experts are others and hold less.

    Args:
        probabilities: non-negative, summing to 1 over experts.
        k: experts that the model uses per position, 1 to experts.

    Returns:
        In [k / experts, 1]; float32, detached.

    Raises:
        ConfigError: k is out of range.
    """
    experts = probabilities.shape[-1]
    if not 1 <= k <= experts:
        raise ConfigError(f"k={k!r}: pass how many of the {experts} experts the model uses per position.")
    return probabilities.detach().float().topk(k, dim=-1, sorted=False).values.sum(-1)


ROUTER_STATISTICS: Mapping[str, Callable[[Tensor, int], Tensor]] = MappingProxyType(
    {"router_entropy": router_entropy, "router_top_k_mass": router_top_k_mass}
)
"""Statistics of a router's distribution by name; each is called with the probabilities and `Router.top_k`."""

# From scores to a distribution ------------------------------------------------------------------------------------


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    # sigmoid(x) / sum of sigmoid(x), in the log domain: finite also where every sigmoid underflows.
    return F.logsigmoid(logits).softmax(-1)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    scores = F.softplus(logits.clamp(min=-80.0)).sqrt()  # below, float32 may hold 0 for every expert
    return scores / scores.sum(-1, keepdim=True)


def _probability(probabilities: Tensor) -> Tensor:
    return probabilities


_SCORINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
    "probability": _probability,  # the router hands probabilities over, no logits
}

# Facts of the classes, from their sources -------------------------------------------------------------------------


def _own_top_k(router: Any, config: Any) -> int:
    return int(router.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """What a router class gives back."""

    scoring: str | Callable[[Any, Any], str]
    """A name in `_SCORINGS`, or what finds it in the router and the decoder's configuration."""
    outputs: int = 3
    """How many things its forward returns. Other versions of Transformers return other things under the same name."""
    index: int = 0
    """Which of them holds a score of every expert."""
    top_k: Callable[[Any, Any], int] = _own_top_k
    """Experts per position, from the router and the decoder's configuration."""


_SOFTMAX = """AriaTextTopKRouter DeepseekOcr2TextTopkRouter DeepseekV2TopkRouter Ernie4_5_MoeTopKRouter
    FlexOlmoTopKRouter GptOssTopKRouter GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter GraniteMoeSharedTopKRouter
    GraniteMoeTopKRouter HunYuanMoEV1Gate JambaTopKRouter LaraMiniTopKRouter LongcatFlashTopkRouter MellumTopKRouter
    MiniMaxTopKRouter Mistral4TopkRouter MistralLarge4TextTopkRouter MixtralTopKRouter OlmoeTopKRouter
    PhimoeTopKRouter Qwen2MoeTopKRouter Qwen3MoeTopKRouter Qwen3NextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter
    Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter Qwen4ExpTextTopKRouter UnlimitedOcrTextTopkRouter"""

_SIGMOID = """AXK1TopkRouter AXK2TopkRouter AfmoeTokenChoiceRouter BailingHybridTopkRouter BeamTopKRouter
    DeepseekV32TopkRouter DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter ExaoneMoeTopkRouter
    FlintTopKRouter Glm4MoeLiteTopkRouter Glm4MoeTopkRouter Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter
    GlmMoeDsaTopkRouter HYV3TopKRouter HYV4TopkRouter HYV4VLTopkRouter KimiLinearTopkRouter Kolibri1TopKRouter
    LagunaTopKRouter Lfm2MoeTopKRouter MiMoV2FlashTopkRouter MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter
    MuseSparkTopkRouter NemotronHTopkRouter SolarOpenTopkRouter Step3p7TopKRouter"""

_KNOWN: Mapping[str, _Form] = {
    **dict.fromkeys(_SOFTMAX.split(), _Form(scoring="softmax")),
    **dict.fromkeys(_SIGMOID.split(), _Form(scoring="sigmoid")),
    "Cohere2MoeTopKRouter": _Form(scoring=lambda router, config: str(router.expert_selection_fn)),
    "DbrxRouter": _Form(scoring="softmax", outputs=1, top_k=lambda router, config: int(config.ffn_config.moe_top_k)),
    "DeepseekV4TopKRouter": _Form(scoring=lambda router, config: str(config.scoring_func)),
    # The block, not its two routers: one sees text, the other images, and the block puts their logits in order.
    "Ernie4_5_VLMoeMoeBlock": _Form(
        scoring="softmax", outputs=2, index=1, top_k=lambda block, config: int(block.text_moe.top_k)
    ),
    "Gemma4TextRouter": _Form(scoring="probability", top_k=lambda router, config: int(router.config.top_k_experts)),
    "Inkling2TopKRouter": _Form(scoring=lambda router, config: str(config.scoring_func)),
    "InklingTopkRouter": _Form(scoring="sigmoid", outputs=4),
    "JetMoeTopKGating": _Form(scoring="softmax", outputs=5, index=4),
    "Llama4Router": _Form(scoring="sigmoid", outputs=2, index=1),
    "ZayaRouter": _Form(scoring="softmax", outputs=4),
}

_REFUSED: Mapping[str, str] = {
    "DeepseekV4HashRouter": "chooses experts by token id, whatever its scores",
    "DogeCDMoE": "scores product keys, not experts, and mixes the scores of different positions",
    "Inkling2LoopTopKRouter": "runs several times in one forward",
    "Mxfp4GptOssMLP": "routes inside its kernel: load the model with Mxfp4Config(dequantize=True)",
}

_OTHER_EXPERTS = ("JetMoeMoA",)
"""Mixtures inside attention: a layer's router is the one of its feed-forward experts."""

# Finding and reading them -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    """The router of one decoder layer."""

    module: nn.Module
    """The module whose output holds the scores."""
    name: str
    """Its class, inside wrappers."""
    scoring: str
    """"softmax", "sigmoid" or "sqrtsoftplus" of logits, or "probability" where the output is one already."""
    top_k: int
    """How many experts the model uses per position."""
    outputs: int
    """How many things the module returns."""
    index: int
    """Which of them are the scores."""

    def probabilities(self, output: Any) -> Float[Tensor, "positions experts"]:
        """The distribution over experts that an output of `module` tells.

        Args:
            output: what the module's forward returned; scores (positions, experts), or with more leading axes, in any
                floating-point dtype.

        Returns:
            Float32, detached; each position sums to 1.

        Raises:
            UnreadableModelError: the output has another form than this class of router has in Transformers 5.24.
        """
        parts = output if isinstance(output, tuple) else (output,)
        scores = parts[self.index] if len(parts) == self.outputs else None
        if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.shape[-1] >= self.top_k):
            raise UnreadableModelError(
                f"{self.name} returned {[_form(part) for part in parts]}, not {self.outputs} outputs with the scores "
                f"of {self.top_k} or more experts at index {self.index}: its routers are read with Transformers 5.24 "
                "or a later 5.x that kept this form."
            )
        return _SCORINGS[self.scoring](scores.detach().reshape(-1, scores.shape[-1]).float())


def find_routers(decoder: nn.Module, layers: nn.ModuleList) -> dict[int, Router]:
    """The routers that can be read, by position of their layer in `layers`.

    Args:
        decoder: the Transformers model that owns the layers; its `config` tells what some routers do not.
        layers: the decoder layers.

    Returns:
        One entry for each layer with a readable router; `why_no_router` tells the reasons for the others.
    """
    found = {i: _examine(layer, decoder) for i, layer in enumerate(layers)}
    return {i: router for i, router in found.items() if isinstance(router, Router)}


def why_no_router(decoder: nn.Module, layers: nn.ModuleList) -> dict[int, str]:
    """For each layer that `find_routers` leaves out, why.

    Args:
        decoder: as in `find_routers`.
        layers: the decoder layers.

    Returns:
        Reasons by position of the layer in `layers`, such as "Qwen3MoeDecoderLayer has no experts".
    """
    found = {i: _examine(layer, decoder) for i, layer in enumerate(layers)}
    return {i: reason for i, reason in found.items() if isinstance(reason, str)}


class RouterHook:
    """A context in which routers tell their distributions while the model runs; its results stay the same to the bit.

    Example:
        routers = find_routers(decoder, decoder.layers)
        with RouterHook(routers, lambda layer, probabilities: print(layer, probabilities.shape)):
            model(input_ids)  # 0 torch.Size([rows * positions, experts]), 1 ...
    """

    def __init__(self, routers: Mapping[int, Router], take: Callable[[int, Tensor], None]) -> None:
        """Choose what to read.

        Args:
            routers: the routers to read, as from `find_routers`.
            take: called with layer and probabilities (rows * positions, experts), float32, detached, in the order of
                rows and then positions, each time the layer's router runs, without gradient. Not called for the second
                run of a checkpointed layer, within the backward pass. Never called where the router does not run as a
                module, which the caller has to check: a kernel that replaces the whole feed-forward block, or code
                that torch.compile compiled outside this context.
        """
        self._take = take
        self._handles: list[Any] = []
        self._hooks = [(router.module, self._hook(layer, router)) for layer, router in routers.items()]

    def __enter__(self) -> "RouterHook":
        """Attach to the routers."""
        if self._handles:
            raise ConfigError("this RouterHook is in use already: leave its context first, or make a second one.")
        self._handles.extend(module.register_forward_hook(hook) for module, hook in self._hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, layer: int, router: Router) -> Callable[..., Any]:
        def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._handles:
                return  # compiled inside the context, called after it
            if torch._C._current_graph_task_id() != -1:
                return  # inside a backward pass: a checkpointed layer runs again
            with torch.no_grad():
                self._take(layer, router.probabilities(output))

        return Hook(read)


def _examine(layer: nn.Module, decoder: nn.Module) -> Router | str:
    """The layer's router, or why it has none that can be read."""
    found, reasons = [], []
    for module, name in _candidates(layer):
        if name in _REFUSED:
            reasons.append(f"{name} {_REFUSED[name]}")
        else:
            found.append((module, name))
    if reasons:
        return "; ".join(sorted(set(reasons)))
    if len(found) > 1:
        return f"{len(found)} routers in one layer ({', '.join(name for _, name in found)})"
    if found:
        return _router(*found[0], decoder.config)
    unknown = {
        type(m).__name__ for m in layer.modules() if re.search("router|expert|moegate", type(m).__name__.lower())
    }
    if unknown or any("experts" in name.split(".") for name, _ in layer.named_modules()):
        names = ", ".join(sorted(unknown)) or type(layer).__name__
        return f"how its experts are chosen is not known ({names})"
    return f"{type(layer).__name__} has no experts"


def _router(module: nn.Module, name: str, config: Any) -> Router | str:
    form = _KNOWN[name]
    inner = getattr(module, "original_module", module)
    scoring = form.scoring if isinstance(form.scoring, str) else form.scoring(inner, config)
    if scoring not in _SCORINGS:
        return f"{name} scores its experts by {scoring!r}, which is none of {', '.join(_SCORINGS)}"
    top_k = form.top_k(inner, config)
    return Router(module=module, name=name, scoring=scoring, top_k=top_k, outputs=form.outputs, index=form.index)


def _candidates(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules of the table in a layer, outermost first and not what is inside them, with their class."""
    # PEFT keeps a trained copy of a module beside the original in a wrapper that calls one of them.
    wrapped = hasattr(module, "original_module") and hasattr(module, "modules_to_save")
    inner: Any = module.original_module if wrapped else module
    name = _class_with_forward(type(inner))
    if name in _KNOWN or name in _REFUSED:
        yield module, name
    elif name not in _OTHER_EXPERTS:
        for child in inner.children():
            yield from _candidates(child)


def _class_with_forward(cls: type) -> str:
    """The class of Transformers whose forward runs; "" where it is another package's."""
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    return owner.__name__ if owner.__module__.startswith("transformers.") else ""


def _form(part: Any) -> Any:
    return (tuple(part.shape), part.dtype) if isinstance(part, Tensor) else type(part).__name__
