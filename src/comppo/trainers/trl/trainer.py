"""`CompPOTrainer`: TRL's `GRPOTrainer` with credit per token. Only overrides that wrap `super()`; the loss is TRL's."""

import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from comppo.computation import Computation, read_computation
from comppo.critic import CriticInputs
from comppo.errors import RunExistsError
from comppo.evidence.rollout import trainable_mask
from comppo.trainers.pipeline import Assignment, Processes, Rollout, assign_credit, baselines
from comppo.trainers.trl import checkpoint, checks
from comppo.trainers.trl.config import CompPOConfig
from comppo.trainers.trl.critic import CriticRunner
from comppo.trainers.trl.records import CreditSnapshot

VISION_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "num_tiles",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What TRL hands from generation to the loss for models that see images."""

COUNTERS = ("_generations", "sampled_responses", "sampled_tokens")
"""What a checkpoint remembers of the trainer itself."""


class CompPOTrainer(GRPOTrainer):
    """Trains with computation-conditioned credit; takes what `trl.GRPOTrainer` takes.

    Once per generation, before the first update on it, one pass of the behaviour policy reads the gate statistic,
    hidden states and log-probabilities; the critic values every state; the transport operator makes one advantage
    per token; the critic is fitted on the cached features. Gates and values belong to the behaviour policy, so
    accumulation and `num_iterations` need nothing more.

    Args:
        model: as in TRL: a name, a folder, or a model.
        reward_funcs: as in TRL. A reward of None means unscorable: zero weight, counted as `comppo/unscorable`.
        args: a `CompPOConfig`; None means its defaults, as in TRL.
        train_dataset: as in TRL, with a `prompt` column.
        eval_dataset: as in TRL.
        processing_class: as in TRL.
        reward_processing_classes: as in TRL.
        callbacks: as in TRL.
        optimizers: as in TRL.
        quantization_config: as in TRL.
        peft_config: as in TRL.
        tools: as in TRL; what a tool says gets no credit and hands later credit on.
        rollout_func: as in TRL.
        environment_factory: as in TRL.

    Raises:
        ConfigError: `args` is not a `CompPOConfig`.
        TaskError: the data set has no `prompt` column.
        RewardError: a reward function returns the wrong number of rewards, or something that is not a number.
        UnreadableModelError: what the settings need of the model, attention or routers, cannot be read; names the
            layers and why.
    """

    _tag_names: ClassVar = ["trl", "comppo"]
    _name = "CompPO"
    _paper: ClassVar = {
        "title": "Let Credit Follow Computation: Architecture-Aware Credit Transport for Large Language Model "
        "Reinforcement Learning",
        "id": "2608.21501",
        "citation": "@article{shi2026credit,\n"
        "    title = {{Let Credit Follow Computation: Architecture-Aware Credit Transport for Large Language Model "
        "Reinforcement Learning}},\n    author = {Shi and Kang and Zhu},\n    year = 2026,\n"
        "    eprint = {arXiv:2608.21501},\n}",
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: CompPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = CompPOConfig(f"{str(name).split('/')[-1]}-CompPO")
        checks.check_arguments(args, reward_funcs, train_dataset, eval_dataset, environment_factory)
        checks.check_model(model, args)
        if rollout_func is not None:
            rollout_func = self._with_ended_completions(rollout_func)
        super().__init__(
            model,
            checks.checked_rewards(reward_funcs, args, train_dataset),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        # A configuration alone may not have told
        checks.check_model(self._unwrapped(), args)
        self._pipeline, self._reading = args.pipeline_config(), args.reading()
        self._processes = Processes(
            count=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            all_reduce=self._all_reduce,
            gather=self._gather,
        )
        self._rewards_per_func: Tensor | None = None
        self._sampled = 0
        self._generations = 0
        self.sampled_responses = 0
        """Responses sampled for training so far, on all processes."""
        self.sampled_tokens = 0
        """Tokens that the policy chose in them."""
        self.last_credit: CreditSnapshot | None = None
        """Responses and credit of the last generation; None before the first."""
        self._critic: CriticRunner | None = None
        if self._pipeline.has_critic and args.critic != "none":
            self._critic = CriticRunner(self._unwrapped(), args, self._processes, self.accelerator.device)

    @property
    def critic(self) -> torch.nn.Module | None:
        """The critic's module; None without one, and before the first generation shows how wide its features are."""
        return self._critic.module if self._critic is not None else None

    # ---- processes -----------------------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")

    def _gather(self, tensor: Tensor) -> Tensor:
        # Booleans are not padded alike by every backend
        whole = tensor.long() if tensor.dtype == torch.bool else tensor
        if whole.ndim > 1:
            whole = self.accelerator.pad_across_processes(whole, dim=1)
        return self.accelerator.gather(whole).to(tensor.dtype)

    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self, batch: dict[str, Any]) -> Computation:
        vision = {name: batch[name] for name in VISION_INPUTS if name in batch}
        rows = self.args.per_device_train_batch_size

        def score(model: Any, input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> Any:
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, completion_length, batch_size=rows, compute_entropy=True, **vision
            )
            return logps, entropies

        return read_computation(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            score=score,
            **self._reading,
        )

    # ---- TRL's steps, wrapped ------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        # Counted here: masking truncated completions empties their mask later on
        completion_ids, tool_mask = generated[1], generated[2]
        self._sampled = sum(map(len, completion_ids) if tool_mask is None else map(sum, tool_mask))
        return generated

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completion_ids, logps = super()._generate_single_turn(*args, **kwargs)
        return self._end_empty(completion_ids, logps)

    def _end_empty(self, completion_ids: Any, logps: Any) -> tuple[list[Any], Any]:
        """A backend that strips the stop token leaves nothing of a completion that is only that token: put it back."""
        empty = [len(ids) == 0 for ids in completion_ids]
        ended = [[self.eos_token_ids[0]] if none else ids for ids, none in zip(completion_ids, empty, strict=True)]
        if logps is not None:
            logps = [[None] if none else row for row, none in zip(logps, empty, strict=True)]
        return ended, logps

    def _with_ended_completions(self, rollout_func: Any) -> Any:
        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = dict(rollout_func(prompts, trainer))
            if "env_mask" in output:
                output["env_mask"] = [mask if len(mask) else [1] for mask in output["env_mask"]]
            # Anything missing is TRL's to complain about
            if "completion_ids" in output and "logprobs" in output:
                output["completion_ids"], output["logprobs"] = self._end_empty(
                    output["completion_ids"], output["logprobs"]
                )
            return output

        return rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        batch = super()._generate_and_score_completions(inputs)
        # Evaluation only reports rewards and TRL's own loss: nothing is fitted on it
        if training:
            batch["advantages"] = self._assign(batch)
        return batch

    def _assign(self, batch: dict[str, Any]) -> Tensor:
        rollout = self._rollout(batch)
        computation = self._read(batch) if self._pipeline.reads_computation else None
        values, critic_inputs = None, None
        if self._critic is not None and computation is not None:
            critic_inputs = self._critic_inputs(batch, rollout, computation)
            values = self._critic.values(critic_inputs)
        assignment = assign_credit(rollout, computation, values, self._pipeline, self._processes)
        metrics = assignment.metrics
        if self._critic is not None and critic_inputs is not None:
            # After the values: neither baseline nor range may know a response's own reward
            self._critic.observe(rollout.response_rewards, rollout.scorable)
            metrics = metrics | self._critic.fit(
                critic_inputs, assignment.credit.returns, generations=self._generations_planned()
            )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._show_advantages(assignment, rollout)
        self._count(rollout)
        self.last_credit = CreditSnapshot.take(batch, rollout, assignment, computation)
        return assignment.advantages

    def _count(self, rollout: Rollout) -> None:
        counts = torch.tensor([self._sampled, len(rollout.mask)], device=rollout.mask.device)
        tokens, responses = self._all_reduce(counts).tolist()
        self._generations += 1
        self.sampled_tokens += tokens
        self.sampled_responses += responses

    def _rollout(self, batch: dict[str, Any]) -> Rollout:
        per_func = self._rewards_per_func
        assert per_func is not None, "TRL scored a batch without calling _calculate_rewards"
        unscorable = per_func.isnan().all(dim=1)
        weighted = (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)
        scorable = self._processes.local(~unscorable)
        return Rollout(
            completion_ids=batch["completion_ids"],
            mask=trainable_mask(batch["completion_mask"], batch.get("tool_mask"), scorable),
            response_rewards=self._processes.local(weighted),
            scorable=scorable,
            num_generations=self.num_generations,
            index=self._generations,
        )

    def _critic_inputs(self, batch: dict[str, Any], rollout: Rollout, computation: Computation) -> CriticInputs:
        assert self._critic is not None
        baseline = baselines(rollout, default=self._critic.mean_reward, processes=self._processes)
        return self._critic.inputs(
            computation,
            mask=rollout.mask,
            baseline=baseline,
            input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        )

    def _generations_planned(self) -> int:
        steps = self.state.max_steps * self.args.gradient_accumulation_steps
        return max(1, -(-steps // (self.args.steps_per_generation * self.num_iterations)))

    def _show_advantages(self, assignment: Assignment, rollout: Rollout) -> None:
        """TRL's completion table holds one number per response: show the mean over its tokens."""
        lengths = rollout.mask.sum(1).clamp(min=1)
        means = self._processes.gather(assignment.advantages.sum(1) / lengths).tolist()
        shown = self._logs["advantages"]
        for _ in range(min(len(means), len(shown))):
            shown.pop()
        shown.extend(means)

    # ---- runs and checkpoints ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; refuses to overwrite the checkpoints of an earlier run.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the last one in `output_dir`; as in Transformers.
            **kwargs: every other argument of `Trainer.train`.

        Returns:
            Transformers' `TrainOutput`.

        Raises:
            RunExistsError: `output_dir` holds checkpoints and `resume_from_checkpoint` is not given.
        """
        # Transformers stores the field, but reads the argument alone
        resume_from_checkpoint = resume_from_checkpoint or self.args.resume_from_checkpoint or None
        folder = Path(self.args.output_dir)
        kept = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        if kept and not resume_from_checkpoint and self.state.global_step == 0:
            last = max(kept, key=lambda path: int(path.name.removeprefix("checkpoint-")))
            raise RunExistsError(
                f"output_dir={str(folder)!r} already holds {last.name}: choose another folder, or continue that run "
                "with resume_from_checkpoint=True. Nothing was overwritten."
            )
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # First, because Transformers pushes the folder and deletes older ones at the end of its own saving
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            checkpoint.save(folder, self._critic, {name: getattr(self, name) for name in COUNTERS})
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None:
            for name, value in checkpoint.load(Path(checkpoint_folder), self._critic).items():
                setattr(self, name, value)

    # ---- what a person may look at -------------------------------------------------------------------------------

    def credit_records(self, limit: int = 4) -> list[dict[str, Any]]:
        """Responses of the last generation with their per-token credit, as plain Python values.

        Args:
            limit: greatest number of responses; the best and the worst rewarded come first.

        Returns:
            One dictionary per response: prompt, completion, reward, and per token its text, advantage, gate, value,
            statistic, log-probability, and whether it was trained. Empty before the first generation.
        """
        return [] if self.last_credit is None else self.last_credit.records(self._tokenizer, limit)

    def gate_histogram(self, bins: int = 40) -> dict[str, Any] | None:
        """How the gates of the last generation are distributed: edges, counts, minimum, maximum, mean; None without."""
        return None if self.last_credit is None else self.last_credit.gate_histogram(bins)
