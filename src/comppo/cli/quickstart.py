"""`comppo quickstart`: the bundled model, trained once with CompPO and once with GRPO, side by side."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from comppo.cli.extras import check_writable, require_training
from comppo.errors import ComppoError, ConfigError, RunExistsError

ARMS = ("comppo", "grpo")
STEPS = 60
PROMPTS, GENERATIONS = 16, 8
"""Prompts per step and responses per prompt."""
CONFIG: dict[str, Any] = {
    "per_device_train_batch_size": PROMPTS * GENERATIONS,
    "num_generations": GENERATIONS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "activation_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "beta": 0.0,
}
MINUTES = 3
"""Measured on 2 cores without a GPU."""


@click.command("quickstart")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the results.  [runs/quickstart]")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True, help="Optimiser steps per arm.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of prompts and sampling.")
def command(output: Path | None, steps: int, seed: int) -> None:
    """Train the bundled model with CompPO and GRPO and compare them, in minutes on a CPU."""
    require_training()
    folder = choose_folder(output)
    announce(folder, steps)
    specs = write_specs(folder, steps, seed)
    with running(specs) as workers:
        watch(workers, specs, steps)
    finish(folder, list(specs))


def choose_folder(output: Path | None) -> Path:
    """`output` if it holds nothing, or the next free `runs/quickstart-N`."""
    if output is not None:
        check_writable(output, "--output")
        if output.exists() and any(output.iterdir()):
            raise RunExistsError(f"--output {output} is not empty: choose another folder. Nothing was overwritten.")
        return output
    folder, number = Path("runs/quickstart"), 1
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = Path(f"runs/quickstart-{number}")
    return folder


def announce(folder: Path, steps: int) -> None:
    """Say what will happen and how long it takes."""
    minutes = max(1, round(MINUTES * steps / STEPS))
    click.echo(
        f"Trains the bundled small language model on chained arithmetic, with CompPO and with GRPO at the same time, "
        f"one process and one thread each:\n{steps} steps of {PROMPTS} prompts x {GENERATIONS} responses per arm, the "
        f"same prompts, model and settings. Takes about {minutes} minutes on 2 cores.\nResults: {folder}/report.html, "
        f"{folder}/comppo/model, {folder}/grpo/model\n"
    )


def write_specs(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """One spec file per arm; they differ in the arm alone."""
    from comppo.study.run import RunSpec

    specs = {}
    folder.mkdir(parents=True, exist_ok=True)
    for arm in ARMS:
        spec = RunSpec(
            arm=arm,
            folder=str(folder / arm),
            task_params={"prompts": PROMPTS * steps, "eval_prompts": 256},
            config={**CONFIG, "max_steps": steps},
            seed=seed,
            eval_every=5,
        )
        specs[arm] = folder / f"{arm}.json"
        specs[arm].write_text(json.dumps(asdict(spec), indent=2) + "\n", encoding="utf-8")
    return specs


@contextmanager
def running(specs: dict[str, Path]) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Both arms as processes; none outlives this one."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    workers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for arm, spec in specs.items():
            with spec.with_suffix(".log").open("wb") as log:
                workers[arm] = subprocess.Popen(
                    [sys.executable, "-m", "comppo.study.run", str(spec)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
        yield workers
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.terminate()
        for worker in workers.values():
            worker.wait()


def watch(workers: dict[str, "subprocess.Popen[bytes]"], specs: dict[str, Path], steps: int) -> None:
    """Show progress until both have ended.

    Args:
        workers: the process of each arm, as `running` gives them.
        specs: the spec file of each arm; its log lies beside it.
        steps: training steps that each arm takes.

    Raises:
        ComppoError: an arm failed; names its log.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    started = time.monotonic()
    # Without a terminal, a line now and then instead of a picture that is redrawn
    pause = 0.5 if console.is_terminal else 15.0
    with (
        Live(console=console, refresh_per_second=2, transient=False) if console.is_terminal else _Lines(console) as live
    ):
        while True:
            done = all(worker.poll() is not None for worker in workers.values())
            live.update(progress_table(specs, steps, time.monotonic() - started))
            for arm, worker in workers.items():
                if worker.poll() not in (None, 0):
                    log = specs[arm].with_suffix(".log")
                    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                    raise ComppoError(f"the {arm} run failed (exit code {worker.returncode}); {log} ends with\n{tail}")
            if done:
                return
            _wait(workers, pause)


def _wait(workers: dict[str, "subprocess.Popen[bytes]"], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(worker.poll() is None for worker in workers.values()):
        time.sleep(0.2)


class _Lines:
    """Stands in for rich's Live where there is no terminal."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, table: Any) -> None:
        """Print the table as it stands."""
        self.console.print(table)


def progress_table(specs: dict[str, Path], steps: int, seconds: float) -> Any:
    """Reward, held-out accuracy, gate and critic health of both arms now."""
    from rich.table import Table

    table = Table(title=f"{seconds:.0f} s", title_justify="left")
    table.add_column("arm")
    for name in ("step", "reward", "held-out accuracy", "gate", "retention", "critic: explained variance"):
        table.add_column(name, justify="right")
    for arm, spec in specs.items():
        latest = latest_metrics(spec.parent / arm)
        table.add_row(
            arm,
            f"{latest.get('step', 0):.0f}/{steps}",
            *(
                _number(latest.get(key))
                for key in (
                    "reward",
                    "eval_accuracy",
                    "comppo/gate_mean",
                    "comppo/retention",
                    "comppo/explained_variance",
                )
            ),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def latest_metrics(folder: Path) -> dict[str, float]:
    """The newest value of each metric of a run."""
    from comppo.study.record import read_metrics

    latest: dict[str, float] = {}
    path = folder / "metrics.jsonl"
    if path.exists():
        for row in read_metrics(path):
            latest |= {name: value for name, value in row.items() if value is not None}
    return latest


def finish(folder: Path, arms: list[str]) -> None:
    """Table and report."""
    from rich.console import Console
    from rich.table import Table

    from comppo.report.html import write_report

    table = Table(title="Held-out greedy accuracy")
    for name in ("arm", "before", "after", "prompts", "sampled responses", "tokens", "time", "peak memory"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in arms:
        path = folder / arm / "result.json"
        if not path.exists():
            raise ConfigError(f"{path} is missing: the run did not finish.")
        result = json.loads(path.read_text(encoding="utf-8"))
        table.add_row(
            arm,
            _number(result["accuracy_before"]),
            _number(result["accuracy_after"]),
            str(result["eval_count"]),
            str(result["responses"]),
            str(result["tokens"]),
            f"{result['time_s']:.0f} s",
            f"{result['peak_memory_mb']:.0f} MB",
        )
    Console().print(table)
    report = folder / "report.html"
    write_report(
        [folder / arm for arm in arms],
        report,
        title="comppo quickstart",
        notes=[
            "Both arms start from the same weights, see the same prompts and have the same settings; they ran at the "
            "same time, one thread each. GRPO is comppo's group_relative operator, which gives TRL's own advantages."
        ],
    )
    click.echo(
        f"One seed of a small task shows how it works, not which is better.\nReport: {report}\n"
        f"Models: {', '.join(str(folder / arm / 'model') for arm in arms)} (AutoModelForCausalLM.from_pretrained)"
    )
