"""What a check of a model concludes: how well reading agrees with eager attention, and whether the model can be used.

`structure.py` tells what can be read, `trial.py` reads it once, `parity.py` compares; here is the verdict.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor, nn

from comppo.computation.parity import ParityReport, check_parity
from comppo.computation.structure import Structure
from comppo.computation.summaries import DEFAULT_STATISTIC, TOKEN_STATISTICS
from comppo.computation.support import DEFAULT_LAYERS
from comppo.computation.trial import Trial
from comppo.errors import EvidenceError, UnreadableModelError

EXACT, ROUNDED, CLOSE = 2e-6, 2e-2, 1e-4
"""Bounds on the errors of reading: against matrices in float32 (or float64); against matrices in half precision, whose
own rounding that is; and where attention is very sharp, as a float32 score s is rounded by s * 2^-24, and 1e-4 is what
scores above a thousand lose."""

Grade = Literal["exact", "close", "unlike", "differs"]

APART = 1e-3
"""Logits of eager and of the loaded attention that are further apart, in standard deviations, are no rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What was read, against the attention matrices of the same model under eager attention."""

    errors: Mapping[str, float]
    """Greatest absolute error of each statistic: nats for "entropy", keys for "visible_keys", else unitless. Names that
    begin with "whole_" are of rows with no sink left out."""
    worst: float
    """The greatest of them; NaN where one is."""
    bound: float
    """What they should stay within."""
    matrices: str
    """Dtype in which eager attention computed the matrices."""
    grade: Grade
    """"exact" within the bound; "close" where sharp attention explains what is beyond it; "unlike" where the model
    itself computes something else under eager attention than as it was loaded, so that the errors are those of reading
    it under eager attention; else "differs"."""
    compared: float
    """Share of (row, real token, layer, head) that was compared."""
    forward_difference: float
    """Between the logits of the loaded attention and of eager, in standard deviations: not an error of reading."""
    outputs_identical: bool | None
    """As in `Trial`, under both."""


def compare_with_eager(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Agreement | str:
    """Run `check_parity` and judge what it found; each layer is fed what it is fed under eager attention.

    Args:
        model: a causal language model of Transformers, in eval mode, all of whose readable layers can be read.
        input_ids: (rows, tokens).
        attention_mask: (rows, tokens), 1 at real tokens.

    Returns:
        The agreement, or why there is no comparison.
    """
    try:
        return judge(check_parity(model, input_ids, attention_mask))
    except (UnreadableModelError, EvidenceError) as error:
        return str(error)


def judge(report: ParityReport) -> Agreement:
    """What a parity report says of reading the implementation that the model was loaded with."""
    comparison = report.fed or report.precise or report.eager
    unlike = _unlike(report)
    if unlike:
        comparison = report.eager
    rounded = report.precise is None and report.dtype in ("float16", "bfloat16")
    bound = ROUNDED if rounded else EXACT
    # Very sharp attention underflows to 0 in all heads alike, so that matrices count too few keys
    uncounted = [e for name, e in comparison.errors.items() if not name.endswith(("visible_keys", "concentration"))]
    certain = uncounted if comparison.counted < 1.0 else comparison.errors.values()
    grade: Grade = "differs"
    if _within(comparison.errors.values(), bound):
        grade = "unlike" if unlike else "exact"
    elif _within(certain, max(bound, CLOSE)):
        grade = "close"
    return Agreement(
        errors=MappingProxyType(dict(comparison.errors)),
        worst=comparison.worst,
        bound=bound,
        matrices=report.dtype if rounded or report.dtype == "float64" else "float32",
        grade=grade,
        compared=comparison.compared,
        forward_difference=report.forward_difference,
        outputs_identical=report.outputs_identical,
    )


def _unlike(report: ParityReport) -> bool:
    """Whether eager attention is another computation: Falcon with ALiBi adds its bias twice there.

    Only where a model makes its own rows: what the registry's implementations compute is known.
    """
    if report.fed is None or not report.own_rows or report.forward_difference <= APART:
        return False
    return not _within(report.fed.errors.values(), ROUNDED)


def _within(errors: Iterable[float], bound: float) -> bool:
    return all(error <= bound for error in errors)  # false for NaN


# Concluding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a model can be read with the default settings, in words."""

    readable: bool
    sentence: str
    proceed: tuple[str, ...]
    """What to do next, one sentence each."""


LISTED = "docs/architectures.md in comppo's repository lists the architectures whose attention is read."
WITHOUT_ATTENTION: tuple[str, ...] = (
    f"Statistics that need no attention ({', '.join(TOKEN_STATISTICS)}) work with any causal language model: `comppo "
    f"train --gate_statistic {TOKEN_STATISTICS[0]} --critic_features hidden surprisal entropy position group_mean` "
    "(all but routing), or read_computation with that statistic and layers=().",
    LISTED,
)


