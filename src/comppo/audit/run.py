"""A whole audit of a model on a task: responses, true advantages, operators, fidelity, gradients and proxies."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comppo.audit.config import AuditConfig
from comppo.audit.continuations import PrefixRewards, Progress, value_prefixes
from comppo.audit.controls import reversed_in_time, shuffled_in_time
from comppo.audit.fidelity import Advantages, credit_fidelity
from comppo.audit.gradient import gradient_cosines
from comppo.audit.operators import (
    ALWAYS,
    GATE_CONTROLS,
    OF_CONTINUATIONS,
    WHITENED,
    FittedCritic,
    Rollouts,
    check_operators,
    critic_credit,
    fit_operator_critic,
    group_credit,
)
from comppo.audit.proxy_reading import read_proxies
from comppo.audit.responses import Batch, Policy, sample_batch
from comppo.audit.truth import TrueAdvantages, true_advantages
from comppo.computation import read_computation
from comppo.critic import explained_variance
from comppo.errors import ConfigError, EvidenceError
from comppo.update.whiten import masked_whiten

READ_ROWS = 64
"""Responses per forward when the computation is read."""


def run_audit(
    config: AuditConfig,
    *,
    records: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Audit the operators of `config` on one model and task.

    Args:
        config: what to do.
        records: file of continuations, which a second run goes on from.
        progress: told of prefixes done and in all.
        say: told what begins.

    Returns:
        JSON types: settings, fidelity and gradients by operator (best fidelity first), critics, proxies, cost.

    Raises:
        ConfigError: a setting is wrong, the records are of something else, or the task has too few prompts.
        TaskError: the task is unknown.
        EvidenceError: the budget left no two prompts with all their states valued.
    """
    seconds: dict[str, float] = {}
    policy, prompts, others, label = _load(config)
    say("sampling responses")
    with _timed(seconds, "sampling"):
        audited = _rollouts(policy, sample_batch(policy, prompts, config.group_size, config.seed), config)
    with _timed(seconds, "continuations"):
        valued = _values(policy, audited.batch, config, label, records, progress)
    truth = true_advantages(valued.positions, valued.rewards, audited.batch.rewards, audited.batch.mask.sum(1).long())
    prompts_left = torch.unique(audited.batch.prompts[truth.mask.any(1)])
    if len(prompts_left) < 2:
        raise EvidenceError(
            f"the budget of {config.budget_minutes} minutes left {len(prompts_left)} prompts with all their states "
            f"valued, {valued.left} prefixes missing: go on with the same --records, or raise the budget."
        )
    names = check_operators(config.operators)
    critics: dict[str, FittedCritic] = {}
    if any(name in GATE_CONTROLS for name in names):
        say("fitting critics")
        with _timed(seconds, "critics"):
            critics = _critics(policy, others, names, config)
    say("comparing operators")
    with _timed(seconds, "fidelity"):
        credits = {name: _credit(name, audited, audited.batch.rewards, critics, truth, config) for name in names}
        report = credit_fidelity(
            credits,
            truth.first_half,
            truth.second_half,
            truth.mask,
            prompts=audited.batch.prompts,
            segments=truth.segments if config.every > 1 else None,
            standard_errors=truth.standard_errors,
            decisive=_decisive(config.task, audited.batch),
            sharpening=group_credit(ALWAYS, audited, audited.batch.rewards),
            drift=_drift(names, audited, critics, truth, config),
            reference="grpo" if "grpo" in names else None,
            bootstrap=config.bootstrap,
            seed=config.seed,
        ).as_json()
    if config.gradients:
        say("comparing gradients")
        with _timed(seconds, "gradients"):
            _add_gradients(report["operators"], policy, audited.batch, credits, truth, config)
    result: dict[str, Any] = {"settings": {**asdict(config), "task_params": dict(config.task_params)}, **report}
    result["mean_reward"] = float(audited.batch.rewards.nanmean())
    result["mean_length"] = float(audited.batch.mask.sum(1).double().mean())
    result["critics"] = {name: _critic_quality(critic, audited) for name, critic in critics.items()}
    if config.proxies:
        say("testing statistics as proxies")
        with _timed(seconds, "proxies"):
            result["proxies"] = read_proxies(policy.model, audited, truth, config.every, config.seed, READ_ROWS)
    result["prefixes"] = {"valued": valued.done, "left": valued.left, "sampled_tokens": valued.sampled_tokens}
    result["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    return result


class _timed:
    """Adds the time of a block to a dictionary."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = time.monotonic() - self.started


def _load(config: AuditConfig) -> tuple[Policy, list[dict[str, Any]], list[dict[str, Any]], str]:
    """Policy, rows that are audited, rows that critics are fitted on, and the label of the records."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from comppo.tasks.base_models import resolve_model
    from comppo.tasks.registry import load_task

    task = load_task(config.task, seed=config.seed, params=config.task_params)
    mine = config.responses // config.group_size
    theirs = config.critic_responses // config.group_size
    train = task.train_dataset
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).tolist()
    if task.eval_dataset is not None and len(task.eval_dataset) >= mine:
        chosen = [task.eval_dataset[index] for index in range(mine)]
    else:
        chosen, order = [train[index] for index in order[:mine]], order[mine:]
    if len(chosen) < mine or not order:
        raise ConfigError(
            f"task {config.task!r} has too few prompts for {mine} audited ones and others for critics: lower responses."
        )
    folder = resolve_model(config.model)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={config.model!r} cannot be loaded: {error}. Check the name, or give a folder."
        ) from error
    policy = Policy.of(
        model,
        tokenizer,
        task.reward_funcs,
        max_new_tokens=config.max_new_tokens or task.max_completion_length or 256,
        temperature=config.temperature,
    )
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return policy, chosen, [train[index] for index in order[:theirs]], f"{config.task} {digest.hexdigest()}"


