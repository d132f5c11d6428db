"""Reward functions, and the checks around a user's own."""

import asyncio
import functools
import sys
import threading
import time

import numpy as np
import pytest
import torch

from comppo.errors import RewardError
from comppo.evidence import verifiers
from comppo.evidence.verifiers import checked_reward, exact_match, load_reward, math_verify, probe_rewards, time_limited

TWO = {"prompts": ["p", "q"], "completions": ["a", "b"]}


def message(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match():
    completions = [
        " 8\n",
        "8.",
        "so <answer> 8 </answer> it is",
        "<answer>7</answer><answer>8</answer>",
        message("8"),
        "8",
    ]
    assert exact_match(completions=completions, answer=["8"] * 5 + [None]) == [1.0, 0.0, 1.0, 1.0, 1.0, None]
    assert exact_match(completions=["8"], answer=[8], prompts=["ignored"]) == [1.0]


def test_completion_text_of_conversations():
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert verifiers.completion_text([*message("no"), *message("yes")]) == "yes"
    assert verifiers.completion_text(parts) == "ab"
    assert verifiers.completion_text([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    for wrong in (3, [], ["text"], {"content": "x"}):
        with pytest.raises(RewardError, match="string or a list of messages"):
            verifiers.completion_text(wrong)


def test_math_verify_judges_values_and_leaves_unreadable_gold_unscored():
    cases = [
        (r"so \boxed{0.5}", "1/2", 1.0),
        ("it is 3", "4", 0.0),
        (r"$\frac{1}{2}$", r"\frac12", 1.0),
        (message(r"\boxed{\sqrt{2}}"), r"\sqrt{2}", 1.0),
        ("#### 72", "#### 72", 1.0),
        ("no idea", "4", 0.0),
        ("4", "hello there", None),
        ("4", "", None),
        ("4", None, None),
    ]
    completions, answers, expected = zip(*cases, strict=True)
    assert math_verify(completions=list(completions), answer=list(answers)) == list(expected)


def test_math_verify_in_another_thread():
    """Its alarm signals work in the main thread only; the verdict must not depend on that."""
    found = []
    thread = threading.Thread(target=lambda: found.append(math_verify(completions=["0.5"], answer=["1/2"])))
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_load_reward(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_a.py").write_text(
        "LIMIT = 3\ndef short(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "my_rewards_b.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    assert load_reward("my_rewards_a:short")(completions=["x"]) == [1.0]
    assert "my_rewards_b" not in sys.modules, "loads only what was named"
    assert load_reward("my_rewards_a:short")(completions=["x"]) == [1.0]
    assert sys.path == [*before, str(tmp_path)], "the folder is there once, however often one loads"
    assert load_reward("exact_match") is exact_match
    for spec, words in [
        ("exact_mach", "is unknown"),
        (":x", "is unknown"),
        ("my_rewards_a:", "is unknown"),
        ("no_such_module_here:x", "importing module 'no_such_module_here' failed"),
        ("my_rewards_b:x", "RuntimeError: boom"),
        ("my_rewards_a:long", "has no 'long'"),
        ("my_rewards_a:LIMIT", "is a int, not a function"),
    ]:
        with pytest.raises(RewardError, match=words) as caught:
            load_reward(spec)
        assert repr(spec) in str(caught.value)


def test_a_loaded_reward_imports_its_neighbours_when_called(tmp_path, monkeypatch):
    (tmp_path / "my_neighbour.py").write_text("SCORE = 0.5\n")
    (tmp_path / "my_rewards_c.py").write_text(
        "def late(completions, **_):\n    import my_neighbour\n    return [my_neighbour.SCORE] * len(completions)\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    function = load_reward("my_rewards_c:late")
    monkeypatch.chdir("/")
    assert function(completions=["x", "y"]) == [0.5, 0.5]


@pytest.mark.parametrize(
    "scores",
    [
        [1, 0],
        (True, False),
        np.array([1.0, 0.0]),
        torch.tensor([1.0, 0.0]),
        [torch.tensor(1.0), np.float32(0)],
        iter([1, 0]),
    ],
)
def test_numbers_in_any_wrapping_pass(scores):
    def mine(completions, **_):
        return scores

    wrapped = checked_reward(mine)
    assert wrapped.__name__ == "mine"
    assert wrapped(**TWO) == [1.0, 0.0]


def test_unscorable_passes():
    found = checked_reward(lambda completions, **_: [None, float("nan")])(**TWO)
    assert found[0] is None and found[1] != found[1]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, 0.0, 0.0], "returned 3 rewards for 2"),
        ([], "returned 0 rewards"),
        ([1.0, "1.0"], r"'1.0' \(str\) at index 1"),
        ("ab", "one number per completion, got 'ab'"),
        (None, "one number per completion, got None"),
        (1.0, "one number per completion, got 1.0"),
        ({"a": 1, "b": 2}, "one number per completion"),
        ([[1.0], [0.0]], r"\[1.0\] \(list\) at index 0"),
        ([0.0, float("inf")], "inf at index 1"),
        ([-float("inf"), 0.0], "-inf at index 0"),
        ([0.0, 1e39], "finite in float32"),
        ([0.0, 10**400], "finite in float32"),
        ([1j, 0.0], "complex"),
        (torch.zeros(2, 2), r"at index 0"),
    ],
)
def test_what_is_no_reward_is_refused(scores, words):
    def mine(completions, **_):
        return scores

    with pytest.raises(RewardError, match=words) as caught:
        checked_reward(mine)(**TWO)
    assert "'mine'" in str(caught.value)
    with pytest.raises(RewardError, match=words):
        probe_rewards([mine], [{"prompt": "p"}, {"prompt": "q"}])


def test_async_functions_and_objects():
    async def later(completions, **_):
        return [1.0] * (len(completions) - 1)

    class Judge:
        def __call__(self, completions, **_):
            return [True] * len(completions)

    wrapped = checked_reward(later)
    assert verifiers.is_async(wrapped) and wrapped.__name__ == "later"
    with pytest.raises(RewardError, match="'later' returned 1 rewards"):
        asyncio.run(wrapped(**TWO))
    assert checked_reward(Judge())(**TWO) == [1.0, 1.0]
    assert checked_reward(Judge()).__name__ == "Judge"
    with pytest.raises(RewardError, match="coroutine"):
        checked_reward(lambda completions, **_: later(completions))(**TWO)


def test_partials_have_the_name_and_kind_of_what_they_wrap():
    def mine(completions, scale, **_):
        return [scale] * len(completions)

    class Judge:
        async def __call__(self, completions, **_):
            return [1.0] * len(completions)

    twice = functools.partial(functools.partial(mine, scale=1.0), extra=2)
    assert verifiers.reward_name(twice) == checked_reward(twice).__name__ == time_limited(twice, 9.0).__name__ == "mine"
    assert checked_reward(twice)(**TWO) == [1.0, 1.0]
    judge = functools.partial(Judge(), level=3)
    assert verifiers.is_async(judge) and verifiers.reward_name(judge) == "Judge"
    assert asyncio.run(checked_reward(judge)(**TWO)) == [1.0, 1.0]


def test_what_the_function_raises_passes_but_not_in_a_probe(caplog):
    def mine(completions, answer, **_):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        checked_reward(mine)(**TWO, answer=["1", "2"])
    with caplog.at_level("DEBUG", logger="comppo.evidence.verifiers"):
        probe_rewards([mine], [{"prompt": "p", "answer": "1"}])
    assert "'mine' raised" in caplog.text


def test_probe_calls_as_training_does_and_once():
    calls = []

    def mine(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **others):
        calls.append((prompts, completions, answer, len(completion_ids), sorted(others)))
        return [0.0] * len(prompts)

    async def service(**_):
        raise AssertionError("a service is not called")

    rows = [{"prompt": f"p{i}", "answer": str(i), "level": i} for i in range(5)]
    probe_rewards([mine, service, "a-model", torch.nn.Linear(1, 1)], rows)
    assert calls == [(["p0", "p1"], ["0", "0"], ["0", "1"], 2, ["level"])]
    calls.clear()
    probe_rewards([checked_reward(mine)], [{"prompt": message("p"), "answer": "1"}])
    assert calls[0][1] == [message("0")]
    calls.clear()
    probe_rewards([mine], [{"prompt": "p", "answer": "1", "completion_ids": [3], "trainer_state": "a column"}])
    assert len(calls) == 1, "columns with the names of TRL's own arguments do not get in the way"
    probe_rewards([mine], [])


def test_time_limit_gives_up_and_training_goes_on(caplog):
    release = threading.Event()

    def slow(completions, **_):
        release.wait(20)
        return [1.0] * len(completions)

    limited = time_limited(slow, 0.05)
    started = time.monotonic()
    for _ in range(verifiers.MAX_ABANDONED + 1):
        assert limited(**TWO) == [None, None]
    assert time.monotonic() - started < 10
    assert "'slow' took more than 0.05 s" in caplog.text
    with pytest.raises(RewardError, match="still run"):
        limited(**TWO)
    release.set()


def test_time_limit_leaves_quick_functions_alone():
    def quick(completions, **_):
        return [1.0] * len(completions)

    def broken(completions, **_):
        raise KeyError("mine")

    assert time_limited(quick, 20.0)(**TWO) == [1.0, 1.0]
    assert time_limited(quick, 20.0).__name__ == "quick"
    with pytest.raises(KeyError, match="mine"):
        time_limited(broken, 20.0)(**TWO)
    with pytest.raises(RewardError, match="more than 0 seconds"):
        time_limited(quick, 0.0)


def test_time_limit_cancels_async_functions():
    cancelled = []

    async def slow(completions, **_):
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    limited = time_limited(slow, 0.05)
    assert verifiers.is_async(limited)
    assert asyncio.run(limited(**TWO)) == [None, None]
    assert cancelled == [True]


def test_an_async_functions_own_timeout_is_not_the_limit():
    async def service(**_):
        raise TimeoutError("the service did not answer")

    with pytest.raises(TimeoutError, match="the service"):
        asyncio.run(time_limited(service, 20.0)(**TWO))

    async def stubborn(**_):
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            raise TimeoutError("on being cancelled") from None

    assert asyncio.run(time_limited(stubborn, 0.05)(**TWO)) == [None, None]
