"""One run: a trainer that writes down what it does, and its held-out accuracy before, during and after.

`python -m comppo.study.run SPEC.json` executes one run in a process of its own, so that its time and peak memory are
its own. `comppo train` uses the same recording.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from comppo.errors import ConfigError, RunExistsError
from comppo.report.runfiles import METRICS_FILE
from comppo.study.arms import TITLES, arm_settings
from comppo.study.record import RunRecorder, read_metrics, versions

MODEL_FOLDER = "model"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that decides a run."""

    arm: str
    """Name in `study.arms`."""
    folder: str
    """Run folder; must not hold a run."""
    model: str = "bundled"
    """Hub name, folder or 'bundled'."""
    task: str = "chain"
    """As in `comppo train`."""
    task_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `CompPOConfig`, over the arm's own."""
    seed: int = 0
    """Seed of prompts, sampling and critic."""
    eval_every: int = 5
    """Steps between held-out evaluations; 0 for none in between."""
    threads: int = 1
    """Threads of torch."""

    @classmethod
    def read(cls, path: Path) -> "RunSpec":
        """Read a spec from a JSON file; ConfigError where it holds a field that a spec does not have."""
        content = json.loads(path.read_text(encoding="utf-8"))
        unknown = set(content) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"{path}: unknown fields {sorted(unknown)}: a run has {[f.name for f in fields(cls)]}.")
        return cls(**content)


