"""The chain task: what a prompt means, what decides it, which prompts are held out."""

import numpy as np
import pytest

from comppo.errors import ConfigError, TaskError
from comppo.tasks import chain
from comppo.tasks.chain_steps import parse_prompt
from comppo.tasks.demonstrator import COPY_ERROR, demonstrate, demonstrator_accuracy, demonstrator_table
from comppo.tasks.tokenizer import make_tokenizer

SIZES = [(1, 0), (3, 1), (5, 2), (4, 3), (25, 0), (1, 12)]


def solve(prompt: str) -> str:
    """The answer, by substitution on the text alone: an oracle that shares no code with the task."""
    *items, question = prompt.split(" ")
    values: dict[str, int] = {}
    for item in items:
        if len(item) == 2:
            values[item[0]] = int(item[1])
        else:
            name, parent, operation, digit = item
            x, y = values[parent], int(digit)
            values[name] = (x + y) % 10 if operation == "+" else (3 * x + 7 * y + 4) % 10
    return str(values[question[1]])


@pytest.mark.parametrize(("length", "distractors"), SIZES)
def test_answers_responses_and_decisive_positions(length, distractors):
    rng = np.random.default_rng(0)
    problems = chain.draw_problems(rng, 40, length=length, distractors=distractors)
    config = chain.ChainConfig(length=length, distractors=distractors)
    prompts, (right, answers) = chain.render_prompts(problems), chain.render_responses(problems)
    noisy, noisy_answers = demonstrate(problems, rng)
    assert answers == [solve(prompt) for prompt in prompts]
    assert [parse_prompt(prompt).answer() for prompt in prompts] == answers
    for prompt, response in zip(prompts, right, strict=True):
        parsed = parse_prompt(prompt)
        assert len(response) + 1 == config.completion_length
        assert sum(s.relevant for s in parsed.statements) == length
        assert len(parsed.decisive_positions()) == 2 * length + 1
        assert all(response[at].isdigit() for at in parsed.decisive_positions())
    assert [response[-1] for response in noisy] == noisy_answers


@pytest.mark.parametrize("position", range(51))
def test_decisive_positions_are_those_where_one_wrong_digit_changes_the_answer(position):
    """Recompute the response after damage at one token: the answer changes exactly where the position is decisive.

    Both operations are one-to-one in x, so no later step heals the error.
    """
    problems = chain.draw_problems(np.random.default_rng(3), 1, length=3, distractors=1)
    prompt, response = chain.render_prompts(problems)[0], chain.render_responses(problems)[0][0]
    parsed = parse_prompt(prompt)
    if not response[position].isdigit() or (position < 48 and position % 8 == 4):
        assert position not in parsed.decisive_positions()
        return
    values = dict(parsed.starts)
    for line, statement in enumerate(parsed.statements):
        x = values[statement.parent]
        if position == 8 * line + 2:
            x = (x + 1) % 10
        z = chain.RESULTS[statement.operation, x, statement.operand]
        if position == 8 * line + 6:
            z = (z + 1) % 10
        values[statement.name] = int(z)
    answer = (values[parsed.asked] + (position == 50)) % 10
    assert (str(answer) != response[-1]) is (position in parsed.decisive_positions())


def test_operations_are_one_to_one_in_the_looked_up_value():
    for table in chain.RESULTS:
        for y in range(10):
            assert sorted(table[:, y]) == list(range(10))


def test_the_seed_decides_everything():
    config = chain.ChainConfig(prompts=50, eval_prompts=20, seed=4)
    assert chain.chain_prompts(config) == chain.chain_prompts(config)
    train, held_out = chain.chain_prompts(config)
    other_train, other_held_out = chain.chain_prompts(chain.ChainConfig(prompts=50, eval_prompts=20, seed=5))
    assert train != other_train and held_out != other_held_out
    assert len(train) == 50 and len(held_out) == 20


def test_held_out_prompts_meet_no_training_prompt_of_any_seed_and_no_pretraining_prompt():
    """On a size with 200 prompts, so that unseparated streams would surely meet."""
    train, held_out = set(), set()
    for seed in range(5):
        config = chain.ChainConfig(length=1, distractors=0, prompts=100, eval_prompts=15, seed=seed)
        a, b = chain.chain_prompts(config)
        train, held_out = train | set(a), held_out | set(b)
    problems = chain.training_problems(np.random.default_rng(0), 3000, length=1, distractors=0)
    pretraining = set(chain.render_prompts(problems))
    assert len(pretraining) > 150 and len(held_out) >= 15
    assert not held_out & (train | pretraining)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"length": 0}, "length must be"),
        ({"length": True}, "length must be"),
        ({"distractors": -1}, "distractors must be"),
        ({"eval_prompts": -1}, "eval_prompts must be"),
        ({"seed": -1}, "seed must be"),
        ({"length": 13, "distractors": 1}, "28 variables"),
    ],
)
def test_impossible_sizes(params, words):
    with pytest.raises(ConfigError, match=words):
        chain.ChainConfig(**params)


