"""Candidates for the default reading of attention, their measures, and the rule that chooses one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reading_measures import (
    REPEATED,
    RESIDUALIZE,
    Array,
    Measure,
    correlation,
    identity_share,
    mixed_residuals,
    occurrences,
    position_share,
    residuals,
    response_share,
    shift,
    split_half,
    without_identity,
)
from reading_samples import Readings

TIE = 0.02
REFERENCE = "log_keys_token"
"""Never chosen: it needs the identity of the current token, and leaves nothing of it by construction."""
ADDED = "log_keys_position"
"""Became a candidate after the first figures had been seen, so the rule's own choice is among the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a candidate must keep, and what is then the greatest."""

    least_agreement: float = 0.9
    most_shift: float = 0.5
    most_position: float = 0.05
    position: str = "worst_position"
    """The measure that `most_position` bounds."""
    score: str = "score"
    """The measure whose greatest value wins."""
    added: bool = False
    """Whether `ADDED` may be chosen."""


FIXED = Rule()
TEXT = (
    f"Among the candidates that read the same answer behind a longer prompt with r >= {FIXED.least_agreement} and "
    f"|shift| <= {FIXED.most_shift} standard deviations, and of whose variance position explains at most "
    f"{FIXED.most_position} (in a batch of like prompts, and in one of short and long prompts), take the greatest "
    "score = (1 - share of the current token's identity) x reliability of the rest. "
    f"Scores within {TIE} of the greatest are a tie: fewest layers win, then the greater score. Where there is no "
    "longer prompt, only the position in the one batch and the score count. SmolLM2 decides; the chain model is asked "
    "second, and a disagreement is reported."
)
WITH_ADDED = "log n and place removed together is a candidate too"
OTHERS = {
    "as fixed": FIXED,
    WITH_ADDED: Rule(added=True),
    "position in the batch of like prompts only": Rule(position="position"),
    "position R² up to 0.15": Rule(most_position=0.15),
    "r from 0.85": Rule(least_agreement=0.85),
    "variance between responses counts as little as token identity": Rule(score="score_within"),
    "both: that, and the added candidate": Rule(score="score_within", added=True),
}
"""Other rules, thought of after the figures were seen, to show how much hangs on the fixed one."""
EARLIER = ("collision", True, "middle third", "log_keys")
NOW = ("effective_keys", False, "last third", "position")
"""The default that was taken after this study: the rule's choice, with the trainer's line instead of bins."""
HALF = ("collision", True, "every second of the middle third", "log_keys")
SPLITS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way of reading a number per token; heads are averaged."""

    statistic: str
    sink_excluded: bool
    layers: str
    numbers: tuple[int, ...]
    """`layer_idx` of the layers."""
    residualize: str

    @property
    def key(self) -> tuple[str, bool, str, str]:
        """What a candidate is called by, whatever the model."""
        return self.statistic, self.sink_excluded, self.layers, self.residualize


def layer_sets(depth: int) -> dict[str, tuple[int, ...]]:
    """Choices of layers of a model with `depth` of them, by name; of equal ones, as in small models, only the first."""
    third, quarter, numbers = depth // 3, max(1, round(depth / 4)), tuple(range(depth))
    middle, start = numbers[third : depth - third], (depth - quarter) // 2
    sets = {
        "middle third": middle,
        "every second of the middle third": middle[::2],
        "middle quarter": numbers[start : start + quarter],
        "single middle layer": (depth // 2,),
        "every fourth layer": numbers[min(2, depth // 2) :: 4],
        "all": numbers,
        "first third": numbers[:third],
        "last third": numbers[depth - third :],
    }
    return {name: chosen for name, chosen in sets.items() if name == next(n for n in sets if sets[n] == chosen)}


def measure(readings: Readings, weights: Array, seed: int) -> tuple[list[Candidate], dict[str, Array]]:
    """Measure every candidate.

    Args:
        readings: of one model.
        weights: how often each response counts, (draws, responses).
        seed: of the random halves of the heads.

    Returns:
        Candidates, and measures by name, each (draws, candidates).
    """
    depth, heads = next(iter(readings.values.values())).shape[1:]
    sets = layer_sets(depth)
    columns = [(*key[1:], name) for name in sets for key in readings.values if key[0] == "near"]
    rng = np.random.default_rng(seed)
    orders = {name: [rng.permutation(len(sets[name]) * heads) for _ in range(SPLITS)] for name in sets}
    values = {
        side: np.stack([_heads(readings, side, kind, sets[name]).mean(1) for *kind, name in columns], -1)
        for side in readings.keys
    }
    halves = np.stack([_halves(_heads(readings, "near", kind, sets[n]), orders[n]) for *kind, n in columns], -1)
    earlier = columns.index(EARLIER[:3])
    sinks = [columns.index(("sink_mass", True, name)) for *_, name in columns]
    results: dict[str, list[Array]] = {}
    for how in RESIDUALIZE:
        for name, prepared in _measures(readings, values, halves, earlier, sinks, how).items():
            results.setdefault(name, []).append(np.stack([prepared(row) for row in weights]))
    candidates = [
        Candidate(statistic=statistic, sink_excluded=excluded, layers=name, numbers=sets[name], residualize=how)
        for how in RESIDUALIZE
        for statistic, excluded, name in columns
    ]
    joined = {name: np.concatenate(parts, 1) for name, parts in results.items()}
    joined["worst_position"] = np.maximum(joined["position"], joined.get("position_mixed", joined["position"]))
    joined["score"] = (1 - joined["identity"]) * joined["reliability_rest"]
    joined["score_within"] = (1 - joined["identity"] - joined["between_responses"]) * joined["reliability_rest"]
    return candidates, joined


def _heads(readings: Readings, side: str, kind: list[Any], numbers: tuple[int, ...]) -> Array:
    """A statistic in all heads of the layers, (tokens, layers * heads)."""
    chosen = readings.values[side, kind[0], kind[1]][:, list(numbers)].astype(np.float64)
    return chosen.reshape(len(chosen), -1)


def _halves(heads: Array, orders: list[NDArray[np.int64]]) -> Array:
    """Means over two halves of the heads, (tokens, 2, splits)."""
    cut = heads.shape[1] // 2
    return np.stack([[heads[:, o[:cut]].mean(1), heads[:, o[cut:]].mean(1)] for o in orders]).transpose(2, 1, 0)


def _measures(
    readings: Readings, values: dict[str, Array], halves: Array, earlier: int, sinks: list[int], how: str
) -> dict[str, Measure]:
    """The measures of all columns under one residualisation, ready to be called with weights."""
    response, step, token = readings.response, readings.step, readings.token
    near, log_keys = values["near"], {side: np.log(keys) for side, keys in readings.keys.items()}
    place: dict[str, Any] = {"step": step, "token": token}
    x = residuals(near, how=how, log_keys=log_keys["near"], **place)
    default = residuals(near[:, [earlier]], how=EARLIER[3], log_keys=log_keys["near"], **place)
    halves = residuals(halves, how=how, log_keys=log_keys["near"], **place)
    found = {
        "position": position_share(x, response, step),
        "identity": identity_share(x, response, token),
        "between_responses": response_share(x, response),
        "reliability": split_half(halves, response),
        "reliability_rest": split_half(without_identity(halves, token), response, occurrences(token) >= REPEATED),
        "with_earlier": correlation(x, default, response),
        "with_sink_mass": correlation(x, x[:, sinks], response),
    }
    if "far" not in values:
        return found
    before, behind = mixed_residuals(near, values["far"], response, log_keys["near"], log_keys["far"], how=how, **place)
    return found | {
        "position_mixed": position_share(np.concatenate([before, behind]), np.tile(response, 2), np.tile(step, 2)),
        "agreement": correlation(before, behind, response),
        "shift": shift(before, behind, response),
    }


def is_eligible(measures: dict[str, Array], candidates: list[Candidate], rule: Rule = FIXED) -> NDArray[np.bool_]:
    """Which candidates keep the bounds of the rule; measures are (candidates,)."""
    never = {REFERENCE} if rule.added else {REFERENCE, ADDED}
    fine = np.array([c.residualize not in never for c in candidates])
    fine &= measures[rule.position] <= rule.most_position
    if "agreement" in measures:
        fine &= (measures["agreement"] >= rule.least_agreement) & (np.abs(measures["shift"]) <= rule.most_shift)
    return fine & np.isfinite(measures[rule.score])


def choose(measures: dict[str, Array], candidates: list[Candidate], rule: Rule = FIXED) -> int | None:
    """The candidate that the rule takes, by its number; None where no candidate keeps the bounds."""
    fine = is_eligible(measures, candidates, rule)
    if not fine.any():
        return None
    score = np.where(fine, measures[rule.score], -np.inf)
    tied = [i for i in range(len(candidates)) if score[i] >= score.max() - TIE]
    return min(tied, key=lambda i: (len(candidates[i].numbers), -score[i]))