class RecordingCallback(TrainerCallback):
    """Writes every log line, and held-out accuracy every few steps, into a run folder.

    Args:
        recorder: the run folder; None on processes that do not write.
        evaluate: gives the held-out accuracy now, or None for no evaluation.
        every: steps between evaluations; 0 for none in between.
        earlier: seconds of training before this session, of a run that is resumed.
    """

    def __init__(
        self,
        recorder: RunRecorder | None,
        evaluate: Callable[[], float] | None,
        *,
        every: int,
        earlier: float = 0.0,
    ) -> None:
        self.recorder = recorder
        self.evaluate = evaluate
        self.every = every
        self.earlier = earlier
        self.started = time.perf_counter()
        self.evaluating = 0.0
        """Seconds spent on held-out evaluation, which is not training."""

    @property
    def training_time(self) -> float:
        """Seconds of training so far, those of earlier sessions included, without held-out evaluation."""
        return self.earlier + time.perf_counter() - self.started - self.evaluating

    def accuracy(self, step: int) -> float | None:
        """Evaluate now and write it down."""
        if self.evaluate is None:
            return None
        before = time.perf_counter()
        accuracy = self.evaluate()
        self.evaluating += time.perf_counter() - before
        self._append({"step": step, "eval_accuracy": accuracy})
        return accuracy

    def _append(self, row: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.append_metrics({**row, "time_s": self.training_time})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started, self.evaluating = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate where it is due; the end of the run has an evaluation of its own."""
        if self.every and state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.accuracy(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down when the checkpoint was made: a resumed run counts on from there."""
        self._append({"step": state.global_step})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a log line."""
        if logs:
            numbers = {k: v for k, v in logs.items() if v is None or isinstance(v, int | float)}
            self._append({**numbers, "step": state.global_step})


def peak_memory_mb() -> float:
    """Peak memory of this process so far: resident memory, plus what CUDA allocated, in 10^6 bytes."""
    import torch

    # Linux counts in KiB, macOS in bytes
    scale = 1.0 if sys.platform == "darwin" else 1024.0
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return (resident + device) / 1e6


def held_out_evaluation(trainer: Any, task: Any) -> tuple[Callable[[], float] | None, int]:
    """How a run's held-out accuracy is measured.

    Args:
        trainer: a `CompPOTrainer`.
        task: the task it trains on.

    Returns:
        A function that gives the mean reward of the most probable responses to the task's held-out prompts, in the
        reward units that training sees (see `greedy_accuracy`), and the number of prompts; None and 0 without any.

    Raises:
        ConfigError: the held-out prompts come with images.
    """
    if task.eval_dataset is None or len(task.eval_dataset) == 0:
        return None, 0
    from comppo.evaluation.greedy import greedy_accuracy

    seen = {"image", "images"} & set(task.eval_dataset.column_names)
    if seen:
        raise ConfigError(
            f"the held-out prompts have a column {seen.pop()!r}, which held-out evaluation does not show to the model: "
            "set eval_prompts: 0 and leave eval_split out."
        )

    def evaluate() -> float:
        result = greedy_accuracy(
            trainer.accelerator.unwrap_model(trainer.model),
            getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            task.eval_dataset,
            task.reward_funcs,
            max_new_tokens=trainer.max_completion_length,
            reward_weights=trainer.args.reward_weights,
            trainer_state=trainer.state,
            async_loop=getattr(trainer, "async_loop", None),
            chat_template_kwargs=trainer.args.chat_template_kwargs,
        )
        return float(result.accuracy)

    return evaluate, len(task.eval_dataset)


def earlier_sessions(recorder: RunRecorder | None) -> tuple[float | None, float]:
    """What the metrics of a resumed run say: held-out accuracy before training, and seconds of training until then."""
    rows = read_metrics(recorder.folder / METRICS_FILE) if recorder is not None else []
    before = [row["eval_accuracy"] for row in rows if row.get("step") == 0 and row.get("eval_accuracy") is not None]
    seconds = [row["time_s"] for row in rows if row.get("time_s") is not None]
    return (before[0] if before else None), max(seconds, default=0.0)


def recorded_training(
    trainer: Any, task: Any, recorder: RunRecorder | None, folder: Path, *, eval_every: int, resume: bool = False
) -> dict[str, Any]:
    """Train, and leave a complete run folder with the model in it.

    Args:
        trainer: a `CompPOTrainer`.
        task: the task it trains on, for held-out accuracy.
        recorder: writes the run folder; None on processes that do not write.
        folder: the run folder.
        eval_every: steps between held-out evaluations.
        resume: continue from the last checkpoint in the trainer's `output_dir`; `recorder` was made by
            `RunRecorder.resume`.

    Returns:
        What stands in `result.json`. After `resume`, `accuracy_before` is that of the untrained model and `time_s`
        (seconds, without held-out evaluation) counts the steps before the checkpoint too, as far as they were written
        down; `peak_memory_mb` (10^6 bytes) is that of the last session alone.
    """
    evaluate, count = held_out_evaluation(trainer, task)
    before, earlier = earlier_sessions(recorder) if resume else (None, 0.0)
    callback = RecordingCallback(recorder, evaluate, every=eval_every, earlier=earlier)
    trainer.add_callback(callback)
    if not resume:
        before = callback.accuracy(0)
    trainer.train(resume_from_checkpoint=True if resume else None)
    seconds = callback.training_time
    result = {
        "accuracy_before": before,
        "accuracy_after": callback.accuracy(trainer.state.global_step),
        "eval_count": count,
        "responses": trainer.sampled_responses,
        "tokens": trainer.sampled_tokens,
        "time_s": seconds,
        "peak_memory_mb": peak_memory_mb(),
        "model": MODEL_FOLDER,
        "status": "finished",
    }
    trainer.save_model(str(folder / MODEL_FOLDER))
    if recorder is not None:
        recorder.write_json("credit.json", trainer.credit_records(8))
        histogram = trainer.gate_histogram()
        if histogram is not None:
            recorder.write_json("gates.json", histogram)
        recorder.finish(result)
    return result


def execute(spec: RunSpec) -> dict[str, Any]:
    """Run one spec in this process.

    Args:
        spec: what to run; its folder must not hold a run.

    Returns:
        What stands in `result.json`.

    Raises:
        ComppoError: a setting, the task or the folder is wrong; before any model is loaded.
    """
    import torch

    from comppo.tasks.base_models import resolve_model
    from comppo.tasks.registry import load_task
    from comppo.trainers.trl.config import CompPOConfig
    from comppo.trainers.trl.trainer import CompPOTrainer

    torch.set_num_threads(spec.threads)
    task = load_task(spec.task, seed=spec.seed, params=spec.task_params)
    settings = {
        "output_dir": str(Path(spec.folder) / "checkpoints"),
        "max_completion_length": task.max_completion_length,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": spec.seed,
        **arm_settings(spec.arm),
        **spec.config,
    }
    args = CompPOConfig(**{name: value for name, value in settings.items() if value is not None})
    recorder = RunRecorder(Path(spec.folder))
    if os.path.lexists(recorder.folder / MODEL_FOLDER):
        raise RunExistsError(f"{recorder.folder} already holds {MODEL_FOLDER}: choose another folder, or move it away.")
    recorder.write_json(
        "run.json",
        {
            "name": spec.arm,
            "title": TITLES.get(spec.arm, spec.arm),
            "config": {
                **asdict(spec),
                "gate": asdict(args.gate_config()),
                # What was used, defaults included
                "settings": args.to_dict(),
            },
            "versions": versions(),
            "seed": spec.seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": "python -m comppo.study.run",
        },
    )
    trainer = CompPOTrainer(
        model=resolve_model(spec.model), reward_funcs=task.reward_funcs, args=args, train_dataset=task.train_dataset
    )
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return recorded_training(trainer, task, recorder, recorder.folder, eval_every=spec.eval_every)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    execute(RunSpec.read(Path(sys.argv[1])))
