"""Tasks of reasoning-gym: `reasoning_gym:NAME`."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comppo.errors import MissingExtraError, TaskError
from comppo.evidence.verifiers import completion_text, tagged_answer
from comppo.tasks.registry import Task, as_messages, nearest, whole

logger = logging.getLogger(__name__)

INSTRUCTION = "\n\nEnd your response with the final answer alone, written as <answer>...</answer>."
OWN_PARAMETERS = {"prompts": 2048, "eval_prompts": 256, "conversational": False, "instruction": INSTRUCTION}
"""Parameters beside the data set's own, with their defaults."""
STREAM = 1_000_000
"""reasoning-gym makes item i of seed s from s + i, so neighbouring seeds share nearly all items: streams stand this far
apart, and hold this many items."""


def _factories() -> Mapping[str, tuple[Any, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError("reasoning_gym tasks need packages: pip install 'comppo[train]'.") from error
    return reasoning_gym.factory.DATASETS


def _config(spec: str) -> Any:
    name, factories = spec.removeprefix("reasoning_gym:"), _factories()
    if name not in factories:
        raise TaskError(
            f"task {spec!r} is unknown: reasoning-gym has no {name!r}.{nearest(name, list(factories))} "
            f"It has: {', '.join(sorted(factories))}."
        )
    return factories[name][1]


def accepted(spec: str) -> list[str]:
    """Names of the parameters of `spec`: ours, then the data set's own."""
    taken = {"seed", "size", *OWN_PARAMETERS}
    return [*OWN_PARAMETERS, *(field.name for field in dataclasses.fields(_config(spec)) if field.name not in taken)]


def extract_answer(text: str) -> str:
    """The content of the last `<answer>...</answer>`, else the last line that is not blank, stripped."""
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def load_reasoning_gym(spec: str, *, seed: int, params: Mapping[str, Any]) -> Task:
    """A data set of reasoning-gym without any question twice in or across its parts, scored by the data set itself."""
    from datasets import Dataset

    own = {**OWN_PARAMETERS, **{key: value for key, value in params.items() if key in OWN_PARAMETERS}}
    settings = {key: value for key, value in params.items() if key not in OWN_PARAMETERS}
    prompts = whole(spec, "prompts", own["prompts"], 1)
    eval_prompts = whole(spec, "eval_prompts", own["eval_prompts"], 0)
    seen: set[str] = set()
    held_out = _distinct(spec, settings, base=2 * STREAM * seed + STREAM, count=eval_prompts, seen=seen)
    train = _distinct(spec, settings, base=2 * STREAM * seed, count=prompts, seen=seen)
    entries = train + held_out

    def rows(start: int, part: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for index, entry in enumerate(part, start):
            prompt = entry["question"] + (own["instruction"] or "")
            answer = entry["answer"]
            yield {
                "prompt": as_messages(prompt) if own["conversational"] else prompt,
                "answer": None if answer is None else str(answer),
                "entry": index,
            }

    scorer = _dataset(spec, settings, seed=0, size=1)

    def reasoning_gym_reward(completions: Sequence[Any], entry: Sequence[int], **_: Any) -> list[float | None]:
        """The data set's own score, in [0, 1]; None where its scoring fails."""
        return [
            _score(spec, scorer, extract_answer(completion_text(completion)), entries[index])
            for completion, index in zip(completions, entry, strict=True)
        ]

    return Task(
        name=spec,
        train_dataset=Dataset.from_list(list(rows(0, train))),
        eval_dataset=Dataset.from_list(list(rows(len(train), held_out))) if held_out else None,
        reward_funcs=[reasoning_gym_reward],
        max_completion_length=None,
    )


def _score(spec: str, scorer: Any, answer: str, entry: dict[str, Any]) -> float | None:
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception as error:  # a strange response broke the scoring: that says nothing about its worth
        logger.warning("%s: scoring %r failed: %s: %s", spec, answer[:80], type(error).__name__, error)
        return None


def _dataset(spec: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(spec.removeprefix("reasoning_gym:"), seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError, KeyError, OSError) as error:
        raise TaskError(
            f"task {spec!r}: reasoning-gym refused {dict(settings)!r}: {type(error).__name__}: {error}."
        ) from error


def _distinct(spec: str, settings: Mapping[str, Any], *, base: int, count: int, seen: set[str]) -> list[dict[str, Any]]:
    """`count` entries with questions not in `seen`, to which they are added."""
    if count == 0:
        return []
    tries = min(20 * count + 200, STREAM)
    dataset = _dataset(spec, settings, seed=base, size=tries)
    found: list[dict[str, Any]] = []
    for index in range(min(tries, len(dataset))):
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found.append(entry)
            if len(found) == count:
                return found
    raise TaskError(
        f"task {spec!r}: only {len(found)} more different questions in {tries} draws, but {count} were asked for: "
        "choose fewer prompts and eval_prompts, or parameters with more variety."
    )
