"""Greedy evaluation: the most probable response to each held-out prompt, scored by the reward functions."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from comppo.errors import ConfigError
from comppo.evidence.verifiers import checked_scores, is_async, reward_columns, reward_name, trainer_arguments


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
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Response]:
    """One response to each prompt in one batch, padded on the left; sampling is at temperature 1 without cuts.

    Args:
        model: a causal model with `generate`.
        tokenizer: its tokenizer.
        prompts: at least one; strings, or lists of messages, for which the tokenizer needs a chat template.
        max_new_tokens: most tokens of a response.
        do_sample: sample (uses torch's random state) instead of taking the most probable token.
        chat_template_kwargs: further arguments of the chat template, for lists of messages.

    Returns:
        One response per prompt, in the order of the prompts; its ids stop after the first end of text.
    """
    from transformers import GenerationConfig

    conversational = not isinstance(prompts[0], str)
    texts = list(prompts)
    if conversational:
        options = {**(chat_template_kwargs or {}), "tokenize": False, "add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(prompt, **options) for prompt in prompts]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How responses are scored: by the weighted sum of reward functions, as TRL does it."""

    functions: Sequence[Callable[..., Any]]
    """In TRL's convention, plain or async."""
    weights: Sequence[float] | None = None
    """One per function; None means 1 for each."""
    state: Any = None
    """What the functions get as `trainer_state`; None means a new `TrainerState`, at step 0."""
    loop: asyncio.AbstractEventLoop | None = None
    """Runs async functions, in a thread of its own, as TRL's does; None means a new loop per batch."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ConfigError("greedy evaluation: reward_funcs is empty: pass at least one reward function.")
        for function in self.functions:
            if isinstance(function, torch.nn.Module) or not callable(function):
                raise ConfigError(
                    f"greedy evaluation: {reward_name(function)!r} is a reward model or a name: pass functions, or "
                    "leave held-out evaluation out (eval_prompts: 0)."
                )
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"reward_weights={list(self.weights)!r} are {len(self.weights)}, but there are {len(self.functions)} "
                "reward functions: pass one for each."
            )


def greedy_accuracy(
    model: Any,
    tokenizer: Any,
    dataset: Iterable[dict[str, Any]],
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    max_new_tokens: int,
    batch_size: int = 256,
    reward_weights: Sequence[float] | None = None,
    trainer_state: Any = None,
    async_loop: asyncio.AbstractEventLoop | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> GreedyResult:
    """Mean reward of the most probable responses. Deterministic; uses no random numbers.

    The reward of a response is what TRL trains on: the weighted sum over the reward functions, leaving out those that
    cannot score it; a response that none can score counts in nothing but the lengths. The functions get TRL's further
    arguments too: `trainer_state`, and `log_extra` and `log_metric`, which log nothing here.

    Args:
        model: a causal model with `generate`; its train or evaluation mode is restored.
        tokenizer: its tokenizer; padding is on the left whatever its setting.
        dataset: rows with a `prompt` and the columns that the reward functions need.
        reward_funcs: one function in TRL's convention or several, plain or async.
        max_new_tokens: most tokens of a response, at least 1.
        batch_size: prompts at a time, at least 1.
        reward_weights: one per function, unitless; None means 1 for each.
        trainer_state: what the functions get; None means a new `TrainerState`, at step 0.
        async_loop: a running loop in another thread for async functions; None means a new one per batch.
        chat_template_kwargs: further arguments of the chat template.

    Returns:
        Mean reward (reward units) over the scored responses, their count, and mean length (tokens) and number of
        unfinished ones over all responses.

    Raises:
        ConfigError: no rows, no functions, a reward model, a number out of range, or not one weight per function.
        RewardError: a wrong number of rewards, or one that is no number.
    """
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    scoring = Scoring(functions=functions, weights=reward_weights, state=trainer_state, loop=async_loop)
    rows = list(dataset)
    if not rows:
        raise ConfigError("greedy_accuracy: the data set has no rows: pass at least one.")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"greedy_accuracy: {name} must be at least 1, got {value!r}.")
    scores: list[float | None] = []
    responses: list[Response] = []
    with evaluating(model):
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            new = generate_responses(
                model,
                tokenizer,
                [row["prompt"] for row in part],
                max_new_tokens=max_new_tokens,
                chat_template_kwargs=chat_template_kwargs,
            )
            scores += score_responses(part, new, scoring)
            responses += new
    scored = [score for score in scores if score is not None]
    return GreedyResult(
        accuracy=sum(scored) / len(scored) if scored else math.nan,
        count=len(scored),
        mean_length=sum(len(response.ids) for response in responses) / len(responses),
        truncated=sum(not response.ended for response in responses),
    )


def score_responses(
    rows: Sequence[dict[str, Any]], responses: Sequence[Response], scoring: Scoring
) -> list[float | None]:
    """Weighted rewards of one response to each row, called, checked and summed as in training; None: unscorable."""
    prompts = [row["prompt"] for row in rows]
    texts: list[Any] = [response.text for response in responses]
    if not isinstance(prompts[0], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    state = scoring.state
    if state is None:
        from transformers import TrainerState

        state = TrainerState()
    arguments = {
        **reward_columns(rows),
        **trainer_arguments(state),
        "prompts": prompts,
        "completions": texts,
        "completion_ids": [response.ids for response in responses],
    }
    given = {i: f(**arguments) for i, f in enumerate(scoring.functions) if not is_async(f)}
    given |= _run_async({i: f(**arguments) for i, f in enumerate(scoring.functions) if is_async(f)}, scoring.loop)
    per_function = [
        checked_scores(given[i], len(rows), reward_name(function)) for i, function in enumerate(scoring.functions)
    ]
    weights = scoring.weights if scoring.weights is not None else [1.0] * len(per_function)
    return [_weighted(scores, weights) for scores in zip(*per_function, strict=True)]


def _weighted(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of those scores that are numbers; None where none is."""
    known = [w * s for w, s in zip(weights, scores, strict=True) if s is not None and not math.isnan(s)]
    return sum(known) if known else None


def _run_async(calls: dict[int, Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop | None) -> dict[int, Any]:
    """The results of `calls`, which run at the same time, in `loop` or in a new one in a thread of its own."""
    if not calls:
        return {}

    async def together() -> list[Any]:
        return await asyncio.gather(*calls.values())

    if loop is not None:
        return dict(zip(calls, asyncio.run_coroutine_threadsafe(together(), loop).result(), strict=True))
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["results"] = asyncio.run(together())
        except BaseException as error:
            outcome["error"] = error

    # The calling thread may have a loop that runs, as in a notebook
    thread = threading.Thread(target=work, name="async rewards")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return dict(zip(calls, outcome["results"], strict=True))
