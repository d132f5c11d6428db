"""Reward functions in TRL's convention, and checks that a user's own function keeps to it.

A reward function is called as `f(prompts=..., completions=..., completion_ids=..., **columns)` and returns one number
per completion; None or NaN means that the response cannot be scored. Standard library only at import time.
"""

import asyncio
import functools
import inspect
import logging
import math
import numbers
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comppo.errors import RewardError
from comppo.loading import load_object, names_object

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""Plain or async; see the module's text."""

FLOAT32_MAX = 3.4028234663852886e38
"""Rewards become float32 in the trainer: anything beyond is infinite there."""
MAX_ABANDONED = 4
"""Calls of one time-limited function that may run on after their time is up, before training stops."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_COMMANDS, _WORDS = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]{2}")
"""LaTeX commands; and two letters in a row, which between dollars would be read as a product of variables."""


def completion_text(completion: Any) -> str:
    """The text of a completion: a string, or the content of the last message of a conversation.

    Args:
        completion: a string, or a list of messages, whose content may be a string, a list of parts or None.

    Returns:
        The text; the texts of several parts are joined, and content None is the empty string.

    Raises:
        RewardError: it is neither.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and completion and isinstance(completion[-1], Mapping):
        content = completion[-1].get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):  # parts, as multimodal templates have them
            return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        if content is None:
            return ""
    raise RewardError(f"a completion must be a string or a list of messages, got {completion!r:.80}.")


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`, stripped, or None if there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the response is the answer, else 0, surrounding white space aside; None where the answer is None.

    The response is the content of its last `<answer>...</answer>` if it has one, else its whole text.
    """
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion_text(completion)
        tagged = tagged_answer(text)
        given = text.strip() if tagged is None else tagged
        scores.append(None if right is None else float(given == str(right).strip()))
    return scores


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the response's final mathematical answer equals the gold answer, else 0, judged by math-verify.

    None (unscorable) where the gold answer cannot be parsed; a response that cannot be parsed scores 0. Each parse and
    each comparison may take 5 seconds, by an alarm signal: in threads other than the main one there is no such limit.
    """
    from math_verify import parse, verify

    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        text, gold = completion_text(completion), "" if right is None else str(right)
        wanted = parse(gold, parsing_timeout=seconds)
        if not wanted and gold and not _WORDS.search(_COMMANDS.sub("", gold)):
            wanted = parse(f"${gold}$", parsing_timeout=seconds)  # bare LaTeX is found only between dollars
        if not wanted:
            scores.append(None)
            continue
        given = parse(text, parsing_timeout=seconds)
        scores.append(float(bool(given) and bool(verify(wanted, given, timeout_seconds=seconds))))
    return scores


REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}
"""Reward functions that a name alone finds."""


def load_reward(spec: str) -> RewardFunction:
    """Find a reward function by name, or as `module:function` (see `comppo.loading.load_object`).

    Args:
        spec: a key of `REWARDS`, or `module:function`; the module is imported.

    Returns:
        The function as it is, plain or async; its results are not checked (see `checked_reward`).

    Raises:
        RewardError: `spec` names none; the message says what was wrong.
    """
    if spec in REWARDS:
        return REWARDS[spec]
    if not names_object(spec):
        raise RewardError(f"reward {spec!r} is unknown: use {', '.join(map(repr, REWARDS))} or 'module:function'.")
    function = load_object(spec, called=f"reward {spec!r}", error=RewardError)
    if not callable(function):
        name = spec.partition(":")[2]
        raise RewardError(f"reward {spec!r}: {name!r} is a {type(function).__name__}, not a function.")
    return function  # type: ignore[no-any-return]


def _without_partial(function: Any) -> Any:
    """What `functools.partial` was given, however often."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def reward_name(function: Any) -> str:
    """The name of a reward function in messages and logs: that of the wrapped function for `functools.partial`."""
    function = _without_partial(function)
    return str(getattr(function, "__name__", None) or type(function).__name__)


def is_async(function: Any) -> bool:
    """Whether calling `function` gives a coroutine."""
    function = _without_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def checked_scores(scores: Any, count: int, name: str) -> list[float | None]:
    """`scores` as floats and Nones.

    Args:
        scores: what a reward function returned: an iterable, array or tensor of shape (count,), reward units.
        count: completions that were to be scored.
        name: the reward function's name, for messages.

    Returns:
        `count` rewards, reward units; NaN and None stay as they are, and booleans become 0 and 1.

    Raises:
        RewardError: there are not `count` of them, or one is not a number (or None, or NaN) that fits in float32.
    """
    if inspect.iscoroutine(scores):
        scores.close()
        raise RewardError(f"reward {name!r} returned a coroutine: define it with 'async def'.")
    if hasattr(scores, "tolist"):  # arrays and tensors
        scores = scores.tolist()
    if isinstance(scores, (str, bytes, Mapping)) or not isinstance(scores, Iterable):
        raise RewardError(f"reward {name!r} must return a list with one number per completion, got {scores!r:.80}.")
    found = list(scores)
    if len(found) != count:
        raise RewardError(
            f"reward {name!r} returned {len(found)} rewards for {count} completions: return one for each."
        )
    return [_checked_score(score, index, name) for index, score in enumerate(found)]


def _checked_score(score: Any, index: int, name: str) -> float | None:
    if score is None:
        return None
    value = score.item() if hasattr(score, "item") else score  # scalars of NumPy and torch
    if isinstance(value, numbers.Real):  # bool included: 0 or 1
        try:
            number = float(value)
        except OverflowError:  # a huge int
            number = math.inf
        if math.isnan(number) or abs(number) <= FLOAT32_MAX:
            return number
        raise RewardError(
            f"reward {name!r} returned {value!r:.80} at index {index}: rewards must be finite in float32."
        )
    raise RewardError(
        f"reward {name!r} returned {score!r:.80} ({type(score).__name__}) at index {index}: "
        "return a number, or None for a response that cannot be scored."
    )


def checked_reward(function: RewardFunction) -> RewardFunction:
    """`function` with its result checked at every call, plain or async as it was, under the same `__name__`.

    None and NaN pass: such responses count as unscorable. What the function itself raises passes too.

    Args:
        function: a reward function in TRL's convention.

    Returns:
        A function that takes `completions` by keyword and gives one float or None per completion, reward units.

    Raises:
        RewardError: (when called) a wrong number of rewards, or one that is no number or infinite.
    """
    name = reward_name(function)

    @functools.wraps(function, updated=())
    def plain(*args: Any, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return checked_scores(function(*args, completions=completions, **columns), len(completions), name)

    @functools.wraps(function, updated=())
    async def awaited(*args: Any, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return checked_scores(await function(*args, completions=completions, **columns), len(completions), name)

    wrapper = awaited if is_async(function) else plain
    wrapper.__name__ = name
    return wrapper


def reward_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of at least one row that a reward function gets, as TRL picks them."""
    own = ("prompt", "completion", "completion_ids")
    return {key: [row[key] for row in rows] for key in rows[0] if key not in own}


def trainer_arguments(state: Any) -> dict[str, Any]:
    """TRL's further arguments of a reward function, with loggers that log nothing."""
    return {"trainer_state": state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}


def probe_rewards(functions: Iterable[Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Call each plain reward function once on two rows with dummy completions, before any model is loaded.

    Async functions (they may call services) and reward models are not called. An exception of the function itself is
    no verdict, as the dummies may not suit it: it is logged at debug level.

    Args:
        functions: reward functions.
        rows: rows of the data set with a `prompt` column; the first two are used.

    Raises:
        RewardError: a wrong number of rewards, or one that is no number or infinite.
    """
    sample = [dict(row) for _, row in zip(range(2), rows, strict=False)]
    if not sample:
        return
    columns = reward_columns(sample)
    prompts = [row.get("prompt") for row in sample]
    completions = ["0" if isinstance(prompt, str) else [{"role": "assistant", "content": "0"}] for prompt in prompts]
    for function in functions:
        if not callable(function) or is_async(function) or hasattr(function, "state_dict"):
            continue
        try:
            scores = function(
                prompts=prompts,
                completions=completions,
                completion_ids=[[0] for _ in sample],
                **{**columns, **trainer_arguments(None)},
            )
        except RewardError:
            raise
        except Exception:
            logger.debug("reward %r raised on the probe's dummy completions", reward_name(function), exc_info=True)
            continue
        checked_scores(scores, len(sample), reward_name(function))


def time_limited(function: RewardFunction, seconds: float) -> RewardFunction:
    """`function`, given up after `seconds` a call: its responses are then unscorable (None), with a warning.

    What this can do: training goes on. What it cannot: stop the work. A plain function runs in a thread of its own,
    which Python cannot end; it keeps its processor until it returns or the program ends, and one that never lets go of
    the interpreter lock (a long call into C) holds up training all the same. An async function is cancelled at its next
    await. In the thread math-verify's own limits do not work (see `math_verify`).

    Args:
        function: a reward function in TRL's convention, plain or async.
        seconds: limit of one call, which scores a whole batch; more than 0.

    Returns:
        A function that takes `completions` by keyword, plain or async as `function` is, under the same `__name__`;
        what `function` returns or raises in time passes unchecked, a TimeoutError of its own included.

    Raises:
        RewardError: `seconds` is not positive; or (when called) more than `MAX_ABANDONED` earlier calls still run.
    """
    if not seconds > 0:
        raise RewardError(
            f"time limit of reward {reward_name(function)!r} must be more than 0 seconds, got {seconds!r}."
        )
    name = reward_name(function)
    running: list[threading.Thread] = []

    def given_up(completions: Sequence[Any]) -> list[float | None]:
        logger.warning("reward %r took more than %g s: %d responses are unscorable", name, seconds, len(completions))
        return [None] * len(completions)

    @functools.wraps(function, updated=())
    def plain(*args: Any, completions: Sequence[Any], **columns: Any) -> Any:
        running[:] = [thread for thread in running if thread.is_alive()]
        if len(running) > MAX_ABANDONED:
            raise RewardError(f"reward {name!r}: {len(running)} calls of more than {seconds:g} s still run: mend it.")
        outcome: dict[str, Any] = {}

        def call() -> None:
            try:
                outcome["scores"] = function(*args, completions=completions, **columns)
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=call, name=f"reward {name}", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            running.append(thread)
            return given_up(completions)
        if "error" in outcome:
            raise outcome["error"]
        return outcome["scores"]

    @functools.wraps(function, updated=())
    async def awaited(*args: Any, completions: Sequence[Any], **columns: Any) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await function(*args, completions=completions, **columns)
        except TimeoutError:
            if not limit.expired():  # the function's own, such as that of a service it calls
                raise
            return given_up(completions)

    wrapper = awaited if is_async(function) else plain
    wrapper.__name__ = name
    return wrapper
