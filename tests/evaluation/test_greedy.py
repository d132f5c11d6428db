"""Greedy evaluation of a small untrained model."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from comppo.errors import ConfigError, RewardError
from comppo.evaluation.greedy import evaluating, generate_responses, greedy_accuracy
from comppo.tasks.pretrain import ModelSize, make_model
from comppo.tasks.tokenizer import make_tokenizer

PROMPTS = ["a3 ca+5 ?c>", "b7>", "a1 b2 ca+4 db@9 ?d>", "?a>", "a3 ca+5 ?c>"]


@pytest.fixture(scope="module")
def model():
    return make_model(ModelSize(layers=2, hidden=32, heads=2, intermediate=32), 3)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def one(completions, **_):
    return [1.0] * len(completions)


def rows():
    return [{"prompt": prompt, "answer": str(index)} for index, prompt in enumerate(PROMPTS)]


def by_hand(model, tokenizer, prompt, tokens):
    """Arg-max decoding by whole forward passes, without padding or cache."""
    ids = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    with torch.no_grad():
        while len(new) < tokens and tokenizer.eos_token_id not in new:
            new.append(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax().item())
    return new


@pytest.mark.parametrize("side", ["left", "right"])
def test_responses_equal_decoding_by_hand_whatever_the_tokenizers_padding_side(model, tokenizer, side):
    model.eval()
    tokenizer.padding_side = side
    found = generate_responses(model, tokenizer, PROMPTS, max_new_tokens=12)
    tokenizer.padding_side = "left"
    for prompt, response in zip(PROMPTS, found, strict=True):
        assert response.ids == by_hand(model, tokenizer, prompt, 12)
        assert response.ended == (tokenizer.eos_token_id in response.ids)
        assert response.text == tokenizer.decode(response.ids, skip_special_tokens=True)


def test_batches_modes_and_random_state_do_not_matter_and_stay(model, tokenizer):
    model.train()
    model.model.layers[0].eval()  # a mixed state must come back as it was
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    results = [
        greedy_accuracy(model, tokenizer, rows(), one, max_new_tokens=9, batch_size=size) for size in (1, 2, 256)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert results[0] == results[1] == results[2]
    assert results[0].accuracy == 1.0 and results[0].count == 5


def test_lengths_and_truncation(tokenizer):
    """A model whose head prefers one token: end of text after no token, or never."""
    model = make_model(ModelSize(layers=1, hidden=8, heads=1, intermediate=8), 0)
    for token, length, truncated in ((tokenizer.eos_token_id, 1.0, 0), (5, 7.0, 5)):
        model.lm_head = torch.nn.Linear(8, model.config.vocab_size)
        torch.nn.init.zeros_(model.lm_head.weight)
        with torch.no_grad():
            model.lm_head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(token), model.config.vocab_size))
        result = greedy_accuracy(model, tokenizer, rows(), one, max_new_tokens=7)
        assert (result.mean_length, result.truncated) == (length, truncated)


def test_reward_gets_what_training_gives(model, tokenizer):
    def mine(prompts, completions, completion_ids, answer, **others):
        assert prompts == PROMPTS and answer == list("01234")
        assert set(others) == {"trainer_state", "log_metric", "log_extra"}
        assert [len(ids) for ids in completion_ids] == [4] * 5 or all(ids for ids in completion_ids)
        return [1.0, None, float("nan"), 0.0, True]

    result = greedy_accuracy(model, tokenizer, rows(), mine, max_new_tokens=4)
    assert result.accuracy == pytest.approx(2 / 3) and result.count == 3
    none = greedy_accuracy(model, tokenizer, rows(), lambda completions, **_: [None] * 5, max_new_tokens=2)
    assert math.isnan(none.accuracy) and none.count == 0


def test_trainers_arguments_and_async_functions_are_served_as_in_training(model, tokenizer):
    def shaped(completions, trainer_state, log_metric, log_extra, **_):
        log_metric("mine", 1.0)
        log_extra("mine", ["x"] * len(completions))
        return [float(trainer_state.global_step)] * len(completions)

    async def judge(completions, log_metric, **_):
        await asyncio.sleep(0)
        log_metric("judge", 1.0)
        return [3.0] * len(completions)

    data = [row | {"completion_ids": [1], "trainer_state": "a column"} for row in rows()]
    assert greedy_accuracy(model, tokenizer, data, shaped, max_new_tokens=2).accuracy == 0.0
    state = SimpleNamespace(global_step=7)
    found = greedy_accuracy(model, tokenizer, data, [shaped, judge], max_new_tokens=2, trainer_state=state)
    assert found.accuracy == 10.0

    async def notebook():
        return greedy_accuracy(model, tokenizer, data, judge, max_new_tokens=2).accuracy

    assert asyncio.run(notebook()) == 3.0, "a loop that runs in the calling thread"


def test_async_functions_run_in_the_trainers_loop(model, tokenizer):
    loop, seen = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def judge(completions, **_):
        seen.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def broken(**_):
        raise KeyError("mine")

    greedy_accuracy(model, tokenizer, rows(), judge, max_new_tokens=2, async_loop=loop)
    assert seen == [loop]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    with pytest.raises(KeyError, match="mine"):
        greedy_accuracy(model, tokenizer, rows(), broken, max_new_tokens=2)


def test_several_functions_are_summed_with_weights_as_trl_sums_them(model, tokenizer):
    def first(completions, **_):
        return [1.0, None, float("nan"), 0.0, 2.0]

    def second(completions, **_):
        return [4.0, 8.0, None, None, 0.0]

    found = greedy_accuracy(model, tokenizer, rows(), [first, second], max_new_tokens=2, reward_weights=[1.0, 0.5])
    per_func = torch.tensor([[1, 4], [torch.nan, 8], [torch.nan, torch.nan], [0, torch.nan], [2, 0]])
    scorable = ~per_func.isnan().all(dim=1)
    expected = (per_func * torch.tensor([1.0, 0.5])).nansum(dim=1)[scorable].mean().item()
    assert found.accuracy == pytest.approx(expected) and found.count == 4


def test_conversations_go_through_the_chat_template(model):
    tokenizer, seen = make_tokenizer(), []
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ extra }}{% if add_generation_prompt %}>{% endif %}"
    )

    def mine(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    greedy_accuracy(model, tokenizer, [{"prompt": [{"role": "user", "content": "b7"}]}], mine, max_new_tokens=5)
    model.eval()
    text = tokenizer.decode(by_hand(model, tokenizer, "b7>", 5), skip_special_tokens=True)
    assert seen == [[{"role": "assistant", "content": text}]]
    seen.clear()
    prompt = [{"prompt": [{"role": "user", "content": "b7"}]}]
    options = {"extra": " ?b"}
    greedy_accuracy(model, tokenizer, prompt, mine, max_new_tokens=5, chat_template_kwargs=options)
    model.eval()
    text = tokenizer.decode(by_hand(model, tokenizer, "b7 ?b>", 5), skip_special_tokens=True)
    assert seen == [[{"role": "assistant", "content": text}]]


def test_errors(model, tokenizer):
    with pytest.raises(ConfigError, match="no rows"):
        greedy_accuracy(model, tokenizer, [], one, max_new_tokens=4)
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, got 0"):
        greedy_accuracy(model, tokenizer, rows(), one, max_new_tokens=0)
    with pytest.raises(ConfigError, match="'Linear' is a reward model"):
        greedy_accuracy(model, tokenizer, rows(), torch.nn.Linear(1, 1), max_new_tokens=4)
    with pytest.raises(ConfigError, match="reward_funcs is empty"):
        greedy_accuracy(model, tokenizer, rows(), [], max_new_tokens=4)
    with pytest.raises(ConfigError, match=r"reward_weights=\[1.0\] are 1, but there are 2"):
        greedy_accuracy(model, tokenizer, rows(), [one, one], max_new_tokens=4, reward_weights=[1.0])
    with pytest.raises(RewardError, match="returned 1 rewards for 5"):
        greedy_accuracy(model, tokenizer, rows(), lambda completions, **_: [1.0], max_new_tokens=4)


def test_evaluating_restores_after_an_error(model):
    model.train()
    with pytest.raises(KeyError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise KeyError
    assert model.training and torch.is_grad_enabled()
