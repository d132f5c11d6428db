"""`CompPOTrainer`: TRL's `GRPOTrainer` with credit per token. Only overrides that wrap `super()`; the loss is TRL's."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from comppo.computation import ATTENTION_STATISTICS, Computation, read_computation, require_readable
from comppo.critic import CriticInputs
from comppo.errors import ConfigError, RunExistsError, TaskError
from comppo.evidence.rollout import trainable_mask
from comppo.evidence.verifiers import checked_reward, probe_rewards
from comppo.trainers.pipeline import Assignment, Processes, Rollout, assign_credit, baselines
from comppo.trainers.trl import checkpoint
from comppo.trainers.trl.config import CompPOConfig
from comppo.trainers.trl.critic import CriticRunner

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
        **kwargs: every other argument of `GRPOTrainer`.

    Raises:
        ConfigError: `args` is not a `CompPOConfig`.
        TaskError: the data set has no `prompt` column.
        RewardError: a reward function returns the wrong number of rewards, or something that is not a number.
        UnreadableModelError: the model's attention cannot be read; names the layers and why.
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
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = CompPOConfig(f"{str(name).split('/')[-1]}-CompPO")
        if not isinstance(args, CompPOConfig):
            raise ConfigError(
                f"args is a {type(args).__name__}: pass a CompPOConfig (every field of GRPOConfig is in it)."
            )
        _require_prompts(train_dataset, kwargs.get("environment_factory"))
        layers: Any = args.gate_layers_read()
        if args.reads_attention():
            require_readable(_config_of(model, args), layers=layers)
        reward_funcs = _checked(reward_funcs, args, train_dataset)
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = self._with_ended_completions(kwargs["rollout_func"])
        super().__init__(model, reward_funcs, args=args, train_dataset=train_dataset, **kwargs)

        self._pipeline = args.pipeline_config()
        self._layers = layers
        self._processes = Processes(
            count=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            all_reduce=self._all_reduce,
            gather=self._gather,
        )
        self._rewards_per_func: Tensor | None = None
        self._generations = 0
        self.sampled_responses = 0
        """Responses sampled for training so far, on all processes."""
        self.sampled_tokens = 0
        """Tokens of those responses."""
        self._last: tuple[Rollout, Computation | None, Assignment, dict[str, Any]] | None = None
        self._critic: CriticRunner | None = None
        if self._pipeline.has_critic and args.critic != "none":
            self._critic = CriticRunner(self._unwrapped(), args, self._processes, probe=self._probe_computation)

    @property
    def critic(self) -> torch.nn.Module | None:
        """The critic's module, or None."""
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

        def score(
            model: Any, input_ids: Tensor, attention_mask: Tensor, completion_length: int
        ) -> tuple[Tensor, Tensor]:
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, completion_length, batch_size=rows, compute_entropy=True, **vision
            )
            return logps, entropies

        attention, statistic = self.args.reads_attention(), self.args.gate_statistic
        return read_computation(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            statistic=statistic if attention or statistic not in ATTENTION_STATISTICS else "output_entropy",
            layers=self._layers if attention else (),
            sink_tokens=self.args.gate_sink_tokens,
            hidden_layers=tuple(self.args.critic_hidden_layers),
            score=score,
        )

    def _probe_computation(self) -> Computation:
        """A three-token pass that tells the widths of what can be read."""
        ids = torch.full((1, 3), self._tokenizer.pad_token_id or 0, device=self.accelerator.device)
        one = torch.ones_like(ids)
        return self._read(
            {
                "prompt_ids": ids[:, :2],
                "prompt_mask": one[:, :2],
                "completion_ids": ids[:, 2:],
                "completion_mask": one[:, 2:],
            }
        )

    # ---- TRL's steps, wrapped ------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        completion_ids, logps = super()._generate_single_turn(*args, **kwargs)
        return self._end_empty(completion_ids, logps)

    def _end_empty(self, completion_ids: list[list[int]], logps: Any) -> tuple[list[list[int]], Any]:
        """A backend that strips the stop token leaves nothing of a completion that is only that token: put it back."""
        for row, ids in enumerate(completion_ids):
            if len(ids) == 0:
                completion_ids[row] = [self.eos_token_ids[0]]
                if logps is not None:
                    logps[row] = [None]
        return completion_ids, logps

    def _with_ended_completions(self, rollout_func: Any) -> Any:
        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = dict(rollout_func(prompts, trainer))
            if "env_mask" in output:
                output["env_mask"] = [mask if len(mask) else [1] for mask in output["env_mask"]]
            if "completion_ids" in output:
                output["completion_ids"], output["logprobs"] = self._end_empty(
                    list(output["completion_ids"]), output.get("logprobs")
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
            metrics = metrics | self._critic.fit(
                critic_inputs, assignment.credit.returns, generations=self._generations_planned()
            )
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._show_advantages(assignment, rollout)
        self._generations += 1
        counts = torch.stack([batch["completion_mask"].sum(), batch["completion_mask"].new_tensor(len(rollout.mask))])
        tokens, responses = self._all_reduce(counts).tolist()
        self.sampled_tokens += tokens
        self.sampled_responses += responses
        self._last = (rollout, computation, assignment, batch)
        return assignment.advantages

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
        # The mean of earlier generations: a response's own reward must not be in its baseline
        baseline = baselines(rollout, default=self._critic.mean_reward, processes=self._processes)
        self._critic.observe(rollout.response_rewards, rollout.scorable)
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
        folder = Path(self.args.output_dir)
        kept = sorted(folder.glob("checkpoint-*")) if folder.is_dir() else []
        fresh = not (resume_from_checkpoint or self.args.resume_from_checkpoint)
        if fresh and kept and self.state.global_step == 0:
            raise RunExistsError(
                f"output_dir={str(folder)!r} already holds {kept[-1].name}: choose another folder, or continue that "
                "run with resume_from_checkpoint=True. Nothing was overwritten."
            )
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            checkpoint.save(folder, self._critic, {name: getattr(self, name) for name in COUNTERS})

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
        if self._last is None:
            return []
        rollout, computation, assignment, batch = self._last
        order = rollout.response_rewards.argsort(descending=True, stable=True).tolist()
        # From both ends inwards, so that a few responses show success and failure
        picked = [order[i // 2] if i % 2 == 0 else order[-(i // 2) - 1] for i in range(min(limit, len(order)))]
        per_token = {
            "advantages": assignment.advantages,
            "gates": assignment.gates,
            "values": assignment.values,
            "statistic": computation.statistic if computation is not None else None,
            "logps": computation.logps if computation is not None else None,
        }
        return [self._credit_record(row, batch, rollout, per_token) for row in picked]

    def _credit_record(
        self, row: int, batch: dict[str, Any], rollout: Rollout, per_token: dict[str, Tensor | None]
    ) -> dict[str, Any]:
        kept = batch["completion_mask"][row].bool()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        ids = batch["completion_ids"][row][kept].tolist()
        record: dict[str, Any] = {
            "prompt": self._tokenizer.decode(prompt),
            "completion": self._tokenizer.decode(ids),
            "reward": rollout.response_rewards[row].item() if rollout.scorable[row] else None,
            "tokens": [self._tokenizer.decode([token]) for token in ids],
            "trained": rollout.mask[row][kept].tolist(),
        }
        for name, tensor in per_token.items():
            record[name] = tensor[row][kept].tolist() if tensor is not None else None
        return record

    def gate_histogram(self, bins: int = 40) -> dict[str, Any] | None:
        """How the gates of the last generation are distributed: edges, counts, mean; None without gates."""
        if self._last is None or self._last[2].gates is None:
            return None
        gates = self._last[2].gates[self._last[0].mask].double().cpu()
        if gates.numel() == 0:
            return None
        low, high = gates.min().item(), gates.max().item()
        counts, edges = torch.histogram(gates, bins=bins, range=(low, max(high, low + 1e-6)))
        return {
            "edges": edges.tolist(),
            "counts": [int(count) for count in counts.tolist()],
            "minimum": low,
            "maximum": high,
            "mean": gates.mean().item(),
        }


def _config_of(model: Any, args: CompPOConfig) -> Any:
    """The model's configuration, read before any weights are."""
    if not isinstance(model, str):
        return model
    from transformers import AutoConfig

    known = {k: v for k, v in (args.model_init_kwargs or {}).items() if k in ("revision", "token", "cache_dir")}
    return AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, **known)


def _require_prompts(dataset: Any, environment: Any) -> None:
    columns = getattr(dataset, "column_names", None)
    if environment is None and columns is not None and "prompt" not in columns:
        raise TaskError(
            f"train_dataset has the columns {list(columns)}, but no 'prompt': rename the column that holds the "
            "prompts, e.g. dataset.rename_column('question', 'prompt')."
        )


def _checked(reward_funcs: Any, args: CompPOConfig, dataset: Any) -> Any:
    """Reward functions that name themselves when they misbehave, tried once before anything expensive."""
    if reward_funcs is None:
        return None
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if args.probe_rewards and hasattr(dataset, "__getitem__") and len(dataset) > 0:
        plain = [f for f in functions if callable(f) and not isinstance(f, torch.nn.Module)]
        probe_rewards(plain, [dataset[0], dataset[min(1, len(dataset) - 1)]])
    return [checked_reward(f) if callable(f) and not isinstance(f, torch.nn.Module) else f for f in functions]
