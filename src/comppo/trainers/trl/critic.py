"""The critic beside TRL's trainer: outside `self.model`, so that saving, PEFT, sharding and vLLM never see it."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from comppo.computation import Computation
from comppo.critic import (
    Critic,
    CriticInputs,
    StandardCritic,
    TransportAlignedCritic,
    build_features,
    check_parameter_share,
    critic_optimizer,
    feature_widths,
    fit_critic,
)
from comppo.errors import ConfigError
from comppo.trainers.pipeline import Processes
from comppo.trainers.trl.config import CompPOConfig


class CriticRunner:
    """A critic with its optimiser and schedule, fitted once per generation.

    The full-size critic copies the actor now, before anything shards or wraps it. The transport-aligned critic is built
    when the first generation shows how wide its features are: no forward pass is made for it.

    Args:
        actor: the unwrapped policy.
        args: the critic's settings.
        processes: collective operations.
        device: where values are needed.
    """

    def __init__(self, actor: Any, args: CompPOConfig, processes: Processes, device: torch.device) -> None:
        self.args = args
        self.config = args.critic_config()
        self.processes = processes
        self.device = device
        # DeepSpeed's partitioned parameters keep their full size in an attribute of its own
        self.actor_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in actor.parameters())
        self.module: Critic | None = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        if args.critic == "standard":
            self._install(StandardCritic(actor, reward_min=self.config.reward_min, reward_max=self.config.reward_max))

    def _install(self, module: Critic) -> None:
        self.module = module.to(self.device)
        self.optimizer = critic_optimizer(self.module, self.config)
        if self._saved is not None:
            weights, state = self._saved
            self.module.load_state_dict(weights, strict=True)
            self.optimizer.load_state_dict(state["optimizer"])

    def _install_head(self, computation: Computation) -> None:
        widths = feature_widths(
            self.config.features,
            hidden_width=computation.hidden.shape[-1],
            routing_channels=computation.routing.shape[2:].numel(),
        )
        head = TransportAlignedCritic(self.config, widths)
        check_parameter_share(head, self.actor_parameters, self.config.max_parameter_share)
        self._install(head)

    @property
    def mean_reward(self) -> float:
        """Mean of the rewards seen in earlier generations; 0 before the first."""
        if self.module is not None:
            return float(self.module.mean_reward)
        return float(self._saved[0]["mean_reward"]) if self._saved is not None else 0.0

    def inputs(
        self, computation: Computation, *, mask: Tensor, baseline: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> CriticInputs:
        """What this critic looks at: features of the actor's computation, or the tokens themselves."""
        if self.args.critic != "tac":
            return CriticInputs(mask=mask, baseline=baseline, input_ids=input_ids, attention_mask=attention_mask)
        if self.module is None:
            self._install_head(computation)
        features = build_features(
            self.config.features,
            mask=mask,
            logps=computation.logps,
            entropies=computation.entropies,
            hidden=computation.hidden,
            routing=computation.routing,
            statistic=computation.statistic,
            group_mean=baseline,
            max_length=self.args.max_completion_length,
        )
        return CriticInputs(mask=mask, baseline=baseline, features=features)

    def observe(self, rewards: Tensor, scorable: Tensor) -> None:
        """Remember the rewards of a generation: for the baseline without a group, and for the reachable range."""
        assert self.module is not None, "rewards are observed after the values"
        self.module.observe_rewards(self.processes.gather(rewards)[self.processes.gather(scorable)])

    def values(self, inputs: CriticInputs) -> Tensor:
        """Values of a rollout that the critic has not been fitted on, (rows, tokens)."""
        assert self.module is not None, "inputs() builds the module"
        with torch.no_grad():
            rows, size = inputs.mask.shape[0], self.args.per_device_train_batch_size
            return torch.cat([self.module(inputs.rows(slice(at, at + size))) for at in range(0, rows, size)])

    def fit(self, inputs: CriticInputs, returns: Tensor, *, generations: int) -> dict[str, float]:
        """Fit on one generation.

        Args:
            inputs: of this process's responses.
            returns: (rows, tokens), reward units.
            generations: how many the whole run has, for the schedule.

        Returns:
            Numbers to log, by name: explained variance *before* the fit, loss before and after it, gradient norm,
            learning rate, and how many updates were skipped.
        """
        assert self.module is not None, "inputs() builds the module"
        self._schedule(generations)
        rate = self.scheduler.get_last_lr()[0]
        report = fit_critic(
            self.module,
            self.optimizer,
            inputs,
            returns,
            epochs=self.config.epochs,
            gradient_clip=self.config.gradient_clip,
            micro_batch_size=self.args.per_device_train_batch_size,
            all_reduce=self.processes.all_reduce,
        )
        if report.steps:  # a generation without a trainable token teaches nothing and uses no part of the schedule
            self.scheduler.step()
        return {
            "comppo/explained_variance": report.explained_variance,
            "comppo/critic_loss": report.loss_before,
            "comppo/critic_loss_after": report.loss_after,
            "comppo/critic_grad_norm": report.grad_norm,
            "comppo/critic_learning_rate": rate,
            "comppo/critic_skipped": float(report.skipped),
        }

    def _schedule(self, generations: int) -> None:
        # The length of the run is known only once training has begun
        if self.scheduler is not None:
            return
        from transformers import get_scheduler

        self.scheduler = get_scheduler(
            self.args.critic_lr_scheduler_type, self.optimizer, num_warmup_steps=0, num_training_steps=generations
        )
        if self._saved is not None and self._saved[1]["scheduler"] is not None:
            self.scheduler.load_state_dict(self._saved[1]["scheduler"])
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def description(self) -> dict[str, Any]:
        """What a checkpoint must agree with: the kind of critic and its settings, but those of its learning."""
        settings = asdict(self.config)
        free = ("learning_rate", "weight_decay", "epochs", "gradient_clip", "max_parameter_share", "seed")
        kept = {name: value for name, value in settings.items() if name not in free}
        return {"critic": self.args.critic, **kept, "features": list(self.config.features)}

    def weights(self) -> dict[str, Tensor]:
        """The module's state, to be saved; that of a restored run before its first generation included."""
        if self.module is not None:
            return self.module.state_dict()
        return self._saved[0] if self._saved is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, schedule and description; the weights are saved as safetensors."""
        if self.module is None and self._saved is not None:
            return self._saved[1]
        return {
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "description": self.description(),
        }

    def restore(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Take what `weights` and `state_dict` gave; strictly, as soon as the module exists.

        Args:
            weights: the module's state.
            state: from `state_dict`.

        Raises:
            ConfigError: the checkpoint's critic was built with other settings; names them.
        """
        mine, theirs = self.description(), state["description"]
        differing = sorted(name for name in mine if mine[name] != theirs.get(name))
        if differing:
            listed = ", ".join(f"{name}: {theirs.get(name)!r} there, {mine[name]!r} here" for name in differing)
            raise ConfigError(
                f"the checkpoint's critic does not fit these settings ({listed}): resume with the critic_* and "
                "reward_* fields that the run was started with."
            )
        if not weights:
            return
        self._saved = (weights, state)
        self.scheduler = None
        if self.module is not None:
            self._install(self.module)