def conclude(structure: Structure, trial: Trial | None, agreement: Agreement | str | None) -> Verdict:
    """What follows from what was found.

    Args:
        structure: from `examine`.
        trial: from `try_reading`; None where no weights were loaded.
        agreement: from `compare_with_eager`; None where nothing was compared.

    Returns:
        The verdict.
    """
    named = structure.readable
    if trial is not None:
        structure = trial.structure
    problem = _problem(structure, trial, agreement)
    if problem is not None:
        return problem
    readable = structure.readable
    every = all(layer.readable for layer in structure.layers)
    which = f"all {structure.depth} layers" if every else f"{_layers(readable)} of {structure.depth}"
    sentence = f"attention of {which}, by default of {_layers(structure.default_layers)}"
    everything = 'layers="all"' if readable == named else f"layers=({_listed(readable)},)"
    proceed = [
        f"ComputationReader(model) reads {DEFAULT_STATISTIC} in {_layers(structure.default_layers)} "
        f'(layers="{DEFAULT_LAYERS}"); {everything} reads {_layers(readable)}.'
    ]
    if structure.default_routers:
        proceed.append('statistics=("router_entropy",) reads its routers.')
    if trial is None:
        return Verdict(readable=True, sentence=f"{sentence}; judged by its classes alone.", proceed=tuple(proceed))
    if isinstance(agreement, Agreement):
        if agreement.grade == "unlike":
            sentence += (
                ". The model itself computes something else under eager attention than as it was loaded, so that these "
                "cannot be compared; what is read under eager attention agrees with it"
            )
        else:
            sentence += f". It agrees{' closely' if agreement.grade == 'close' else ''} with eager attention"
    identical = "stay the same to the bit" if trial.outputs_identical else "do not repeat themselves, read or not"
    return Verdict(readable=True, sentence=f"{sentence}. The model's outputs {identical}.", proceed=tuple(proceed))


def _problem(structure: Structure, trial: Trial | None, agreement: Agreement | str | None) -> Verdict | None:
    """The first thing that stands in the way of the default settings."""
    readable = structure.readable
    refused = [layer for layer in structure.default_layers if layer not in readable]
    if not readable:
        routers = structure.default_routers and ('statistics=("router_entropy",) reads its routers all the same.',)
        sentence = f"No layer's attention can be read: {'; '.join(structure.reasons) or 'it has no layers'}."
        return Verdict(readable=False, sentence=sentence, proceed=(*routers, *WITHOUT_ATTENTION))
    if refused:
        return Verdict(
            readable=False,
            sentence=f"The default reads {_layers(structure.default_layers)}; {ranges(refused)} cannot be read.",
            proceed=(
                f"Name layers that can: `--gate_layers {_listed(readable)}` with comppo train, or "
                f"ComputationReader(model, layers=({_listed(readable)},)).",
            ),
        )
    if trial is None:
        return None
    if not trial.finite:
        return Verdict(
            readable=False,
            sentence="The model itself computes logits that are no numbers, so that nothing can be compared.",
            proceed=(
                "Load it in another dtype (--dtype bfloat16 or float32), or look for weights that are no numbers.",
            ),
        )
    differs = isinstance(agreement, Agreement) and agreement.grade == "differs"
    identical = agreement.outputs_identical if isinstance(agreement, Agreement) else trial.outputs_identical
    if differs or identical is False or trial.outputs_identical is False:
        what = "What is read differs from eager attention" if differs else "Reading changes the model's outputs"
        return Verdict(
            readable=False,
            sentence=f"{what}: this model cannot be relied on to be read rightly.",
            proceed=(
                'Try --attn-implementation "sdpa" or "eager", and --dtype float32.',
                "Please report it with the output of --json.",
            ),
        )
    if not trial.causal:
        return Verdict(
            readable=False,
            sentence="Attention looks at later tokens, so this is no causal language model; what is read is right, but "
            "credit assumes that a token depends on earlier ones alone.",
            proceed=("Use a model that generates text from left to right.",),
        )
    return None


def refusal(error: UnreadableModelError) -> Verdict:
    """The verdict on a model that `examine` refuses."""
    return Verdict(readable=False, sentence=str(error), proceed=(LISTED,))


def untold() -> Verdict:
    """The verdict where a configuration does not tell and no weights were loaded."""
    return Verdict(
        readable=False,
        sentence="The configuration alone does not tell what can be read: the model needs code of its own, or weights, "
        "to be made.",
        proceed=("Run the check without --config-only (and with --trust-remote-code, once you have read that code).",),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order as "0-3, 5"; "none" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _layers(numbers: tuple[int, ...]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
