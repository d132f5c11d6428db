"""`comppo inspect`: one page on which a person reads where credit goes, token by token."""

import contextlib
import inspect
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from comppo.cli import model_files, model_loading
from comppo.cli.check_model import device_of, quiet_transformers, say
from comppo.cli.extras import require_training
from comppo.cli.model_files import quoted
from comppo.errors import ConfigError
from comppo.evidence.verifiers import reward_name

DEFAULT_TOKENS = 256


@click.command("inspect")
@click.argument("model", metavar="[MODEL_OR_RUN]", required=False)
@click.option("--prompt-file", type=Path, help="A text file with one prompt, or .jsonl with a prompt per line.")
@click.option("--run", type=Path, help="A run folder: the responses that it saved, or a checkpoint with --step.")
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint of the run to sample from, with its critic.")
@click.option("--task", help="Take prompts and reward functions from a task, such as chain.")
@click.option("--reward", multiple=True, help="Reward function: math_verify, exact_match or module:function.")
@click.option("--prompts", type=click.IntRange(min=1), default=2, show_default=True, help="Prompts taken from a task.")
@click.option("--responses", type=click.IntRange(min=1), default=4, show_default=True, help="Responses per prompt.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), help=f"[default: the task's own limit, or {DEFAULT_TOKENS}]"
)
@click.option("--keys", type=click.IntRange(min=0), default=5, show_default=True, help="Top keys per token; 0: none.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option(
    "--output",
    type=Path,
    default=Path("."),
    show_default=True,
    help="A new file, or a folder, where the page is named by its content.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--dtype", type=click.Choice(model_loading.DTYPES), default="auto", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
def command(
    model: str | None,
    prompt_file: Path | None,
    run: Path | None,
    step: int | None,
    task: str | None,
    reward: tuple[str, ...],
    prompts: int,
    responses: int,
    max_new_tokens: int | None,
    keys: int,
    seed: int,
    output: Path,
    show: bool,
    revision: str | None,
    dtype: str,
    device: str,
) -> None:
    """Write one HTML page with responses coloured by their credit, under several operators.

    MODEL_OR_RUN is a hub name, a folder with a model, 'bundled', or the folder of a run. Responses are sampled from it
    to the prompts of --prompt-file or --task. In a .jsonl file each line is an object with "prompt" and the columns
    that reward functions need, such as "answer". With --run alone the page shows the responses that the run saved,
    with their credit as it was used.

    The page needs no network, no server and no comppo. Its path is printed. Nothing is overwritten.
    """
    require_training()
    from comppo.inspect import write_page

    _check_source(model, run, step, prompt_file, task)
    with quiet_transformers(), contextlib.redirect_stdout(sys.stderr):
        if run is not None and step is None:
            from comppo.inspect.records import inspect_run

            inspection = inspect_run(run)
        else:
            source = Sampled(
                model=model,
                run=run if model is None else Path(model) if _is_run(model) else None,
                step=step,
                prompt_file=prompt_file,
                task=task,
                prompts=prompts,
                revision=revision,
                dtype=dtype,
            )
            inspection = _sampled(
                source, device_of(device), reward,
                responses=responses, max_new_tokens=max_new_tokens, keys=keys, seed=seed,
            )  # fmt: skip
        path = write_page(output, inspection)
    click.echo(str(path))
    if show:
        click.launch(path.resolve().as_uri())


def _check_source(
    model: str | None, run: Path | None, step: int | None, prompt_file: Path | None, task: str | None
) -> None:
    """Refuse sources that contradict each other."""
    if (model is None) == (run is None):
        raise ConfigError("give either MODEL_OR_RUN (with --prompt-file or --task), or --run DIR.")
    if step is not None and run is None:
        raise ConfigError(f"--step {step} is a step of a run: give the run's folder with --run.")
    if run is not None and step is None and (prompt_file is not None or task is not None):
        raise ConfigError(
            "--run alone shows the responses that the run saved: add --step to sample from a checkpoint, or give the "
            "run's folder as MODEL_OR_RUN to sample from its last model."
        )
    if prompt_file is not None and task is not None:
        raise ConfigError("--prompt-file and --task both give prompts: leave one of them out.")
    if model is not None and prompt_file is None and task is None and not _is_run(model):
        raise ConfigError(f"there are no prompts for {quoted(model)}: give --prompt-file FILE or --task NAME.")


def _is_run(name: str) -> bool:
    return (Path(name) / "run.json").is_file()


def _sampled(source: "Sampled", device: str, reward: Sequence[str], **wanted: Any) -> Any:
    """Sample from a model, the last model of a run, or a checkpoint."""
    from comppo.evidence.verifiers import load_reward
    from comppo.inspect.checkpoints import credit_settings, load_critic, plan_of, run_settings
    from comppo.inspect.sampling import sample_and_inspect

    settings = run_settings(source.run) if source.run is not None else None
    folder = source.model_name()
    args = settings.args if settings is not None else credit_settings()
    functions: list[Any] = [load_reward(spec) for spec in reward]
    rows = read_prompts(source.prompt_file) if source.prompt_file is not None else []
    task = _task(source, settings, wanted["seed"]) if not (rows and functions) else None
    if task is not None:
        rows = rows or taken(task, source.prompts)
        wanted["max_new_tokens"] = wanted["max_new_tokens"] or task.max_completion_length
        if not functions and _fits(rows, task):
            functions = task.reward_funcs
    _check_columns(functions, rows)
    weights = args.reward_weights if len(args.reward_weights or ()) == len(functions) else None
    model, tokenizer = _loaded(folder, source.revision, source.dtype, device)
    plan = plan_of(
        args,
        **{**wanted, "max_new_tokens": wanted["max_new_tokens"] or DEFAULT_TOKENS},
        reward_funcs=functions,
        reward_weights=weights,
        critic=load_critic(Path(folder), model, args) if source.step is not None else None,
    )
    say(f"sampling {plan.responses} responses to each of {len(rows)} prompts")
    name = model_files.printable(Path(folder).name or folder)
    title = f"{settings.title}, {name}" if settings is not None else f"Credit in {name}"
    sampled = f"Responses sampled from {name} with seed {plan.seed}."
    return sample_and_inspect(model, tokenizer, rows, plan, title=title, notes=[sampled])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Where model and prompts come from."""

    model: str | None
    """As the user named it; None for a checkpoint."""
    run: Path | None
    """The run that it belongs to, if any."""
    step: int | None
    prompt_file: Path | None
    task: str | None
    prompts: int
    """How many prompts to take from a task."""
    revision: str | None
    dtype: str

    def model_name(self) -> str:
        """What to load; ConfigError where the run has no such checkpoint."""
        from comppo.inspect.checkpoints import checkpoint_folder

        if self.run is None:
            return str(self.model)
        return str(self.run / "model" if self.step is None else checkpoint_folder(self.run, self.step))


def _task(source: Sampled, settings: Any, seed: int) -> Any:
    """The task that gives prompts or rewards: the one asked for, or that of the run; None without either."""
    from comppo.tasks.registry import load_task

    if source.task is not None:
        return load_task(source.task, seed=seed)
    if settings is not None:
        return load_task(settings.task, seed=settings.args.seed, params=settings.task_params)
    return None


def taken(task: Any, count: int) -> list[dict[str, Any]]:
    """The first prompts of a task, held-out ones where it has them."""
    dataset = task.eval_dataset if task.eval_dataset is not None and len(task.eval_dataset) else task.train_dataset
    return [dataset[index] for index in range(min(count, len(dataset)))]


def _fits(rows: Sequence[dict[str, Any]], task: Any) -> bool:
    """Whether a task's reward functions find their columns in these rows."""
    return all(set(task.train_dataset.column_names) <= set(row) for row in rows)


def _check_columns(functions: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Refuse reward functions whose arguments the rows do not have, before anything is loaded."""
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", *rows[0]}
    for function in functions:
        wanted = inspect.signature(function).parameters.values()
        named = [p for p in wanted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [p.name for p in named if p.default is p.empty and p.name not in given]
        if missing:
            raise ConfigError(
                f"reward {reward_name(function)!r} needs {', '.join(missing)}, which the prompts do not have: give a "
                ".jsonl file with these columns, or a --task that has them."
            )


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Prompts from a file.

    Args:
        path: .jsonl with one object per line, each with a "prompt"; any other file is one prompt, without the line
            break at its end.

    Returns:
        Rows with at least `prompt`; all have the same columns.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    shown = f"--prompt-file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown} cannot be read ({error}): give a UTF-8 text file.") from None
    if path.suffix.lower() != ".jsonl":
        only = text.removesuffix("\n")
        if not only:
            raise ConfigError(f"{shown} is empty: it must hold a prompt.")
        return [{"prompt": only}]
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{shown}, line {number}, is not JSON ({error}): mend it.") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f'{shown}, line {number}: it must be an object with a "prompt", text or messages.')
        if rows and set(row) != set(rows[0]):
            raise ConfigError(f"{shown}, line {number} has other columns than the first: give all lines the same.")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{shown} holds no line: it must hold a prompt.")
    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        raise ConfigError(f"{shown} mixes texts and messages as prompts: use one of them.")
    return rows


def _loaded(name: str, revision: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoTokenizer

    from comppo.computation.structure import examine

    source = model_files.locate(name, revision=revision)
    model_files.check_safe(source)
    config = model_loading.read_config(source, None)
    with model_loading.failing_as_config_error("looking at the configuration", "It may be damaged."):
        structure = examine(config)
    if not source.weights:
        raise ConfigError(f"model={quoted(name)} holds no weights: give one that does.")
    say(f"loading {model_files.printable(name)}")
    with model_loading.in_memory(f"the weights of {quoted(name)}", "choose a smaller --dtype or another --device"):
        model, _ = model_loading.load_model(
            source,
            config,
            class_name=structure.model_class if structure is not None else None,
            parameters=structure.parameters if structure is not None else 0,
            dtype=dtype,
            attn_implementation=None,
            device=device,
        )
    with model_loading.failing_as_config_error("loading the tokenizer", "The folder must hold the model's tokenizer."):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **source.options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer
