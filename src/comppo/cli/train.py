"""`comppo train`: TRL's argument conventions (dataclass fields, YAML, overrides), any causal model, any task."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from comppo.cli.arguments import parse
from comppo.cli.extras import check_writable, require_training
from comppo.errors import ComppoError, ConfigError, RunExistsError

WRITTEN = (
    "run.json",
    "metrics.jsonl",
    "result.json",
    "credit.json",
    "gates.json",
    "model",
    "README.md",
    "completions",
    "inspect",
)
"""What a run writes into its folder, beside checkpoints: by `RunRecorder`, `recorded_training` and TRL."""
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@click.command(
    "train",
    # TRL's parser owns every option, --help among them
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Train a causal language model with CompPO."""
    require_training()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    train(list(arguments))


def train(arguments: list[str]) -> None:
    """Parse, check everything that can be checked cheaply, then train.

    Args:
        arguments: as on the command line, without the program's name.

    Raises:
        ComppoError: a field, the task, a reward function, the model or the output folder is wrong.
    """
    script, args, model_args = parse(arguments)
    check_fields(script, args)
    name = model_args.model_name_or_path
    if not name:
        raise ConfigError("model_name_or_path is missing: give a hub name, a folder, or 'bundled'.")
    folder = Path(args.output_dir)
    last_step = check_output(folder, resume=script.resume)
    spec, params = task_of(script)
    from comppo.tasks.registry import load_task

    task = load_task(spec, seed=args.seed, params=params)
    trainer = make_trainer(task, args, model_args)
    if script.inspect_every:
        trainer.add_callback(inspect_callback(trainer, task, folder, every=script.inspect_every))

    from comppo.study.record import RunRecorder, masked_command, versions
    from comppo.study.run import recorded_training

    # No process may find the records of this very run in its own check of the folder
    trainer.accelerator.wait_for_everyone()
    recorder = None
    if trainer.accelerator.is_main_process:
        recorder = RunRecorder(folder) if last_step is None else RunRecorder.resume(folder, step=last_step)
    if recorder is not None and last_step is None:
        recorder.write_json(
            "run.json",
            {
                "name": "comppo",
                "title": f"comppo train, {args.operator}",
                "config": {
                    "model": name,
                    "task": spec,
                    "task_params": params,
                    "model_config": asdict(model_args),
                    **args.to_dict(),
                },
                "versions": versions(),
                "seed": args.seed,
                "command": masked_command(["comppo", "train", *arguments]),
            },
        )
    result = recorded_training(
        trainer, task, recorder, folder, eval_every=script.heldout_every, resume=last_step is not None
    )
    if recorder is not None:
        show(result, folder)


def inspect_callback(trainer: Any, task: Any, folder: Path, *, every: int) -> Any:
    """What writes inspect pages into `folder` while `trainer` trains on `task`; errors as `InspectCallback`'s."""
    from comppo.cli.inspect import taken
    from comppo.inspect.training import PROMPTS, InspectCallback

    return InspectCallback(
        trainer, taken(task, PROMPTS), reward_funcs=task.reward_funcs, folder=folder / "inspect", every=every
    )


