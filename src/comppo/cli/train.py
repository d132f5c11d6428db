"""`comppo train`: TRL's argument conventions (dataclass fields, YAML, overrides), any causal model, any task."""

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from comppo.cli.extras import require_training
from comppo.errors import ConfigError, RunExistsError


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
    name = model_args.model_name_or_path
    if not name:
        raise ConfigError("model_name_or_path is missing: give a hub name, a folder, or 'bundled'.")
    folder = Path(args.output_dir)
    last_step = check_output(folder, resume=script.resume)

    from comppo.tasks.base_models import resolve_model

    task = load(script, args.seed)

    from trl import get_peft_config, get_quantization_config

    from comppo.study.record import RunRecorder, versions
    from comppo.study.run import recorded_training
    from comppo.trainers.trl.trainer import CompPOTrainer

    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = CompPOTrainer(
        model=resolve_model(name),
        reward_funcs=task.reward_funcs,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset if args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    recorder = None
    if trainer.accelerator.is_main_process:
        recorder = RunRecorder(folder) if last_step is None else RunRecorder.resume(folder, step=last_step)
    if recorder is not None and last_step is None:
        recorder.write_json(
            "run.json",
            {
                "name": "comppo",
                "title": f"comppo train, {args.operator}",
                "config": {"model": name, "task": script.task or script.dataset_name, **args.to_dict()},
                "versions": versions(),
                "seed": args.seed,
                "command": f"comppo train {' '.join(arguments)}",
            },
        )
    result = recorded_training(
        trainer, task, recorder, folder, eval_every=script.heldout_every, resume=last_step is not None
    )
    if recorder is not None:
        show(result, folder)


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


def parse(arguments: list[str]) -> tuple[Any, Any, Any]:
    """Command line and YAML file as (script arguments, CompPOConfig, ModelConfig)."""
    from trl import ModelConfig, ScriptArguments, TrlParser

    from comppo.trainers.trl.config import CompPOConfig

    @dataclass
    class TrainArguments(ScriptArguments):
        """What to train on."""

        task: str | None = field(
            default=None,
            metadata={"help": "chain, reasoning_gym:NAME, or a hub or local data set with a `prompt` column."},
        )
        task_params: dict[str, Any] | str | None = field(
            default=None, metadata={"help": "Parameters of the task, as a mapping in YAML or as JSON."}
        )
        reward_funcs: list[str] | None = field(
            default=None, metadata={"help": "For data sets: math_verify, exact_match or module:function."}
        )
        heldout_every: int = field(
            default=0, metadata={"help": "Steps between greedy held-out evaluations; 0: before and after only."}
        )
        resume: bool = field(default=False, metadata={"help": "Continue the run in output_dir."})

    parser = TrlParser((TrainArguments, CompPOConfig, ModelConfig), prog="comppo train")
    known = sorted(option.lstrip("-") for action in parser._actions for option in action.option_strings)
    check_config_file(arguments, known)
    given = [argument[2:].split("=")[0] for argument in arguments if argument.startswith("--")]
    check_names([name for name in given if name != "config"], known, "command line")
    script, args, model_args = parser.parse_args_and_config(args=arguments)
    return script, args, model_args


def check_config_file(arguments: list[str], known: list[str]) -> None:
    """Refuse a configuration file that is missing, is not a mapping, or names a field that does not exist."""
    if "--config" not in arguments:
        return
    at = arguments.index("--config") + 1
    if at == len(arguments):
        raise ConfigError("--config needs the path of a YAML file.")
    import yaml

    path = Path(arguments[at])
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold a mapping of fields, got {type(content).__name__}.")
    check_names([str(name) for name in content if name != "env"], known, str(path))


def check_names(names: list[str], known: list[str], where: str) -> None:
    """Refuse fields that do not exist, with the nearest ones that do."""
    for name in names:
        if name.replace("-", "_") not in known and name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "comppo train --help lists all fields."
            raise ConfigError(f"unknown field {name!r} in {where}: {hint}")


def load(script: Any, seed: int) -> Any:
    """The task that the arguments name."""
    from comppo.tasks.registry import load_task

    spec = script.task or script.dataset_name
    if not spec:
        raise ConfigError("task is missing: give chain, reasoning_gym:NAME, or a hub or local data set.")
    params = script.task_params or {}
    if isinstance(params, str):
        try:
            params = json.loads(params)
        except json.JSONDecodeError as error:
            raise ConfigError(f"task_params={params!r} is not JSON: {error}.") from None
    if not isinstance(params, dict):
        raise ConfigError(f"task_params must be a mapping, got {params!r}.")
    if script.reward_funcs:
        params = {**params, "reward": script.reward_funcs}
    return load_task(spec, seed=seed, params=params)


def check_output(folder: Path, *, resume: bool) -> int | None:
    """Make sure that a run may write here, and say where it starts.

    Args:
        folder: the run's `output_dir`; need not exist.
        resume: whether the run goes on from the last checkpoint in it.

    Returns:
        The step of that checkpoint, or None for a new run.

    Raises:
        RunExistsError: the folder holds a run and `resume` is false, or a finished run and `resume` is true.
        ConfigError: there is nothing to resume.
    """
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not resume:
        held = [name for name in ("run.json", "metrics.jsonl", "result.json", "model") if (folder / name).exists()]
        held += [path.name for path in checkpoints[-1:]]
        if held:
            raise RunExistsError(
                f"output_dir={str(folder)!r} already holds a run ({', '.join(held)}): choose another folder, or "
                "continue it with --resume. Nothing was overwritten."
            )
        return None
    if (folder / "result.json").exists():
        raise RunExistsError(f"the run in {str(folder)!r} is finished: choose another output_dir for a new one.")
    if not checkpoints:
        raise ConfigError(
            f"--resume: {str(folder)!r} holds no checkpoint. Start without --resume, with save_strategy and "
            "save_steps set."
        )
    return int(checkpoints[-1].name.rpartition("-")[2])
