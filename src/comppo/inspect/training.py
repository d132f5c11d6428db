"""Pages of a few fixed prompts while a trainer trains, so that one can watch credit change."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from comppo.computation import readable_layers
from comppo.errors import ConfigError
from comppo.inspect.checkpoints import critic_of, plan_of
from comppo.inspect.sampling import sample_and_inspect
from comppo.report.inspect_page import write_page

PROMPTS, RESPONSES = 2, 4


class InspectCallback(TrainerCallback):
    """Writes `step-000020.html` and so on into a folder, every few steps.

    Each page samples responses to the same prompts with the same seed from the policy as it is, with the critic as it
    is. Training is not changed: modes and random states are restored. The pages' time counts as training time.

    Args:
        trainer: a `CompPOTrainer`, to which the callback is then added.
        rows: prompts with the columns that the reward functions need.
        reward_funcs: in TRL's convention.
        folder: made with the first page. A page that is there already is kept; a new one goes beside it, in a folder
            of the same name.
        every: steps between pages, at least 1.

    Raises:
        ConfigError: several processes train, the model's attention cannot be read, or a prompt comes with images.
    """

    def __init__(
        self,
        trainer: Any,
        rows: Sequence[Mapping[str, Any]],
        *,
        reward_funcs: Sequence[Any],
        folder: Path,
        every: int,
    ) -> None:
        given = f"inspect_every={every!r}"
        if every < 1:
            raise ConfigError(f"{given} must be at least 1.")
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(f"{given} needs a single process, got {trainer.accelerator.num_processes}: set it to 0.")
        if not readable_layers(trainer.accelerator.unwrap_model(trainer.model)):
            raise ConfigError(f"{given}: no layer of this model has attention that can be read: set it to 0.")
        if any({"image", "images"} & set(row) for row in rows):
            raise ConfigError(f"{given}: prompts with images cannot be shown: set it to 0.")
        self.trainer, self.rows, self.folder, self.every = trainer, list(rows), folder, every
        self.plan = plan_of(
            trainer.args,
            reward_funcs=list(reward_funcs),
            responses=RESPONSES,
            max_new_tokens=trainer.max_completion_length,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a page where one is due."""
        if state.global_step % self.every:
            return
        trainer = self.trainer
        runner = trainer._critic
        # Without a module no generation has shown yet how wide its features are
        critic = critic_of(runner) if runner is not None and runner.module is not None else None
        inspection = sample_and_inspect(
            trainer.accelerator.unwrap_model(trainer.model),
            getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            self.rows,
            dataclasses.replace(self.plan, critic=critic),
            title=f"Credit at step {state.global_step}",
            notes=[f"The same {len(self.rows)} prompts and seed on every page of this run."],
        )
        page = self.folder / f"step-{state.global_step:06d}.html"
        write_page(page.with_suffix("") if page.exists() else page, inspection)
