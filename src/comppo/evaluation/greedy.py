"""Greedy evaluation: the most probable response to each held-out prompt, scored by a reward function."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from comppo.errors import ConfigError
from comppo.evidence.verifiers import checked_scores, is_async, reward_name


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyResult:
    """What an evaluation found."""

    accuracy: float
    """Mean reward over the scored responses (a share, for 0/1 rewards), reward units; NaN if none could be scored."""
    count: int
    """Scored responses."""
    mean_length: float
    """Tokens of a response, end of text included, over all responses."""
    truncated: int
    """Responses that did not end within `max_new_tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One generated response."""

    text: str
    """Without special tokens."""
    ids: list[int]
    """Token ids, end of text included where the response ended."""
    ended: bool
    """False where it was cut off."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards every module is in its earlier mode and torch's CPU and CUDA
    random states are as before."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def generate_responses(
    model: Any, tokenizer: Any, prompts: Sequence[Any], *, max_new_tokens: int, do_sample: bool = False
) -> list[Response]:
    """One response to each prompt in one batch, padded on the left; sampling is at temperature 1 without cuts.

    Args:
        model: a causal model with `generate`.
        tokenizer: its tokenizer.
        prompts: at least one; strings, or lists of messages, for which the tokenizer needs a chat template.
        max_new_tokens: most tokens of a response.
        do_sample: sample (uses torch's random state) instead of taking the most probable token.

    Returns:
        One response per prompt, in the order of the prompts; its ids stop after the first end of text.
    """
    from transformers import GenerationConfig

    conversational = not isinstance(prompts[0], str)
    texts = list(prompts)
    if conversational:
        texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not conversational
    ).to(model.device)
    own = getattr(model, "generation_config", None)
    eos = own.eos_token_id if own is not None and own.eos_token_id is not None else tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # Cuts are only named when sampling: Transformers warns about them otherwise.
    cuts: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=do_sample, pad_token_id=pad, eos_token_id=eos, **cuts
    )
    output = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=config
    )
    ends = set(eos if isinstance(eos, list) else [eos])
    responses = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        end = next((index for index, token in enumerate(row) if token in ends), None)
        ids = row if end is None else row[: end + 1]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        responses.append(Response(text=text, ids=ids, ended=end is not None))
    return responses


def greedy_accuracy(
    model: Any,
    tokenizer: Any,
    dataset: Iterable[dict[str, Any]],
    reward_func: Callable[..., Any],
    *,
    max_new_tokens: int,
    batch_size: int = 256,
) -> GreedyResult:
    """Mean reward of the most probable responses. Deterministic; uses no random numbers.

    Args:
        model: a causal model with `generate`; its train or evaluation mode is restored.
        tokenizer: its tokenizer; padding is on the left whatever its setting.
        dataset: rows with a `prompt` and the columns that the reward function needs.
        reward_func: plain function in TRL's convention.
        max_new_tokens: most tokens of a response, at least 1.
        batch_size: prompts at a time, at least 1.

    Returns:
        Mean reward (reward units) over the scored responses, their count, and mean length (tokens) and number of
        unfinished ones over all responses.

    Raises:
        ConfigError: no rows, a number out of range, or an async reward function.
        RewardError: a wrong number of rewards, or one that is no number.
    """
    rows = list(dataset)
    if not rows:
        raise ConfigError("greedy_accuracy: the data set has no rows: pass at least one.")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"greedy_accuracy: {name} must be at least 1, got {value!r}.")
    if is_async(reward_func):
        raise ConfigError(f"greedy_accuracy: reward_func {reward_name(reward_func)!r} is async: pass a plain function.")
    scores: list[float | None] = []
    responses: list[Response] = []
    with evaluating(model):
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            prompts = [row["prompt"] for row in part]
            new = generate_responses(model, tokenizer, prompts, max_new_tokens=max_new_tokens)
            scores += score_responses(part, new, reward_func)
            responses += new
    scored = [score for score in scores if score is not None and not math.isnan(score)]
    return GreedyResult(
        accuracy=sum(scored) / len(scored) if scored else math.nan,
        count=len(scored),
        mean_length=sum(len(response.ids) for response in responses) / len(responses),
        truncated=sum(not response.ended for response in responses),
    )


def score_responses(
    rows: Sequence[dict[str, Any]], responses: Sequence[Response], reward_func: Callable[..., Any]
) -> list[float | None]:
    """Rewards of one response to each row, called and checked as in training."""
    prompts = [row["prompt"] for row in rows]
    texts: list[Any] = [response.text for response in responses]
    if not isinstance(prompts[0], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")}
    scores = reward_func(
        prompts=prompts, completions=texts, completion_ids=[response.ids for response in responses], **columns
    )
    return checked_scores(scores, len(rows), reward_name(reward_func))
