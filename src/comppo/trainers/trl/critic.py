"""The critic beside TRL's trainer: outside `self.model`, so that saving, PEFT, sharding and vLLM never see it."""

from collections.abc import Callable
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
from comppo.trainers.pipeline import Processes
from comppo.trainers.trl.config import CompPOConfig


class CriticRunner:
    """A critic with its optimiser and schedule, fitted once per generation.

    Args:
        actor: the unwrapped policy.
        args: the critic's settings.
        processes: collective operations.
        probe: gives a computation of one token, from which the widths of the features are known.
    """

    def __init__(
        self, actor: Any, args: CompPOConfig, processes: Processes, *, probe: Callable[[], Computation]
    ) -> None:
        self.args = args
        self.config = args.critic_config()
        self.processes = processes
        self.module: Critic
        if args.critic == "tac":
            computation = probe()
            widths = feature_widths(
                self.config.features,
                hidden_width=computation.hidden.shape[-1],
                routing_channels=computation.routing.shape[2:].numel(),
            )
            self.module = TransportAlignedCritic(self.config, widths)
            actor_parameters = sum(p.numel() for p in actor.parameters())
            check_parameter_share(self.module, actor_parameters, self.config.max_parameter_share)
        else:
            self.module = StandardCritic(actor, reward_min=self.config.reward_min, reward_max=self.config.reward_max)
        self.module.to(next(actor.parameters()).device)
        self.optimizer = critic_optimizer(self.module, self.config)
        self.scheduler: Any = None
        self._saved_schedule: dict[str, Any] | None = None

    @property
    def mean_reward(self) -> float:
        """Mean of the rewards seen in earlier generations; 0 before the first."""
        return float(self.module.mean_reward)

    def inputs(
        self, computation: Computation, *, mask: Tensor, baseline: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> CriticInputs:
        """What this critic looks at: features of the actor's computation, or the tokens themselves."""
        if self.args.critic != "tac":
            return CriticInputs(mask=mask, baseline=baseline, input_ids=input_ids, attention_mask=attention_mask)
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
        self.module.observe_rewards(self.processes.gather(rewards)[self.processes.gather(scorable)])

    def values(self, inputs: CriticInputs) -> Tensor:
        """Values of a rollout that the critic has not been fitted on, (rows, tokens)."""
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
        if self._saved_schedule is not None:
            self.scheduler.load_state_dict(self._saved_schedule)
            for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Optimiser and schedule; the module's weights are saved as safetensors."""
        schedule = self.scheduler.state_dict() if self.scheduler is not None else self._saved_schedule
        return {"optimizer": self.optimizer.state_dict(), "scheduler": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._saved_schedule = state["scheduler"]
        self.scheduler = None
