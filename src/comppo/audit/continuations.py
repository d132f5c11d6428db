"""What the states of given responses are worth: the mean reward of responses sampled on from each prefix.

Source: VinePPO (arXiv:2410.01679), which trains on such values. Here they are the truth that credit is held against.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comppo.audit.records import ContinuationRecords
from comppo.audit.sampling import rows_that_fit, sample_continuations
from comppo.errors import ConfigError, EvidenceError
from comppo.evaluation.greedy import evaluating

Score = Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[float | None]]
"""(which of the given responses each one continues, ids of whole responses) -> rewards; None: unscorable."""
BLOCK = 4
"""Batches' worth of prefixes (or one response, if that has more) after which the responses so far are complete."""
Progress = Callable[[int, int], None]
"""(prefixes done, prefixes in all)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuationConfig:
    """How many continuations there are, and from where."""

    continuations: int = 32
    """Continuations per prefix; even, at least 4: two independent halves are compared."""
    every: int = 1
    """A state is valued before each response token whose number is divisible by this; at least 1."""
    max_new_tokens: int = 256
    """Greatest length of a whole response, tokens."""
    temperature: float = 1.0
    """Of sampling; that of the responses."""
    seed: int = 0
    """Of the continuations; not negative."""
    batch_rows: int | None = None
    """Continuations at a time; None: as many as have a GiB of keys and values, at most 2048."""
    budget_minutes: float | None = None
    """No batch begins after this time; the one that runs is finished. None: no limit."""

    def __post_init__(self) -> None:
        if self.continuations < 4 or self.continuations % 2:
            raise ConfigError(f"continuations must be an even number of at least 4, got {self.continuations!r}.")
        for name, least in (("every", 1), ("max_new_tokens", 1), ("seed", 0), ("batch_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value!r}.")
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature must be above 0, got {self.temperature!r}.")
        if self.budget_minutes is not None and not self.budget_minutes > 0.0:
            raise ConfigError(f"budget_minutes must be above 0, got {self.budget_minutes!r}. None is no limit.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixRewards:
    """Rewards of the continuations of each valued state."""

    positions: Int[Tensor, "rows states"]
    """Response tokens before the state; -1 where a response has fewer states."""
    rewards: Float[Tensor, "rows states continuations"]
    """Reward units, float64; NaN where unscorable, not sampled yet, or no state."""
    done: int
    """Different prefixes that were sampled, earlier runs included."""
    left: int
    """Different prefixes that are still to be sampled."""
    sampled_tokens: int
    """Tokens sampled for all that is done."""
    seconds: float
    """Time of this run."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which prefixes are sampled, and in which batches."""

    states: list[list[int]]
    """Per response and state, the number of its prefix."""
    prefixes: list[tuple[int, int]]
    """(response, position) where each different prefix occurs first."""
    batches: list[list[int]]
    """Numbers of prefixes; a batch has a seed of its own, so that a run which goes on samples the same."""


def value_prefixes(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    score: Score,
    config: ContinuationConfig,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    label: str = "",
    records: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PrefixRewards:
    """Sample continuations of every valued prefix of every response, and score them.

    A prefix that several responses to one prompt share is sampled once. Responses are finished a few batches' worth at
    a time, so that a run which stops early leaves whole responses behind it.

    Args:
        model: a causal language model of Transformers; its mode and torch's random state are left as they were.
        prompts: token ids, one per response.
        responses: token ids, end of text included, none empty, none longer than `config.max_new_tokens`.
        score: rewards of whole responses; see `Score`.
        config: how many, from where, and for how long.
        eos_ids: ids that end a response.
        pad_id: id for padding.
        label: names model and task in the records' first line, so that others are refused.
        records: JSON-lines file, written as continuations come; what is in it already is not sampled again.
        progress: called after each batch.
        clock: seconds, for the budget.

    Returns:
        Rewards by response, state and continuation.

    Raises:
        ConfigError: the records are of something else, or `score` gave another number of rewards.
        EvidenceError: prompts and responses do not fit.
    """
    _check(prompts, responses, config)
    started = clock()
    plan = _make_plan(model, prompts, responses, config)
    store = ContinuationRecords(records, _settings(prompts, responses, config, plan, label))
    total = len(plan.prefixes)
    with evaluating(model):
        for number, batch in enumerate(plan.batches):
            if progress is not None:
                progress(len(store.rewards), total)
            if all(prefix in store.rewards for prefix in batch):
                continue
            if config.budget_minutes is not None and clock() - started >= 60.0 * config.budget_minutes:
                break
            store.add(_run_batch(model, number, batch, plan, prompts, responses, score, config, eos_ids, pad_id))
    if progress is not None:
        progress(len(store.rewards), total)
    positions, rewards = _collect(plan, store, config)
    return PrefixRewards(
        positions=positions,
        rewards=rewards,
        done=len(store.rewards),
        left=total - len(store.rewards),
        sampled_tokens=store.sampled_tokens,
        seconds=clock() - started,
    )


def _check(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], config: ContinuationConfig) -> None:
    if len(prompts) != len(responses) or not responses:
        raise EvidenceError(
            f"there are {len(prompts)} prompts and {len(responses)} responses: pass one prompt per response, at least "
            "one."
        )
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not 0 < len(response) <= config.max_new_tokens:
            raise EvidenceError(
                f"response {index} has {len(prompt)} prompt and {len(response)} response tokens: neither may be empty, "
                f"and a response has at most max_new_tokens={config.max_new_tokens}."
            )


