"""What `comppo check-model` found, as a page of text and as an object for programs."""

import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from comppo.cli.model_files import Source, printable

if TYPE_CHECKING:
    from comppo.computation.checkup import Agreement, Verdict
    from comppo.computation.cost import Cost
    from comppo.computation.structure import Layer, Structure
    from comppo.computation.trial import Trial

LABELS = {"entropy": "entropy (nats)", "visible_keys": "visible keys", "sink_mass": "sink mass"}
BACKENDS = {"torch": "PyTorch, streaming over blocks", "triton": "Triton kernel", "flex": "FlexAttention"}


@dataclass(kw_only=True)
class Result:
    """What was found, filled in as the check goes on."""

    source: Source
    model_type: str
    structure: "Structure | None" = None
    trial: "Trial | None" = None
    agreement: "Agreement | str | None" = None
    """A text where there was no comparison."""
    costs: "tuple[Cost, ...]" = ()
    verdict: "Verdict" = field(init=False)
    weights: Literal["not loaded", "loaded", "random"] = "not loaded"
    attention: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    short_rows: tuple[int, ...] = ()
    """Rows and tokens of the short input."""
    rounds: int = 0
    notes: tuple[str, ...] = ()


# For programs -----------------------------------------------------------------------------------------------------


def as_json(result: Result) -> dict[str, Any]:
    """The result in types of JSON; numbers that are not finite become null.

    Args:
        result: of a check that ended.

    Returns:
        For `json.dumps`.
    """
    structure, agreement = result.structure, result.agreement
    return _finite(
        {
            "model": {
                "name": result.source.name,
                "path": result.source.path,
                "revision": result.source.revision,
                "gguf_file": result.source.gguf_file,
                "model_type": result.model_type,
                "class": structure.model_class if structure else None,
                "parameters": structure.parameters if structure else None,
                "weights": result.weights,
                "attention": result.attention,
                "dtype": result.dtype,
                "device": result.device,
                "threads": result.threads,
            },
            "readable": result.verdict.readable,
            "verdict": result.verdict.sentence,
            "proceed": list(result.verdict.proceed),
            "notes": list(result.notes),
            "depth": structure.depth if structure else None,
            "default_layers": list(structure.default_layers) if structure else [],
            "default_routers": list(structure.default_routers) if structure else [],
            "layers": [asdict(layer) | {"readable": layer.readable} for layer in structure.layers] if structure else [],
            "trial": result.trial
            and {
                "rows_and_tokens": list(result.short_rows),
                "outputs_identical": result.trial.outputs_identical,
                "finite": result.trial.finite,
                "causal": result.trial.causal,
            },
            "parity": None if agreement is None or isinstance(agreement, str) else _agreement(agreement),
            "why_no_parity": agreement if isinstance(agreement, str) else None,
            "cost": [asdict(cost) for cost in result.costs],
            "cost_rounds": result.rounds,
            "versions": {name: version(name) for name in ("comppo", "torch", "transformers")},
        }
    )


