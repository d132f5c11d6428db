"""Responses sampled from a model, read, rewarded and given credit by several operators, as an inspection.

Needs Transformers, but no trainer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comppo.computation import DEFAULT_LAYERS, DEFAULT_STATISTIC, Computation, read_computation
from comppo.computation.reading import of_attention
from comppo.computation.summaries import name_of
from comppo.errors import ConfigError, UnreadableModelError
from comppo.evaluation.greedy import Response, Scoring, evaluating, generate_responses, score_responses
from comppo.inspect.sampled_credit import operators_of
from comppo.inspect.tensors import inspect_tensors
from comppo.inspect.token_text import token_texts
from comppo.inspect.top_keys import top_keys
from comppo.report.inspection import Inspection
from comppo.trainers.pipeline import PipelineConfig, Processes, Rollout, baselines

Critic = Callable[["Batch", Computation, Tensor], Tensor]
"""(batch, computation, baselines (rows,)) to values (rows, tokens), reward units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to sample and how to give credit."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Gate, lambda and gamma; its operator and control are not looked at."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `read_computation`."""
    reward_funcs: Sequence[Callable[..., Any]] = ()
    """In TRL's convention; none: no response is scored."""
    reward_weights: Sequence[float] | None = None
    """One per function; None means 1."""
    critic: Critic | None = None
    """None: the mean reward of the group's other responses, the same at every token."""
    responses: int = 4
    """Per prompt."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    """Of the policy that is read; responses are sampled at 1."""
    keys: int = 5
    """Keys per token; 0 for none."""
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("responses", 1), ("max_new_tokens", 1), ("keys", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)!r}.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Sampled sequences, prompts padded on the left and responses on the right."""

    prompt_ids: list[list[int]]
    """Per row, without padding."""
    responses: list[Response]
    input_ids: Tensor
    """(rows, positions)."""
    attention_mask: Tensor
    """(rows, positions), bool."""
    tokens: int
    """Columns of the responses."""

    @property
    def mask(self) -> Tensor:
        """(rows, tokens), true at response tokens."""
        return self.attention_mask[:, -self.tokens :]


def sample_and_inspect(
    model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], plan: Plan, *, title: str, notes: Sequence[str] = ()
) -> Inspection:
    """Sample responses to prompts and show them under every operator that fits.

    Args:
        model: a causal language model of Transformers with `generate`; its mode and torch's random state are restored.
        tokenizer: its tokenizer.
        rows: at least one, with a `prompt` (text, or messages) and the columns that the reward functions need.
        plan: what to sample and how to give credit.
        title: heading of the page.
        notes: paragraphs under it.

    Returns:
        For `comppo.inspect.write_page`.

    Raises:
        ConfigError: no rows, or a setting is out of range.
        UnreadableModelError: the model's computation cannot be read.
        RewardError: a reward function returned something that is no reward.
    """
    if not rows:
        raise ConfigError("there are no prompts: pass at least one.")
    repeated = [dict(row) for row in rows for _ in range(plan.responses)]
    with evaluating(model):
        torch.manual_seed(plan.seed)
        batch = _sample(model, tokenizer, rows, plan)
        computation = read_computation(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.tokens,
            micro_batch_size=plan.responses,
            temperature=plan.temperature,
            **plan.reading,
        )
        keys, missing = _keys(model, batch, computation.layers, plan.keys)
    rewards = _rewards(repeated, batch, plan)
    rollout = _rollout(batch, rewards, plan)
    values = _values(batch, computation, rollout, rewards, plan)
    operators = operators_of(rollout, computation, values, plan.pipeline, scored=rewards is not None)
    series = {
        "statistic": computation.statistic,
        "logp": computation.logps,
        "entropy": computation.entropies,
    }
    if computation.layers:
        series["sink_mass"] = computation.sink_mass
    if rewards is not None:
        series["value"] = values
    return inspect_tensors(
        responses=[token_texts(tokenizer, response.ids) for response in batch.responses],
        operators=operators,
        tokenizer=tokenizer,
        completion_mask=batch.mask,
        mask=None,
        prompts=[token_texts(tokenizer, ids) for ids in batch.prompt_ids],
        rewards=rewards,
        num_generations=plan.responses,
        series={key: (key, tensor) for key, tensor in series.items()},
        quantities=[],
        top_keys=keys,
        labels=None,
        title=title,
        notes=[*notes, *_notes(rewards is not None, plan), *missing],
    )