def _make_plan(
    model: Any, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], config: ContinuationConfig
) -> _Plan:
    numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    prefixes: list[tuple[int, int]] = []
    states = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = []
        for position in range(0, len(response), config.every):
            key = (tuple(prompt), tuple(response[:position]))
            if key not in numbers:
                numbers[key] = len(prefixes)
                prefixes.append((index, position))
            own.append(numbers[key])
        states.append(own)
    rows = config.batch_rows or rows_that_fit(model, max(map(len, prompts)) + config.max_new_tokens)
    size = max(1, rows // config.continuations)
    batches: list[list[int]] = []
    block: list[int] = []
    for number, (index, _) in enumerate(prefixes):
        if len(block) >= BLOCK * size and index != prefixes[block[-1]][0]:
            batches += _batches(block, prefixes, prompts, size)
            block = []
        block.append(number)
    batches += _batches(block, prefixes, prompts, size)
    return _Plan(states, prefixes, batches)


def _batches(
    block: list[int], prefixes: list[tuple[int, int]], prompts: Sequence[Sequence[int]], size: int
) -> list[list[int]]:
    """Like lengths side by side: little padding, and continuations of like length."""
    ordered = sorted(block, key=lambda n: (len(prompts[prefixes[n][0]]) + prefixes[n][1], n))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def _settings(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    config: ContinuationConfig,
    plan: _Plan,
    label: str,
) -> dict[str, Any]:
    content = json.dumps([[list(p) for p in prompts], [list(r) for r in responses]]).encode()
    return {
        "label": label,
        "responses": hashlib.sha256(content).hexdigest(),
        "continuations": config.continuations,
        "every": config.every,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "prefixes": len(plan.prefixes),
        "batches": hashlib.sha256(json.dumps(plan.batches).encode()).hexdigest(),
    }


def _run_batch(
    model: Any,
    number: int,
    batch: list[int],
    plan: _Plan,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    score: Score,
    config: ContinuationConfig,
    eos_ids: Sequence[int],
    pad_id: int,
) -> list[dict[str, Any]]:
    count = config.continuations
    places = [plan.prefixes[n] for n in batch]
    sampled = sample_continuations(
        model,
        [[*prompts[index], *responses[index][:position]] for index, position in places],
        count=count,
        limits=[config.max_new_tokens - position for _, position in places],
        eos_ids=eos_ids,
        pad_id=pad_id,
        temperature=config.temperature,
        generator=torch.Generator(model.device).manual_seed(config.seed * 1_000_003 + number),
    )
    owners = [index for index, _ in places for _ in range(count)]
    starts = [responses[index][:position] for index, position in places for _ in range(count)]
    rewards = list(score(owners, [[*start, *new] for start, new in zip(starts, sampled, strict=True)]))
    if len(rewards) != len(owners):
        raise ConfigError(f"score gave {len(rewards)} rewards for {len(owners)} responses: return one for each.")
    return [
        {
            "prefix": n,
            "response": index,
            "position": position,
            "rewards": rewards[at * count : (at + 1) * count],
            "tokens": sum(map(len, sampled[at * count : (at + 1) * count])),
        }
        for at, (n, (index, position)) in enumerate(zip(batch, places, strict=True))
    ]


def _collect(plan: _Plan, store: ContinuationRecords, config: ContinuationConfig) -> tuple[Tensor, Tensor]:
    most = max(map(len, plan.states))
    positions = torch.full((len(plan.states), most), -1)
    rewards = torch.full((len(plan.states), most, config.continuations), torch.nan, dtype=torch.float64)
    for row, numbers in enumerate(plan.states):
        positions[row, : len(numbers)] = torch.arange(len(numbers)) * config.every
        for at, number in enumerate(numbers):
            if number in store.rewards:
                rewards[row, at] = torch.tensor(store.rewards[number], dtype=torch.float64)
    return positions, rewards