def _rollouts(policy: Policy, batch: Batch, config: AuditConfig) -> Rollouts:
    computation = read_computation(
        policy.model,
        batch.input_ids,
        batch.attention_mask,
        batch.mask.shape[1],
        temperature=config.temperature,
        micro_batch_size=READ_ROWS,
    )
    return Rollouts(batch=batch, computation=computation, seed=config.seed)


def _values(
    policy: Policy,
    batch: Batch,
    config: AuditConfig,
    label: str,
    records: Path | None,
    progress: Progress | None,
) -> PrefixRewards:
    return value_prefixes(
        policy.model,
        batch.prompt_ids,
        batch.response_ids,
        lambda owners, responses: policy.score([batch.rows[owner] for owner in owners], responses),
        config.continuation_config(policy.max_new_tokens),
        eos_ids=policy.eos_ids,
        pad_id=policy.pad_id,
        label=label,
        records=records,
        progress=progress,
    )


def _critics(
    policy: Policy, rows: Sequence[Mapping[str, Any]], names: Sequence[str], config: AuditConfig
) -> dict[str, FittedCritic]:
    rollouts = _rollouts(policy, sample_batch(policy, rows, config.group_size, config.seed + 1), config)
    return {
        name: fit_operator_critic(name, rollouts, lam=config.lam, max_length=policy.max_new_tokens, seed=config.seed)
        for name in names
        if name in GATE_CONTROLS
    }


def _critic_quality(fitted: FittedCritic, rollouts: Rollouts) -> dict[str, float]:
    """How much of the outcomes of the audited responses a critic explains, which it was not fitted on."""
    rewards, mask = rollouts.batch.rewards, rollouts.batch.mask & rollouts.batch.scorable[:, None]
    targets = torch.where(mask, rewards[:, None].expand(mask.shape), 0.0)
    return {"explained_variance": explained_variance(fitted.values(rollouts, rewards), targets, mask)}


