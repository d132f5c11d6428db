"""Tasks from data: a local file or folder, or a data set on the hub. Scripts of data sets are never run."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comppo.errors import TaskError
from comppo.evidence.verifiers import REWARDS, load_reward
from comppo.tasks.registry import DATA_SUFFIXES, Task, as_messages, is_local, whole

logger = logging.getLogger(__name__)

PARAMETERS: dict[str, Any] = {
    "reward": None,
    "split": "train",
    "eval_split": None,
    "prompts": None,
    "eval_prompts": 0,
    "prompt_column": "prompt",
    "answer_column": "answer",
    "conversational": False,
}
"""Parameters with their defaults; hub data sets also have `config`."""


def accepted(spec: str) -> list[str]:
    """Names of the parameters of `spec`."""
    return [*PARAMETERS, *([] if is_local(spec) else ["config"])]


def load_data(spec: str, *, seed: int, params: Mapping[str, Any]) -> Task:
    """A data set with a `prompt` column, scored by the named reward functions.

    Parameters: `reward` (a name or a list of names for `load_reward`, required), `split` and `eval_split` (a data set's
    own), `prompts` and `eval_prompts` (how many to take, and to hold out where there is no `eval_split`),
    `prompt_column` and `answer_column` (renamed to `prompt` and `answer`), `conversational` (make strings into user
    messages), `config` (of a hub data set). Training rows whose prompt is also held out are dropped.
    """
    own = {**PARAMETERS, **params}
    names = [own["reward"]] if isinstance(own["reward"], str) else own["reward"]
    if not names:
        raise TaskError(
            f"task {spec!r} needs the parameter reward (on the command line: --reward_funcs): {', '.join(REWARDS)}, "
            "'module:function', or a list of these."
        )
    rewards = [load_reward(name) for name in names]
    limit = own["prompts"] if own["prompts"] is None else whole(spec, "prompts", own["prompts"], 1)
    held = whole(spec, "eval_prompts", own["eval_prompts"], 0)
    train = _with_columns(spec, _read(spec, own["split"], own.get("config")), own, names)
    held_out = None
    if own["eval_split"] is not None:
        held_out = _with_columns(spec, _read(spec, own["eval_split"], own.get("config")), own, names)
        held_out = held_out.select(range(min(held or len(held_out), len(held_out))))
    elif held:
        if held >= len(train):
            raise TaskError(f"task {spec!r}: eval_prompts={held} leaves none of its {len(train)} rows to train on.")
        train = train.shuffle(seed=seed)
        train, held_out = train.select(range(held, len(train))), train.select(range(held))
    if held_out is not None:
        train = _without(spec, train, held_out)
    if limit is not None:
        train = train.select(range(min(limit, len(train))))
    return Task(name=spec, train_dataset=train, eval_dataset=held_out, reward_funcs=rewards, max_completion_length=None)


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def _without(spec: str, train: Any, held_out: Any) -> Any:
    """`train` without rows whose prompt is held out."""
    known = {_key(prompt) for prompt in held_out["prompt"]}
    keep = [index for index, prompt in enumerate(train["prompt"]) if _key(prompt) not in known]
    if not keep:
        raise TaskError(f"task {spec!r}: every training prompt is also held out: choose another eval_split.")
    if len(keep) < len(train):
        logger.warning("%s: dropped %d training rows whose prompt is held out", spec, len(train) - len(keep))
    return train.select(keep)


def _with_columns(spec: str, dataset: Any, own: Mapping[str, Any], rewards: list[str]) -> Any:
    """`dataset` with `prompt` (and `answer`) columns, prompts in the wanted form."""
    for wanted in ("prompt", "answer"):
        column = own[f"{wanted}_column"]
        needed = wanted == "prompt" or column != "answer" or any(name in REWARDS for name in rewards)
        if column in dataset.column_names:
            if column != wanted:
                dataset = dataset.remove_columns([wanted] if wanted in dataset.column_names else [])
                dataset = dataset.rename_column(column, wanted)
        elif needed:
            raise TaskError(
                f"task {spec!r} has no column {column!r}; its columns are: {', '.join(dataset.column_names)}. "
                f"Name yours with the task's parameter {wanted}_column (in task_params)."
            )
    if len(dataset) == 0:
        raise TaskError(f"task {spec!r} has no rows.")
    for index, prompt in enumerate(dataset["prompt"]):
        if not prompt or not isinstance(prompt, (str, list)):
            raise TaskError(
                f"task {spec!r}: the prompt of row {index} is {prompt!r}: make it a text or a list of messages."
            )
    if own["conversational"] and isinstance(dataset[0]["prompt"], str):
        columns = {name: dataset[name][:] for name in dataset.column_names}
        columns["prompt"] = [as_messages(prompt) for prompt in columns["prompt"]]
        dataset = type(dataset).from_dict(columns)
    return dataset


def _read(spec: str, split: str, config: str | None) -> Any:
    """One split as a `datasets.Dataset`."""
    from datasets import load_dataset

    path = Path(spec).expanduser()
    try:
        if not is_local(spec):
            return load_dataset(spec, config, split=split)
        if not path.exists():
            raise TaskError(f"task {spec!r}: there is no such file or folder.")
        if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            return _saved(spec, path, split)
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in DATA_SUFFIXES) if path.is_dir() else [path]
        builders = {DATA_SUFFIXES.get(file.suffix.lower()) for file in files}
        builder = builders.pop() if len(builders) == 1 else None
        if builder is None:
            raise TaskError(
                f"task {spec!r}: expected a file, or a folder with files of one kind, of {', '.join(DATA_SUFFIXES)}, "
                "or what Dataset.save_to_disk wrote."
            )
        return load_dataset(builder, data_files=[str(file) for file in files], split=split)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {spec!r}, split {split!r}, cannot be read: {type(error).__name__}: {error}") from error


def _saved(spec: str, path: Path, split: str) -> Any:
    """One split of what `datasets` saved to disk."""
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        if split != "train":
            raise TaskError(f"task {spec!r} holds one data set without splits, but split {split!r} was asked for.")
        return saved
    if split not in saved:
        raise TaskError(f"task {spec!r} has no split {split!r}; it has: {', '.join(saved)}.")
    return saved[split]