def _agreement(agreement: "Agreement") -> dict[str, Any]:
    names = ("worst", "bound", "matrices", "grade", "compared", "forward_difference", "outputs_identical")
    return {"errors": dict(agreement.errors)} | {name: getattr(agreement, name) for name in names}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# For people -------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """The result in words and tables.

    Args:
        result: of a check that ended.

    Returns:
        Lines without control characters.
    """
    lines = (*_model(result), *_layers(result), *_parity(result), *_cost(result), *_verdict(result))
    return "\n".join(map(printable, lines))


def _model(result: Result) -> Iterator[str]:
    source, structure = result.source, result.structure
    gguf = source.gguf_file if source.gguf_file and not source.name.endswith(source.gguf_file) else None
    yield f"Model      {source.name}" + (f", {gguf}" if gguf else "")
    facts = [result.model_type]
    if structure:
        facts = [structure.model_class, f"{structure.parameters:,} weights", f"{structure.depth} layers"]
    if result.dtype:
        facts += [f"{result.attention} attention", f"{result.dtype} on {result.device}"]
    if result.device == "cpu":
        facts.append(f"{result.threads} thread{'s' if result.threads != 1 else ''}")
    yield "           " + ", ".join(facts)
    if result.weights == "random":
        yield "           The folder holds no weights, so these are random: their attention is nearly even in each row."
    elif result.weights == "not loaded":
        yield "           No weights were loaded."
    yield from (f"           {note}" for note in result.notes)


def _layers(result: Result) -> Iterator[str]:
    structure = result.structure
    if structure is None:
        return
    from comppo.computation.support import DEFAULT_LAYERS

    yield ""
    title = "Layers     "
    for same in _grouped(structure.layers, _how):
        yield f"{title}{_ranges(layer.layer for layer in same):<7} {_how(same[0])}"
        title = " " * len(title)
    routers = [layer for layer in structure.layers if layer.router or not layer.why_no_router.endswith("no experts")]
    title = "Routers    "
    for same in _grouped(routers, _router):
        yield f"{title}{_ranges({layer.position for layer in same}):<7} {_router(same[0])}"
        title = " " * len(title)
    if structure.default_layers and set(structure.default_layers) <= set(structure.readable):
        routers_too = f"; routers of {_ranges(structure.default_routers)}" if structure.default_routers else ""
        which = _ranges(structure.default_layers)
        yield f"Default    {which:<7} {DEFAULT_LAYERS} third of the readable layers{routers_too}"
    backends = {layer.backend for layer in structure.layers if layer.backend}
    if backends:
        yield f"Sums       {', '.join(BACKENDS[name] for name in sorted(backends))}"


def _grouped(layers: "Iterable[Layer]", key: Any) -> "Iterator[list[Layer]]":
    """Layers about which the same is said, in the order of the first."""
    said: dict[str, list[Layer]] = {}
    for layer in layers:
        said.setdefault(key(layer), []).append(layer)
    yield from said.values()


def _how(layer: "Layer") -> str:
    if not layer.readable:
        return f"not readable: {layer.why_not}"
    ran = f", {layer.implementation}" if layer.implementation else ""
    through = f"through Transformers' registry{ran}" if layer.through == "registry" else f"its own {layer.through} call"
    heads = f"; {layer.heads} heads" if layer.heads else ""
    if layer.key_value_heads:
        heads += f" on {layer.key_value_heads} key heads, width {layer.head_width}"
    return f"readable: {layer.attention}, {through}{heads}"


def _router(layer: "Layer") -> str:
    return f"readable: {layer.router}" if layer.router else f"not readable: {layer.why_no_router}"


def _parity(result: Result) -> Iterator[str]:
    agreement = result.agreement
    if agreement is None:
        return
    yield ""
    if isinstance(agreement, str):
        yield f"Parity     not checked: {agreement}"
        return
    rows, tokens = result.short_rows
    yield f"Parity     with eager attention, {rows} rows of {tokens} tokens, one padded on the left: greatest errors"
    yield f"           {'':<22}{'first key left out':<20}whole row"
    for name, error in agreement.errors.items():
        if not name.startswith("whole_"):
            whole = agreement.errors.get(f"whole_{name}")
            yield f"           {LABELS.get(name, name):<22}{error:<20.1e}{'' if whole is None else f'{whole:.1e}'}"
    words = {
        "exact": "ok",
        "close": "close; attention so sharp that float32 loses digits",
        "unlike": "ok, under eager attention, which computes something else in this model",
        "differs": "NOT OK",
    }
    yield f"           worst {agreement.worst:.1e}, expected at most {agreement.bound:.0e}: {words[agreement.grade]}"
    yield f"           outputs with and without reading: {_identical(agreement.outputs_identical)}"
    if agreement.forward_difference:
        yield (
            "           (The logits of the loaded and of eager attention differ by "
            f"{agreement.forward_difference:.1e} of their standard deviation.)"
        )


def _identical(identical: bool | None) -> str:
    if identical is None:
        return "differ, but so do two forwards without reading"
    return "identical to the bit" if identical else "NOT IDENTICAL"


def _cost(result: Result) -> Iterator[str]:
    if not result.costs:
        return
    clock = "CPU time" if result.device == "cpu" else "GPU time"
    yield ""
    yield f"Cost       of one row, {clock}, median of {result.rounds} rounds (least-greatest); peak memory of tensors"
    yield f"           {'tokens':<8}{'what is read':<22}{'seconds':<10}{'ratio':<19}{'memory':<12}ratio"
    for cost in result.costs:
        plain = cost.mode == "plain"
        what = "nothing" if plain else f"{cost.layers} layer{'s' if cost.layers != 1 else ''}"
        what += " (default)" if cost.mode == "default" else ""
        ratio = "" if plain else f"{cost.ratio:.2f} ({cost.least_ratio:.2f}-{cost.greatest_ratio:.2f})"
        memory = "" if plain or math.isnan(cost.peak_ratio) else f"{cost.peak_ratio:.2f}"
        amount = f"{cost.peak_bytes / 1e6:.1f} MB"
        yield f"           {cost.tokens:<8}{what:<22}{cost.seconds:<10.3g}{ratio:<19}{amount:<12}{memory}".rstrip()


def _verdict(result: Result) -> Iterator[str]:
    yield ""
    yield from _wrapped(f"{'Readable' if result.verdict.readable else 'NOT READABLE'}: {result.verdict.sentence}")
    for sentence in result.verdict.proceed:
        yield from _wrapped(f"- {sentence}", "  ")
    if result.verdict.readable and result.source.weights and result.source.gguf_file is None:
        beside = "" if result.source.tokenizer else ", once a tokenizer is saved beside the model"
        yield f"- comppo train --model_name_or_path {shlex.quote(result.source.name)}{beside}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _ranges(numbers: Iterable[int]) -> str:
    from comppo.computation.checkup import ranges

    return ranges(numbers)
