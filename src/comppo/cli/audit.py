"""`comppo audit`: how far the credit of operators agrees with the true advantages of a model's own tokens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from comppo.cli.extras import check_writable, require_training
from comppo.errors import ConfigError


@click.command("audit")
@click.argument("model", default="bundled")
@click.option("--task", default="chain", show_default=True, help="As in comppo train.")
@click.option("--task-params", default="{}", show_default=True, help="The task's parameters as a JSON object.")
@click.option("--responses", type=int, default=64, show_default=True, help="Audited responses, whole groups.")
@click.option("--group-size", type=int, default=8, show_default=True, help="Responses per prompt.")
@click.option("--continuations", type=int, default=32, show_default=True, help="Per valued state; even.")
@click.option("--every", type=int, default=4, show_default=True, help="Value a state before every so many tokens.")
@click.option("--operators", help="Names separated by commas.  [default: all]")
@click.option(
    "--critic-responses", type=int, default=512, show_default=True, help="Responses that critics are fitted on."
)
@click.option("--lam", type=float, default=1.0, show_default=True, help="Lambda of operators with a critic.")
@click.option("--max-new-tokens", type=int, help="Greatest length of a response.  [default: the task's, or 256]")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="Of sampling.")
@click.option("--budget", type=float, help="Minutes for the continuations; what is left then is said.")
@click.option(
    "--records",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the continuations, from which a second run goes on.  [default: beside --json]",
)
@click.option(
    "--no-gradients", is_flag=True, help="Leave the policy gradients out, which need a backward per operator."
)
@click.option("--no-proxies", is_flag=True, help="Leave the test of statistics as proxies of importance out.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch.  [default: torch's choice]")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write all results there.")
def command(
    model: str,
    task: str,
    task_params: str,
    responses: int,
    group_size: int,
    continuations: int,
    every: int,
    operators: str | None,
    critic_responses: int,
    lam: float,
    max_new_tokens: int | None,
    temperature: float,
    budget: float | None,
    records: Path | None,
    no_gradients: bool,
    no_proxies: bool,
    seed: int,
    threads: int | None,
    output: Path | None,
) -> None:
    """Hold the credit of operators against the true advantages of MODEL's tokens on a task.

    MODEL is a hub name, a folder or 'bundled'. True advantages are estimated by sampling on from prefixes of its own
    responses; critics are fitted on responses to other prompts. docs/audit.md explains every column.
    """
    require_training()
    import torch

    from comppo.audit.config import AuditConfig
    from comppo.audit.operators import OPERATORS
    from comppo.audit.run import run_audit
    from comppo.audit.table import as_table

    if threads is not None:
        torch.set_num_threads(threads)
    for path, name in ((output, "--json"), (records, "--records")):
        if path is not None:
            check_writable(path.parent, name)
    if records is None and output is not None:
        records = output.with_suffix(".continuations.jsonl")
    names = tuple(OPERATORS) if operators is None else tuple(name.strip() for name in operators.split(","))
    config = AuditConfig(
        model=model,
        task=task,
        task_params=_parameters(task_params),
        responses=responses,
        group_size=group_size,
        continuations=continuations,
        every=every,
        operators=names,
        critic_responses=critic_responses,
        lam=lam,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        budget_minutes=budget,
        gradients=not no_gradients,
        proxies=not no_proxies,
        seed=seed,
    )
    with _watching() as (say, progress):
        result = run_audit(config, records=records, progress=progress, say=say)
    click.echo(as_table(result))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        click.echo(f"\nWritten: {output}")


def _parameters(text: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--task-params {text!r} is no JSON: {error}. Example: '{{\"length\": 4}}'.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--task-params {text!r} must be a JSON object. Example: '{{\"length\": 4}}'.")
    return content


@contextmanager
def _watching() -> Iterator[tuple[Any, Any]]:
    """A progress bar on stderr: (say what begins, prefixes done and in all)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def say(text: str) -> None:
            bar.update(task, description=text, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, description="valuing prefixes", completed=done, total=total)

        yield say, progress