def test_too_few_prompts_are_said():
    with pytest.raises(TaskError, match="choose fewer"):
        chain.chain_prompts(chain.ChainConfig(length=1, distractors=0, prompts=199))


@pytest.mark.parametrize("text", ["", "a3 ca+5 ?c>", "a3 b7 ca+5 ?z>", "a3 b7 cd+5 ?c>", "hello", "a3 ba+5 ?b> "])
def test_texts_that_are_no_prompt(text):
    if text == "a3 ca+5 ?c>":
        assert parse_prompt(text).answer() == "8"
        return
    with pytest.raises(TaskError):
        parse_prompt(text)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_demonstrator_is_as_good_as_dynamic_programming_says(length):
    """40 000 demonstrations; five standard errors (a false alarm once in two million runs)."""
    count = 40_000
    problems = chain.draw_problems(np.random.default_rng(length), count, length=length, distractors=1)
    _, right = chain.render_responses(problems)
    _, given = demonstrate(problems, np.random.default_rng(100 + length))
    found, expected = np.mean(np.array(right) == np.array(given)), demonstrator_accuracy(length)
    assert abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)


def test_one_operation_by_enumeration():
    """The right result after a right look-up, or by luck after a wrong one: summed over all 200 table entries."""
    table, total = demonstrator_table(), 0.0
    for operation in range(2):
        for y in range(10):
            for v in range(10):
                right = chain.RESULTS[operation, v, y]
                chances = [(1 - COPY_ERROR) * (x == v) + COPY_ERROR / 10 for x in range(10)]
                total += sum(chances[x] * table[operation, x, y, right] for x in range(10)) / 200
    assert demonstrator_accuracy(1) == pytest.approx(total, rel=1e-12)


def test_the_demonstrators_table():
    table = demonstrator_table()
    right = np.take_along_axis(table, chain.RESULTS[..., None], -1)[..., 0]
    np.testing.assert_allclose(table.sum(-1), 1, rtol=1e-12)
    assert set(np.unique(right.round(12))) == {0.30, 0.94}
    assert 0.3 < np.mean(right == 0.30) < 0.5
    wrong = np.sort(table, -1)[..., -1] * (right < 0.5) + np.sort(table, -1)[..., -2] * (right > 0.5)
    np.testing.assert_allclose(wrong, (1 - right) * 0.8, rtol=1e-12)


@pytest.mark.parametrize(("length", "distractors"), SIZES)
def test_the_tokenizer_gives_back_every_text(length, distractors):
    tokenizer, rng = make_tokenizer(), np.random.default_rng(1)
    problems = chain.draw_problems(rng, 20, length=length, distractors=distractors)
    for text in chain.render_prompts(problems) + demonstrate(problems, rng)[0]:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert (
            tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
        )


def test_the_tokenizer_pads_on_the_left_and_refuses_other_characters(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(["a5", "a5 b8"], padding=True)["attention_mask"] == [[0, 0, 0, 1, 1], [1] * 5]
    assert tokenizer.chat_template is None and tokenizer.bos_token is None
    with pytest.raises(Exception, match="UNK"):
        tokenizer("A")


def reward(text, answer="8", ids=None):
    return chain.chain_reward(completions=[text], answer=[answer], completion_ids=None if ids is None else [ids])[0]


def test_reward_edge_cases():
    assert reward("ca3+5c8.#8") == 1.0
    assert reward("#8") == 1.0
    assert reward("#3#8") == 1.0
    assert reward([{"role": "assistant", "content": "#8"}]) == 1.0
    for wrong in ("", "#", "8", "#7", "#8 ", "# 8", "#88", "#8#", "#8.", "#8#7"):
        assert reward(wrong) == 0.0, wrong


def test_reward_needs_the_end_where_token_ids_tell():
    eos, ids = chain.TOKEN_IDS[chain.EOS], [chain.TOKEN_IDS[c] for c in "ca3+5c8.#8"]
    assert reward("ca3+5c8.#8", ids=[*ids, eos]) == 1.0
    assert reward("ca3+5c8.#8", ids=ids) == 0.0
    assert reward("ca3+5c8.#8", ids=[*ids, chain.TOKEN_IDS[chain.PAD]]) == 0.0
    assert reward("#8", ids=[31337, 5]) == 1.0, "another tokenizer's ids say nothing"


def test_sampled_padding_does_not_hide_that_the_response_was_cut_off():
    mark, pad, eight, eos = (chain.TOKEN_IDS[token] for token in ("#", chain.PAD, "8", chain.EOS))
    assert reward("#8", ids=[mark, pad, eight]) == 0.0
    assert reward("#8", ids=[pad, mark, eight, pad]) == 0.0
    assert reward("#8", ids=[mark, pad, eight, eos]) == 1.0
    assert reward("#8", ids=[mark, pad, eight, eos, pad]) == 1.0
