"""The settings of a run, and the critic in one of its checkpoints. Needs TRL."""

import dataclasses
import re
import tempfile
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comppo.computation import Computation
from comppo.errors import ConfigError, MissingExtraError
from comppo.inspect.sampling import Batch, Critic, Plan
from comppo.report.data import load_runs

_SHARED = ("scale_rewards", "max_completion_length", "seed", "temperature", "reward_weights", "chat_template_kwargs")
"""Fields of TRL's that say how responses are sampled, rewarded and credited."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunSettings:
    """What a run folder says about how to look at its models."""

    args: Any
    """A `CompPOConfig` with the run's settings of credit."""
    task: str
    task_params: Mapping[str, Any]
    title: str


def run_settings(folder: Path) -> RunSettings:
    """Read `run.json`.

    Args:
        folder: a run folder.

    Returns:
        Its settings.

    Raises:
        RecordError: the folder does not hold a valid run.
        ConfigError: its settings are not those of this version.
    """
    run = load_runs([folder])[0]
    config = run.config
    deeper = config.get("settings")
    given = deeper if isinstance(deeper, dict) else config
    task = config.get("task")
    if not isinstance(task, str):
        raise ConfigError(f"{str(folder)!r}: run.json names no task: give prompts with --prompt-file and a model.")
    params = config.get("task_params")
    return RunSettings(
        args=credit_settings(given),
        task=task,
        task_params=params if isinstance(params, dict) else {},
        title=run.title,
    )


def credit_settings(given: Mapping[str, Any] | None = None) -> Any:
    """A `CompPOConfig` with only those of the given settings that decide about credit; on the CPU, saving nothing.

    Args:
        given: settings by name, as run.json has them; None for the defaults.

    Returns:
        The configuration.

    Raises:
        ConfigError: a value is refused.
        MissingExtraError: TRL is not installed.
    """
    try:
        from trl import GRPOConfig
    except ImportError as error:
        raise MissingExtraError(f"settings of a trainer need TRL ({error}): pip install 'comppo[train]'.") from error

    from comppo.trainers.trl.config import CompPOConfig

    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    hints = typing.get_type_hints(CompPOConfig)
    kept: dict[str, Any] = {}
    for field in dataclasses.fields(CompPOConfig):
        if field.name in (given or {}) and (field.name not in theirs or field.name in _SHARED):
            value = (given or {})[field.name]
            # Infinite horizons are text in a record; which fields are numbers their types tell
            numeric = float in (hints[field.name], *typing.get_args(hints[field.name]))
            kept[field.name] = float(value) if numeric and value in ("inf", "-inf") else value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Transformers' own, about TRL's defaults
        return CompPOConfig(
            output_dir=tempfile.gettempdir(), use_cpu=True, bf16=False, save_strategy="no", report_to="none", **kept
        )


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is.

    Args:
        run: a run folder.
        step: training step.

    Returns:
        The checkpoint's folder.

    Raises:
        ConfigError: there is none; the message names those that there are.
    """
    for parent in (run, run / "checkpoints"):
        if (parent / f"checkpoint-{step}").is_dir():
            return parent / f"checkpoint-{step}"
    found = [path.name for parent in (run, run / "checkpoints") for path in parent.glob("checkpoint-*")]
    steps = sorted(int(match[1]) for match in map(re.compile(r"checkpoint-(\d+)").fullmatch, found) if match)
    there = f"there are {', '.join(map(str, steps))}" if steps else "the run saved none (save_steps says how often)"
    raise ConfigError(
        f"--step {step}: {str(run)!r} has no checkpoint of that step; {there}. Without --step the page shows the "
        "responses that the run saved."
    )


def plan_of(args: Any, **overrides: Any) -> Plan:
    """How to look at a model as a trainer with these settings would.

    Args:
        args: a `CompPOConfig`.
        **overrides: fields of `Plan`.

    Returns:
        The plan.
    """
    reading = args.reading()
    if not args.pipeline_config().has_critic or not args.reads_attention():
        # The run's own operator may need nothing of attention, but this page shows gated ones too
        reading = {**reading, "statistic": args.gate_statistic_read(), "layers": args.gate_layers_read()}
    settings = {
        "pipeline": args.pipeline_config(),
        "reading": reading,
        "reward_weights": args.reward_weights,
        "temperature": args.temperature,
        "chat_template_kwargs": args.chat_template_kwargs,
    }
    return Plan(**{**settings, **overrides})


def load_critic(folder: Path, model: Any, args: Any) -> Critic | None:
    """The critic of a checkpoint.

    Args:
        folder: of the checkpoint.
        model: the actor that was saved in it.
        args: the run's settings.

    Returns:
        The critic, or None where the run had none.

    Raises:
        ConfigError: the checkpoint was not written by `CompPOTrainer`, or with other settings.
    """
    from comppo.trainers.pipeline import Processes
    from comppo.trainers.trl import checkpoint
    from comppo.trainers.trl.critic import CriticRunner

    if args.critic == "none" or not args.pipeline_config().has_critic:
        return None
    runner = CriticRunner(model, args, Processes(), torch.device(model.device))
    checkpoint.load(folder, runner)

    return critic_of(runner)


def critic_of(runner: Any) -> Critic:
    """A `CriticRunner`, as it is now, as `Plan` takes it."""

    def values(batch: Batch, computation: Computation, baseline: Tensor) -> Tensor:
        inputs = runner.inputs(
            computation,
            mask=batch.mask,
            baseline=baseline,
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
        )
        found: Tensor = runner.values(inputs)
        return found

    return values
