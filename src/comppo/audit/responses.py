"""Responses to a task's prompts: sampled, scored, and laid out as tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comppo.audit.sampling import rows_that_fit, sample_continuations
from comppo.evaluation.greedy import Response, Scoring, evaluating, score_responses


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A model with what is needed to sample from it and to score what it says."""

    model: Any
    tokenizer: Any
    scoring: Scoring
    eos_ids: tuple[int, ...]
    pad_id: int
    max_new_tokens: int
    temperature: float

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, functions: Sequence[Any], *, max_new_tokens: int, temperature: float
    ) -> "Policy":
        """With the ids that end a response by the model's own generation settings, or else the tokenizer's."""
        own = getattr(model, "generation_config", None)
        eos = own.eos_token_id if own is not None and own.eos_token_id is not None else tokenizer.eos_token_id
        ids = tuple(eos) if isinstance(eos, list) else (eos,)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ids[0]
        return cls(
            model=model,
            tokenizer=tokenizer,
            scoring=Scoring(functions=functions),
            eos_ids=ids,
            pad_id=pad,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt: a string, or a list of messages."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def score(self, rows: Sequence[Mapping[str, Any]], responses: Sequence[Sequence[int]]) -> list[float | None]:
        """Rewards of whole responses, as training would give them."""
        made = [
            Response(
                text=self.tokenizer.decode(ids, skip_special_tokens=True),
                ids=list(ids),
                ended=bool(ids) and ids[-1] in self.eos_ids,
            )
            for ids in responses
        ]
        return score_responses([dict(row) for row in rows], made, self.scoring)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Groups of responses, padded: prompts on the left, responses on the right."""

    rows: list[dict[str, Any]]
    """The task's row of each response."""
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    input_ids: Int[Tensor, "rows positions"]
    attention_mask: Bool[Tensor, "rows positions"]
    mask: Bool[Tensor, "rows tokens"]
    rewards: Float[Tensor, " rows"]
    """Reward units; NaN where unscorable."""
    group_size: int

    @property
    def completion_ids(self) -> Int[Tensor, "rows tokens"]:
        """The responses' part of `input_ids`."""
        return self.input_ids[:, -self.mask.shape[1] :]

    @property
    def prompts(self) -> Int[Tensor, " rows"]:
        """Number of each response's prompt."""
        return torch.arange(len(self.rows)) // self.group_size

    @property
    def scorable(self) -> Bool[Tensor, " rows"]:
        """False where no reward function could score the response."""
        return ~self.rewards.isnan()


def sample_batch(policy: Policy, rows: Sequence[Mapping[str, Any]], group_size: int, seed: int) -> Batch:
    """Sample and score `group_size` responses to each row's prompt.

    Args:
        policy: what samples and scores.
        rows: rows of a task, at least one.
        group_size: responses per prompt, at least 1.
        seed: of sampling.

    Returns:
        `group_size` neighbouring responses for each row, on the CPU.
    """
    prompts = [policy.encode(row["prompt"]) for row in rows]
    fits = rows_that_fit(policy.model, max(map(len, prompts)) + policy.max_new_tokens)
    size = max(1, fits // group_size)
    generator = torch.Generator(policy.model.device).manual_seed(seed)
    responses: list[list[int]] = []
    with evaluating(policy.model):
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            responses += sample_continuations(
                policy.model,
                part,
                count=group_size,
                limits=[policy.max_new_tokens] * len(part),
                eos_ids=policy.eos_ids,
                pad_id=policy.pad_id,
                temperature=policy.temperature,
                generator=generator,
            )
    repeated = [dict(row) for row in rows for _ in range(group_size)]
    rewards = policy.score(repeated, responses)
    return _laid_out(
        repeated, [ids for ids in prompts for _ in range(group_size)], responses, rewards, policy.pad_id, group_size
    )


def _laid_out(
    rows: list[dict[str, Any]],
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: Sequence[float | None],
    pad_id: int,
    group_size: int,
) -> Batch:
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.full((len(rows), before + after), pad_id)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        there = slice(before - len(prompt), before + len(response))
        ids[row, there] = torch.tensor([*prompt, *response])
        real[row, there] = True
    return Batch(
        rows=rows,
        prompt_ids=prompts,
        response_ids=responses,
        input_ids=ids,
        attention_mask=real,
        mask=real[:, before:],
        rewards=torch.tensor([math.nan if r is None else float(r) for r in rewards]),
        group_size=group_size,
    )
