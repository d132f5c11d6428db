"""What can be checked before a model is loaded or a token generated."""

from typing import Any

import torch

from comppo.computation import require_readable
from comppo.errors import ConfigError, RewardError, TaskError, UnreadableModelError
from comppo.evidence.verifiers import checked_reward, probe_rewards
from comppo.trainers.trl.config import CompPOConfig

CONFIG_ARGUMENTS = ("revision", "code_revision", "token", "cache_dir", "subfolder", "local_files_only", "proxies")
"""Of `model_init_kwargs`, what finding a configuration needs."""


def check_arguments(args: Any, reward_funcs: Any, train_dataset: Any, eval_dataset: Any, environment: Any) -> None:
    """Refuse arguments of the trainer that cannot work.

    Args:
        args: must be a `CompPOConfig`.
        reward_funcs: one, or a list or tuple of them, or None with an environment.
        train_dataset: must have a `prompt` column, unless an environment makes the prompts.
        eval_dataset: likewise; one, or a dictionary of them, or None.
        environment: TRL's `environment_factory`.

    Raises:
        ConfigError: `args` is not a `CompPOConfig`, or `reward_weights` does not fit.
        RewardError: nothing gives a reward.
        TaskError: a data set is missing, or has no `prompt` column.
    """
    if not isinstance(args, CompPOConfig):
        raise ConfigError(f"args is a {type(args).__name__}: pass a CompPOConfig (every field of GRPOConfig is in it).")
    functions = as_list(reward_funcs)
    if not functions and environment is None:
        raise RewardError("reward_funcs is empty, so nothing gives a reward: pass at least one reward function.")
    if args.reward_weights is not None and environment is None and len(args.reward_weights) != len(functions):
        raise ConfigError(
            f"reward_weights has {len(args.reward_weights)} numbers for {len(functions)} reward functions: "
            "pass one each."
        )
    if environment is not None:
        return
    if train_dataset is None:
        raise TaskError("train_dataset is missing: pass a data set with a 'prompt' column.")
    if isinstance(train_dataset, dict):
        raise TaskError(
            f"train_dataset is a {type(train_dataset).__name__} with the splits {list(train_dataset)}: "
            "pass one of them, e.g. train_dataset=dataset['train']."
        )
    require_prompts("train_dataset", train_dataset)
    if isinstance(eval_dataset, dict):
        for name, part in eval_dataset.items():
            require_prompts(f"eval_dataset[{name!r}]", part)
    elif eval_dataset is not None:
        require_prompts("eval_dataset", eval_dataset)


def require_prompts(name: str, dataset: Any) -> None:
    """Raise TaskError where a data set is known to have no `prompt` column; a stream may not know its columns."""
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise TaskError(
            f"{name} has the columns {list(columns)}, but no 'prompt': rename the column that holds the prompts, "
            "e.g. dataset.rename_column('question', 'prompt')."
        )


def check_model(model: Any, args: CompPOConfig) -> None:
    """Refuse a model whose computation cannot be read, from its configuration alone where it is given by name.

    Args:
        model: name, folder, or model.
        args: says what must be read.

    Raises:
        ConfigError: a layer index is out of range.
        UnreadableModelError: names the layers and why.
    """
    needs = []
    if args.reads_attention():
        remedy = (
            "operator='prefix_tree', or gate_statistic='output_entropy' and critic_features without 'routing', need no"
        )
        needs.append((False, f"{remedy} attention"))
    if args.reads_routers():
        remedy = "gate_statistic='collision' needs attention but no experts, gate_statistic='output_entropy' neither"
        needs.append((True, remedy))
    requested = (args.model_init_kwargs or {}).get("attn_implementation") if isinstance(model, str) else None
    read = configuration(model, args) if needs and isinstance(model, str) else model
    for routers, remedy in needs:
        try:
            require_readable(read, layers=args.gate_layers_read(), attn_implementation=requested, routers=routers)
        except UnreadableModelError as error:
            raise UnreadableModelError(
                f"{error} (Asked for by gate_layers={args.gate_layers!r}, gate_statistic={args.gate_statistic!r} and "
                f"critic_features={args.critic_features!r}; {remedy}.)"
            ) from None


def configuration(name: str, args: CompPOConfig) -> Any:
    """The configuration of a model that is given by name or folder."""
    from transformers import AutoConfig

    known = {k: v for k, v in (args.model_init_kwargs or {}).items() if k in CONFIG_ARGUMENTS}
    return AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code, **known)


def as_list(reward_funcs: Any) -> list[Any]:
    """Reward functions as a list, as TRL wants them."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def is_plain(function: Any) -> bool:
    """Whether a reward source is a function, rather than a model or the name of one."""
    return callable(function) and not isinstance(function, torch.nn.Module)


def checked_rewards(reward_funcs: Any, args: CompPOConfig, dataset: Any) -> list[Any] | None:
    """Reward functions that name themselves when they misbehave, tried once before anything expensive.

    Args:
        reward_funcs: as given to the trainer.
        args: `probe_rewards` switches the trial off.
        dataset: its first rows are what the trial is made on; streams are not touched.

    Returns:
        The functions, wrapped; models and names of models as they are. None where none were given.

    Raises:
        RewardError: a function returned the wrong number of rewards, or something that is not a number.
    """
    from datasets import Dataset

    if reward_funcs is None:
        return None
    functions = as_list(reward_funcs)
    if args.probe_rewards and isinstance(dataset, Dataset) and len(dataset) > 0:
        probe_rewards([f for f in functions if is_plain(f)], [dataset[0], dataset[min(1, len(dataset) - 1)]])
    return [checked_reward(f) if is_plain(f) else f for f in functions]