def _credit(
    name: str,
    rollouts: Rollouts,
    rewards: Tensor,
    critics: Mapping[str, FittedCritic],
    truth: TrueAdvantages,
    config: AuditConfig,
) -> Advantages:
    if name in GATE_CONTROLS:
        values = critics[name].values(rollouts, rewards)
        return critic_credit(name, rollouts, rewards, values, lam=config.lam).advantages
    if name not in OF_CONTINUATIONS:
        return group_credit(name, rollouts, rewards)
    halves = (truth.first_half, truth.second_half)
    if name == "reversed":
        return reversed_in_time(halves[0], truth.mask), reversed_in_time(halves[1], truth.mask)
    if name == "shuffled":
        first, second = (
            shuffled_in_time(half, truth.mask, torch.Generator().manual_seed(config.seed)) for half in halves
        )
        return first, second
    return halves


def _drift(
    names: Sequence[str],
    rollouts: Rollouts,
    critics: Mapping[str, FittedCritic],
    truth: TrueAdvantages,
    config: AuditConfig,
) -> dict[str, Tensor]:
    """What operators give when rewards are shuffled between all responses; their critics stay as they are."""
    generator, scorable = torch.Generator().manual_seed(config.seed), rollouts.batch.scorable
    found: dict[str, list[Tensor]] = {}
    for _ in range(config.shuffles):
        rewards = rollouts.batch.rewards.clone()
        known = rewards[scorable]
        rewards[scorable] = known[torch.randperm(len(known), generator=generator)]
        for name in names:
            if name not in OF_CONTINUATIONS:
                credit = _credit(name, rollouts, rewards, critics, truth, config)
                assert isinstance(credit, Tensor), "only credit made of continuations is a pair"
                found.setdefault(name, []).append(credit)
    return {name: torch.stack(shuffles) for name, shuffles in found.items()}


def _decisive(task: str, batch: Batch) -> Tensor | None:
    """Tokens that decide the reward, on the task where they are known."""
    if task != "chain":
        return None
    from comppo.tasks.chain_steps import parse_prompt

    decisive = torch.zeros_like(batch.mask)
    for row, content in enumerate(batch.rows):
        places = [p for p in parse_prompt(content["prompt"]).decisive_positions() if p < batch.mask.shape[1]]
        decisive[row, places] = True
    return decisive & batch.mask


def _add_gradients(
    rows: list[dict[str, Any]],
    policy: Policy,
    batch: Batch,
    credits: Mapping[str, Advantages],
    truth: TrueAdvantages,
    config: AuditConfig,
) -> None:
    """Write the cosines into the rows of the operators."""
    # A segment is one action: each of its tokens carries the whole credit
    segments = truth.segments[..., None] == torch.arange(int(truth.segments.max()) + 1)
    sizes = (segments.double() @ segments.double().sum(1)[..., None]).squeeze(-1)
    given: dict[str, Advantages] = {}
    for name, credit in credits.items():
        if isinstance(credit, tuple):
            given[name] = (credit[0] * sizes, credit[1] * sizes)
        else:
            given[name] = masked_whiten(credit, truth.mask) if name in WHITENED else credit
    kept = truth.mask.any(1)
    found = gradient_cosines(
        policy.model,
        {n: (c[0][kept], c[1][kept]) if isinstance(c, tuple) else c[kept] for n, c in given.items()},
        (truth.first_half * sizes)[kept],
        (truth.second_half * sizes)[kept],
        truth.mask[kept],
        input_ids=batch.input_ids[kept],
        attention_mask=batch.attention_mask[kept],
        prompts=batch.prompts[kept],
        temperature=config.temperature,
        bootstrap=config.bootstrap,
        seed=config.seed,
    )
    for row in rows:
        cosine = asdict(found[row["operator"]])
        row |= {name: value if value == value else None for name, value in cosine.items()}