def _sample(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]], plan: Plan) -> Batch:
    """All responses to one prompt are sampled together, so none is padded."""
    prompt_ids, responses = [], []
    for row in rows:
        prompt_ids += [_encoded(tokenizer, row["prompt"], plan)] * plan.responses
        responses += generate_responses(
            model,
            tokenizer,
            [row["prompt"]] * plan.responses,
            max_new_tokens=plan.max_new_tokens,
            do_sample=True,
            chat_template_kwargs=plan.chat_template_kwargs,
        )
    before, tokens = max(map(len, prompt_ids)), max(len(response.ids) for response in responses)
    input_ids = torch.zeros(len(responses), before + tokens, dtype=torch.long)
    real = torch.zeros_like(input_ids, dtype=torch.bool)
    for index, (prompt, response) in enumerate(zip(prompt_ids, responses, strict=True)):
        start, stop = before - len(prompt), before + len(response.ids)
        input_ids[index, start:stop] = torch.tensor([*prompt, *response.ids])
        real[index, start:stop] = True
    return Batch(
        prompt_ids=prompt_ids,
        responses=responses,
        input_ids=input_ids.to(model.device),
        attention_mask=real.to(model.device),
        tokens=tokens,
    )


def _encoded(tokenizer: Any, prompt: Any, plan: Plan) -> list[int]:
    """As `generate_responses` encodes it."""
    conversational = not isinstance(prompt, str)
    if conversational:
        options = {**(plan.chat_template_kwargs or {}), "tokenize": False, "add_generation_prompt": True}
        prompt = tokenizer.apply_chat_template(prompt, **options)
    ids = tokenizer(prompt, add_special_tokens=not conversational)["input_ids"]
    if not ids:
        raise ConfigError("a prompt has no tokens: give each at least one.")
    return list(ids)


def _keys(
    model: Any, batch: Batch, layers: Sequence[int], count: int
) -> tuple[list[list[list[tuple[int, float]]]] | None, list[str]]:
    """Top keys of each response token, read at the position before it; or a note that says why there are none."""
    if not count or not layers:
        return None, []
    found = []
    for prompt, response in zip(batch.prompt_ids, batch.responses, strict=True):
        ids = torch.tensor([*prompt, *response.ids], device=batch.input_ids.device)
        emitting = slice(len(prompt) - 1, len(ids) - 1)
        try:
            found.append(top_keys(model, ids, layers=layers, positions=emitting, count=count))
        except UnreadableModelError as error:
            return None, [f"Which keys a token looks at is not shown: {error}"]
    return found, []


def _rewards(rows: Sequence[dict[str, Any]], batch: Batch, plan: Plan) -> list[float | None] | None:
    if not plan.reward_funcs:
        return None
    return score_responses(rows, batch.responses, Scoring(functions=plan.reward_funcs, weights=plan.reward_weights))


def _rollout(batch: Batch, rewards: list[float | None] | None, plan: Plan) -> Rollout:
    """Without rewards every response is taken to earn 1 at its end."""
    outcome = [1.0] * len(batch.responses) if rewards is None else rewards
    device = batch.input_ids.device
    return Rollout(
        completion_ids=batch.input_ids[:, -batch.tokens :],
        mask=batch.mask,
        response_rewards=torch.tensor([reward or 0.0 for reward in outcome], device=device),
        scorable=torch.tensor([reward is not None for reward in outcome], device=device),
        num_generations=plan.responses,
        index=0,
    )


def _values(
    batch: Batch, computation: Computation, rollout: Rollout, rewards: list[float | None] | None, plan: Plan
) -> Tensor:
    if rewards is None:
        return torch.zeros_like(computation.logps)
    known = [reward for reward in rewards if reward is not None]
    mean = sum(known) / len(known) if known else 0.0
    baseline = baselines(rollout, default=mean if plan.critic is None else 0.0, processes=Processes())
    if plan.critic is not None:
        return plan.critic(batch, computation, baseline)
    return baseline[:, None].expand_as(computation.logps).contiguous()


def _notes(scored: bool, plan: Plan) -> list[str]:
    statistic, layers = plan.reading.get("statistic", DEFAULT_STATISTIC), plan.reading.get("layers", DEFAULT_LAYERS)
    named = name_of(statistic) if of_attention(statistic) else statistic
    read = f"The statistic is {named}, layers: {layers}. " if isinstance(named, str) else ""
    gates = f"{read}Gates are standardised over the responses on this page, as in training over those of a batch."
    if not scored:
        return [
            gates,
            "No reward function was given, so every operator shows what it makes of a reward of 1 at the end of the "
            "response, with V = 0: how far credit reaches, and not what was right.",
        ]
    if plan.critic is None:
        return [
            gates,
            "There is no critic: V is the mean reward of the group's other responses (of all, where there is no "
            "other), the same at every token, which is where a critic starts.",
        ]
    return [gates]
