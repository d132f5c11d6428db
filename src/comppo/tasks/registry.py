"""Find a task by its spec: prompts to train on, held-out prompts and reward functions. No model is loaded here.

| spec | what it is |
|---|---|
| `chain` | the bundled task (`comppo.tasks.chain`) |
| `reasoning_gym:NAME` | a procedural data set of reasoning-gym |
| a file or folder | .jsonl, .json, .csv, .parquet, or what `datasets` saved to disk |
| `OWNER/NAME` | a data set on the hub |
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comppo.errors import TaskError

TASKS = ("chain", "reasoning_gym:NAME", "a data file or folder", "a hub data set OWNER/NAME")
DATA_SUFFIXES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """What training needs to know of a task."""

    name: str
    """The spec that it was loaded by."""
    train_dataset: Any
    """`datasets.Dataset` with `prompt` (string, or list of messages), mostly `answer`, and further columns."""
    eval_dataset: Any | None
    """Held-out prompts, none of which is in `train_dataset`; or None."""
    reward_funcs: list[Callable[..., Any]]
    """In TRL's convention: `f(prompts, completions, **columns)`, one number or None per completion."""
    max_completion_length: int | None
    """Suggested limit of a response, tokens; None if the task has no opinion."""


def load_task(spec: str, *, seed: int = 0, params: Mapping[str, Any] | None = None) -> Task:
    """Load a task.

    Args:
        spec: see the module's table.
        seed: decides generated prompts and random splits; not negative.
        params: the task's parameters; `accepted_parameters` lists them.

    Returns:
        Training prompts, held-out prompts if there are any, and reward functions.

    Raises:
        TaskError: unknown task or parameter, unusable data, a seed out of range.
        ConfigError: a parameter of `chain` is out of range.
        RewardError: a reward function cannot be found.
        MissingExtraError: a reasoning_gym task without the package.
    """
    from comppo.tasks import local, procedural

    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise TaskError(f"task {spec!r}: seed must be a whole number of at least 0, got {seed!r}.")
    given = dict(params or {})
    loader: Callable[..., Task]
    kind = _kind(spec)
    if kind == "chain":
        loader = load_chain
    elif kind == "reasoning_gym":
        loader = procedural.load_reasoning_gym
    else:
        loader = local.load_data
    check_parameters(spec, given)
    return loader(spec, seed=seed, params=given)


def accepted_parameters(spec: str) -> list[str]:
    """Names of the parameters that `load_task(spec)` accepts.

    Args:
        spec: see the module's table.

    Returns:
        Names that `params` may hold; seed is an argument of its own and not among them.

    Raises:
        TaskError: the task is unknown.
        MissingExtraError: a reasoning_gym task without the package.
    """
    from comppo.tasks import local, procedural
    from comppo.tasks.chain import ChainConfig

    kind = _kind(spec)
    if kind == "chain":
        return [field.name for field in dataclasses.fields(ChainConfig) if field.name != "seed"]
    if kind == "reasoning_gym":
        return procedural.accepted(spec)
    return local.accepted(spec)


def check_parameters(spec: str, params: Mapping[str, Any]) -> None:
    """Refuse parameters that the task does not have.

    Args:
        spec: see the module's table.
        params: parameters by name; their values are not looked at.

    Raises:
        TaskError: naming the first unknown parameter and the accepted ones.
    """
    accepted = accepted_parameters(spec)
    for name in params:
        if name not in accepted:
            hint = " seed is an argument of its own." if name == "seed" else nearest(name, accepted)
            raise TaskError(f"task {spec!r} has no parameter {name!r}.{hint} Accepted: {', '.join(accepted)}.")


def nearest(name: str, choices: list[str]) -> str:
    """A sentence with the choice that looks most like `name`, or nothing."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def is_local(spec: str) -> bool:
    """Whether a spec means a path on this machine."""
    path = Path(spec)
    return bool(spec) and (path.suffix.lower() in DATA_SUFFIXES or spec.startswith((".", "/", "~")) or path.exists())


def _kind(spec: str) -> str:
    if spec == "chain":
        return "chain"
    if spec.startswith("reasoning_gym:"):
        return "reasoning_gym"
    if is_local(spec):
        return "local"
    owner, slash, name = spec.partition("/")
    if slash and owner and name and "/" not in name and ":" not in spec:
        return "hub"
    hint = nearest(spec.partition(":")[0], ["chain", "reasoning_gym"])
    raise TaskError(f"task {spec!r} is unknown.{hint} There are: {', '.join(TASKS)}.")


def load_chain(spec: str, *, seed: int, params: Mapping[str, Any]) -> Task:
    """The bundled task; parameters are the fields of `ChainConfig`."""
    from datasets import Dataset

    from comppo.tasks.chain import ChainConfig, chain_prompts, chain_reward

    config = ChainConfig(seed=seed, **params)
    train, held_out = chain_prompts(config)
    train_set, eval_set = (
        Dataset.from_dict({"prompt": list(part), "answer": list(part.values())}) for part in (train, held_out)
    )
    return Task(
        name=spec,
        train_dataset=train_set,
        eval_dataset=eval_set if held_out else None,
        reward_funcs=[chain_reward],
        max_completion_length=config.completion_length,
    )


def as_messages(prompt: str) -> list[dict[str, str]]:
    """A prompt as a conversation of one user message."""
    return [{"role": "user", "content": prompt}]


def whole(spec: str, name: str, value: Any, least: int) -> int:
    """`value` if it is a whole number of at least `least`.

    Args:
        spec: the task's spec, for the message.
        name: the parameter's name, for the message.
        value: what the user gave; a bool is no whole number here.
        least: smallest value allowed.

    Returns:
        `value`.

    Raises:
        TaskError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TaskError(f"task {spec!r}: {name} must be a whole number of at least {least}, got {value!r}.")
    return value