def make_trainer(task: Any, args: Any, model_args: Any) -> Any:
    """The trainer, with its model loaded.

    Args:
        task: what it trains on.
        args: a `CompPOConfig`; its `model_init_kwargs` are completed from `model_args`.
        model_args: TRL's `ModelConfig`.

    Returns:
        A `CompPOTrainer`.

    Raises:
        ConfigError: the model cannot be found or read, or TRL refuses the settings.
        ComppoError: as `CompPOTrainer` raises it.
    """
    from trl import get_peft_config, get_quantization_config

    from comppo.tasks.base_models import resolve_model
    from comppo.trainers.trl.trainer import CompPOTrainer

    model = resolve_model(model_args.model_name_or_path)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    check_model(model, args)
    try:
        return CompPOTrainer(
            model=model,
            reward_funcs=task.reward_funcs,
            args=args,
            train_dataset=task.train_dataset,
            eval_dataset=task.eval_dataset if args.eval_strategy != "no" else None,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except ComppoError:
        raise
    # Files of the model that are missing, packages that are not installed, settings that TRL refuses: not training yet
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(
            f"the trainer for model_name_or_path={model_args.model_name_or_path!r} cannot be made with these settings: "
            f"{error}"
        ) from error


def check_model(model: str, args: Any) -> None:
    """Read the model's configuration before anything is loaded.

    Args:
        model: hub name or folder.
        args: a `CompPOConfig` with `model_init_kwargs`.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    options = {k: v for k, v in args.model_init_kwargs.items() if k in ("revision", "token", "cache_dir", "subfolder")}
    try:
        AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model_name_or_path={model!r} cannot be read: {error}\nGive a hub name (with model_revision and, for "
            "private models, a login), a folder with config.json, or 'bundled'."
        ) from error


def show(result: dict[str, Any], folder: Path) -> None:
    """Say how it ended, in words."""
    before, after = result["accuracy_before"], result["accuracy_after"]
    if after is not None:
        start = f"{before:.3f} -> " if before is not None else ""
        click.echo(f"Held-out greedy accuracy {start}{after:.3f} on {result['eval_count']} prompts.")
    click.echo(
        f"{result['responses']} responses, {result['tokens']} tokens, {result['time_s']:.0f} s, "
        f"{result['peak_memory_mb']:.0f} MB. Model: {folder / result['model']}"
    )


def check_fields(script: Any, args: Any) -> None:
    """Refuse fields of TRL's that would have no effect here, and numbers out of range."""
    if script.heldout_every < 0:
        raise ConfigError(f"heldout_every={script.heldout_every!r} must be at least 0: 0 is before and after only.")
    if script.inspect_every < 0:
        raise ConfigError(f"inspect_every={script.inspect_every!r} must be at least 0: 0 is no page.")
    refused = {
        "dataset_streaming": (script.dataset_streaming, "data sets are read as a whole: leave it out"),
        "ignore_bias_buffers": (script.ignore_bias_buffers, "it has no effect here: leave it out"),
        "resume_from_checkpoint": (args.resume_from_checkpoint, "use --resume, which takes the last checkpoint"),
    }
    for name, (value, remedy) in refused.items():
        if value:
            raise ConfigError(f"{name}={value!r} is not supported: {remedy}.")


def task_of(script: Any) -> tuple[str, dict[str, Any]]:
    """The task that the arguments name, and its parameters.

    Args:
        script: the script arguments, as `parse` gives them.

    Returns:
        Spec and parameters for `load_task`, with TRL's `dataset_*` fields and `reward_funcs` among the latter.

    Raises:
        ConfigError: no task, contradicting fields, parameters that are no mapping, or a field that cannot apply.
        TaskError: the task is unknown.
    """
    from comppo.tasks.registry import accepted_parameters

    spec = script.task or script.dataset_name
    if not spec:
        raise ConfigError("task is missing: give chain, reasoning_gym:NAME, or a hub or local data set.")
    if script.dataset_name not in (None, spec):
        raise ConfigError(f"task={script.task!r} and dataset_name={script.dataset_name!r} differ: give one of them.")
    params = script.task_params or {}
    if isinstance(params, str):
        import yaml

        try:
            params = yaml.safe_load(params)  # JSON is YAML
        except yaml.YAMLError as error:
            raise ConfigError(f"task_params={params!r} is neither YAML nor JSON: {error}.") from None
    if not isinstance(params, dict):
        raise ConfigError(f"task_params must be a mapping, got {params!r}.")
    accepted = accepted_parameters(spec)
    params = dict(params)
    fields = {
        "dataset_config": "config",
        "dataset_train_split": "split",
        "dataset_test_split": "eval_split",
        "reward_funcs": "reward",
    }
    for name, parameter in fields.items():
        value = getattr(script, name)
        if value is None:
            continue
        if "prompt_column" not in accepted or parameter not in accepted:  # the former marks data sets
            what = "hub data sets" if parameter == "config" else "data sets"
            raise ConfigError(f"{name}={value!r} cannot apply to task {spec!r}: it is for {what}. Leave it out.")
        if name != "reward_funcs" and params.get(parameter, value) != value:
            raise ConfigError(
                f"{name}={value!r} contradicts {parameter}={params[parameter]!r} in task_params: give one of them."
            )
        params[parameter] = value
    rewards = params.get("reward", [])
    if "prompt_column" in accepted and not isinstance(rewards, str | list):
        raise ConfigError(f"task_params: reward={rewards!r} must be a name or a list of names of reward functions.")
    return spec, params


def check_output(folder: Path, *, resume: bool) -> int | None:
    """Make sure that a run may write here, and say where it starts.

    Args:
        folder: the run's `output_dir`; need not exist.
        resume: whether the run goes on from the last checkpoint in it.

    Returns:
        The step of that checkpoint, or None for a new run.

    Raises:
        RunExistsError: the folder holds a run, or any file that a run would replace, and `resume` is false; or a
            finished run and `resume` is true.
        ConfigError: the folder is a file or cannot be written to, or there is nothing to resume.
    """
    check_writable(folder, "output_dir")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    steps = sorted(int(match[1]) for match in map(CHECKPOINT.fullmatch, names) if match)
    if not resume:
        held = [name for name in WRITTEN if name in names] + [f"checkpoint-{step}" for step in steps[-1:]]
        if held:
            further = "or continue it with --resume" if steps else "or delete it (it has no checkpoint to resume from)"
            raise RunExistsError(
                f"output_dir={str(folder)!r} already holds a run, or files that a run would replace "
                f"({', '.join(held)}): choose another folder, {further}. Nothing was overwritten."
            )
        return None
    if "result.json" in names:
        raise RunExistsError(f"the run in {str(folder)!r} is finished: choose another output_dir for a new one.")
    if "run.json" not in names:
        raise ConfigError(
            f"--resume: {str(folder)!r} holds no run.json, so no run of comppo train. Start without --resume."
        )
    if not steps:
        raise ConfigError(
            f"--resume: the run in {str(folder)!r} ended before its first checkpoint, so there is nothing to continue: "
            "start again in another output_dir, or delete this folder first. save_steps says how often to save."
        )
    return steps[-1]
