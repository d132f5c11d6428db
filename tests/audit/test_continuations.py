"""Continuations and true advantages, held against a Markov chain whose values are known."""

import json

import markov
import pytest
import torch

from comppo.audit.continuations import ContinuationConfig, value_prefixes
from comppo.audit.sampling import rows_that_fit, sample_continuations
from comppo.audit.truth import true_advantages
from comppo.errors import ConfigError, EvidenceError


@pytest.fixture(scope="module")
def model():
    return markov.make_model()


def sample(model, prompts, count=1, seed=0, temperature=1.0):
    return sample_continuations(
        model, prompts, count=count, limits=[markov.LIMIT] * len(prompts), eos_ids=[markov.EOS], pad_id=markov.PAD,
        temperature=temperature, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def rollout(model, rows=6, seed=0):
    """Prompts of one to three tokens and a response to each."""
    prompts = [[2 + (i * j) % 6 for j in range(1, 2 + i % 3)] for i in range(rows)]
    return prompts, sample(model, prompts, seed=seed)


def valued(model, prompts, responses, **settings):
    options = {"records": settings.pop("records", None), "clock": settings.pop("clock", None)}
    config = ContinuationConfig(**{"continuations": 64, "max_new_tokens": markov.LIMIT, **settings})
    return value_prefixes(
        model, prompts, responses, markov.scorer(prompts), config, eos_ids=[markov.EOS], pad_id=markov.PAD,
        **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip


def truth(model, prompts, responses, **settings):
    result = valued(model, prompts, responses, **settings)
    outcomes = torch.tensor([markov.reward(p, r) for p, r in zip(prompts, responses, strict=True)])
    return true_advantages(result.positions, result.rewards, outcomes, torch.tensor([len(r) for r in responses]))


def test_the_model_is_the_chain(model):
    logits = model(input_ids=torch.tensor([[2, 5, 3, 7]])).logits
    torch.testing.assert_close(logits[0].softmax(-1).double(), markov.transitions()[[2, 5, 3, 7]], atol=1e-6, rtol=1e-5)


def test_next_tokens_are_drawn_as_often_as_they_are_probable_whatever_the_padding(model):
    """Prefixes of several lengths in one batch: 20 000 draws each, so frequencies err by at most .0036 (one sigma)."""
    prefixes, count = [[2], [5, 3, 4], [7, 6]], 20_000
    first = sample_continuations(
        model, prefixes, count=count, limits=[1, 1, 1], eos_ids=[markov.EOS], pad_id=markov.PAD,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    for row, prefix in enumerate(prefixes):
        drawn = torch.tensor(first[row * count : (row + 1) * count]).squeeze(1)
        share = torch.bincount(drawn, minlength=markov.VOCABULARY).double() / count
        torch.testing.assert_close(share, markov.transitions()[prefix[-1]], atol=0.015, rtol=0)


def test_temperature_divides_the_logits(model):
    count = 20_000
    drawn = sample_continuations(
        model, [[4]], count=count, limits=[1], eos_ids=[markov.EOS], pad_id=markov.PAD, temperature=2.0,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    expected = markov.transitions()[4].sqrt()
    share = torch.bincount(torch.tensor(drawn).squeeze(1), minlength=markov.VOCABULARY).double() / count
    torch.testing.assert_close(share, expected / expected.sum(), atol=0.015, rtol=0)


def test_continuations_end_with_end_of_text_or_at_their_own_limit(model):
    limits = [1, 4, 12]
    drawn = sample_continuations(
        model, [[2], [3], [4]], count=50, limits=limits, eos_ids=[markov.EOS], pad_id=markov.PAD,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for row, ids in enumerate(drawn):
        assert 1 <= len(ids) <= limits[row // 50] and markov.PAD not in ids
        assert markov.EOS not in ids[:-1]
        assert ids[-1] == markov.EOS or len(ids) == limits[row // 50]
    assert len({len(ids) for ids in drawn[100:]}) > 6


def test_cached_and_padded_continuations_equal_decoding_by_whole_forwards():
    """A random Llama at temperature near 0, so that sampling is arg-max; prefixes of different lengths."""
    from comppo.tasks.pretrain import ModelSize, make_model

    llama = make_model(ModelSize(layers=2, hidden=32, heads=2, intermediate=32), 3).eval()
    prefixes, limits = [[5, 9, 30], [7], [12, 13, 14, 15, 16]], [6, 9, 4]
    found = sample_continuations(
        llama, prefixes, count=2, limits=limits, eos_ids=[1], pad_id=0, temperature=1e-4,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for row, ids in enumerate(found):
        whole = list(prefixes[row // 2])
        for token in ids:
            logits = llama(input_ids=torch.tensor([whole])).logits[0, -1]
            assert token == logits.argmax().item()
            whole.append(token)


@pytest.mark.parametrize("every", [1, 4])
def test_monte_carlo_values_and_advantages_agree_with_the_exact_ones_within_their_errors(model, every):
    """Over 25 replicates, errors over standard errors have a mean square near 1 and are seldom beyond 1.96."""
    prompts, responses = rollout(model, rows=12, seed=5)
    value_scores, credit_scores = [], []
    for seed in range(25):
        found = truth(model, prompts, responses, every=every, continuations=64, seed=seed)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            exact = markov.exact_state_values(prompt, response)
            starts = list(range(0, len(response), every))
            stops = [*starts[1:], len(response)]
            for state, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                value_scores.append((found.values[row, state] - exact[start]) / found.value_errors[row, state])
                credit = found.advantages[row, start:stop].sum()
                error = found.standard_errors[row, start:stop].sum()
                credit_scores.append((credit - (exact[stop] - exact[start])) / error)
                assert found.segments[row, start:stop].tolist() == [state] * (stop - start)
            torch.testing.assert_close(found.advantages[row].sum(), exact[-1] - found.values[row, 0])
    for scores in (torch.stack(value_scores), torch.stack(credit_scores)):
        assert 0.85 < scores.square().mean() < 1.15
        assert 0.91 < (scores.abs() < 1.96).double().mean() < 0.97  # 64 draws of 0 or 1 are coarse: .93 to .95


def test_halves_are_made_of_different_continuations_and_average_to_the_whole(model):
    prompts, responses = rollout(model)
    found = truth(model, prompts, responses)
    torch.testing.assert_close((found.first_half + found.second_half) / 2, found.advantages)
    assert not torch.equal(found.first_half, found.second_half)


def test_values_by_hand():
    """Two responses of 3 and 2 tokens, states before tokens 0 and 2 of the first; the second is not complete."""
    positions = torch.tensor([[0, 2], [0, -1]])
    rewards = torch.full((2, 2, 4), torch.nan)
    rewards[0, 0], rewards[0, 1] = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = true_advantages(positions, rewards, torch.tensor([1.0, 0.0]), torch.tensor([3, 2]))
    torch.testing.assert_close(found.advantages[0], torch.tensor([0.25, 0.25, 0.25], dtype=torch.float64))
    torch.testing.assert_close(found.first_half[0], torch.tensor([0.25, 0.25, 0.0], dtype=torch.float64))
    assert found.mask.tolist() == [[True, True, True], [False, False, False]]
    assert found.segments.tolist() == [[0, 0, 1], [-1, -1, -1]]
    error = (0.75 / 3 / 4) ** 0.5  # both states: squared deviations .75 over 3 degrees of freedom, 4 continuations
    torch.testing.assert_close(found.value_errors[0], torch.full((2,), error, dtype=torch.float64))
    torch.testing.assert_close(found.standard_errors[0, 0], torch.tensor(error * 2**0.5 / 2, dtype=torch.float64))
    torch.testing.assert_close(found.standard_errors[0, 2], torch.tensor(error, dtype=torch.float64))


def test_shared_prefixes_are_sampled_once(model):
    prompts, responses = [[2], [2], [3]], [[4, 5, 1], [4, 6, 1], [4, 5, 1]]
    result = valued(model, prompts, responses)
    assert result.done == 4 + 3  # nothing, 4, 45 and 46 after 2; nothing, 4, 45 after 3
    assert torch.equal(result.rewards[0, :2], result.rewards[1, :2])
    assert not torch.equal(result.rewards[0, 2], result.rewards[1, 2])


class Clock:
    """One second later at each look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_a_stopped_run_leaves_whole_responses_and_goes_on_to_the_same_end(model, tmp_path):
    prompts, responses = rollout(model, rows=12)
    whole = valued(model, prompts, responses, batch_rows=256)
    path = tmp_path / "records.jsonl"
    part = valued(model, prompts, responses, batch_rows=256, records=path, budget_minutes=5 / 60, clock=Clock())
    assert part.left > 0 and part.done > 0 and part.done + part.left == whole.done
    known = ~part.rewards.isnan().any(2)
    states = part.positions >= 0
    complete = ((known & states) == states).all(1)
    assert complete.any() and not complete.all()
    assert torch.equal(part.rewards[known], whole.rewards[known])
    with path.open("a") as file:  # a process killed while it wrote
        file.write('{"prefix": 99, "rew')
    rest = valued(model, prompts, responses, batch_rows=256, records=path)
    assert rest.left == 0 and rest.sampled_tokens == whole.sampled_tokens
    torch.testing.assert_close(rest.rewards, whole.rewards, rtol=0, atol=0, equal_nan=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 1 + whole.done and len({line["prefix"] for line in lines[1:]}) == whole.done


def test_a_lost_line_in_the_middle_of_a_batch_is_sampled_again_and_nothing_else_is_written(model, tmp_path):
    prompts, responses = rollout(model)
    path = tmp_path / "records.jsonl"
    whole = valued(model, prompts, responses, records=path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    again = valued(model, prompts, responses, records=path)
    torch.testing.assert_close(again.rewards, whole.rewards, rtol=0, atol=0, equal_nan=True)
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)


def test_records_of_something_else_are_refused_and_left_alone(model, tmp_path):
    prompts, responses = rollout(model)
    path = tmp_path / "records.jsonl"
    valued(model, prompts, responses, records=path)
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"another audit: seed \(0 there, 1 here\)"):
        valued(model, prompts, responses, records=path, seed=1)
    assert path.read_text() == before
    path.write_text("some text\n")
    with pytest.raises(ConfigError, match="not a file of continuations"):
        valued(model, prompts, responses, records=path)
    assert path.read_text() == "some text\n"


def test_unscorable_continuations_are_left_out_and_unscorable_states_take_their_response_with_them():
    positions = torch.tensor([[0], [0]])
    rewards = torch.tensor([[[1.0, torch.nan, 0.0, torch.nan]], [[torch.nan] * 4]])
    found = true_advantages(positions, rewards, torch.tensor([1.0, 1.0]), torch.tensor([1, 1]))
    assert found.values[0, 0] == 0.5 and found.mask.tolist() == [[True], [False]]


def test_states_whose_continuations_all_agree_are_not_taken_as_certain():
    rewards = torch.tensor([[[1.0] * 8, [1.0, 0.0] * 4]])
    found = true_advantages(torch.tensor([[0, 1]]), rewards, torch.tensor([1.0]), torch.tensor([2]))
    assert 0 < found.value_errors[0, 0] < found.value_errors[0, 1]


def test_rows_that_fit_follow_from_the_models_size(model):
    per_row = 2 * 1 * 2 * 4 * 4 * 10  # keys and values, one layer, two heads of width 4, float32, 10 tokens
    assert rows_that_fit(model, 10, cache_bytes=7 * per_row + 1) == 7
    assert rows_that_fit(model, 10, cache_bytes=1) == 1


def test_wrong_arguments_are_named(model):
    with pytest.raises(ConfigError, match="continuations must be an even number of at least 4, got 3"):
        ContinuationConfig(continuations=3)
    with pytest.raises(ConfigError, match="budget_minutes must be above 0"):
        ContinuationConfig(budget_minutes=0.0)
    with pytest.raises(ConfigError, match="limits must be one number"):
        sample_continuations(model, [[2]], count=1, limits=[0], eos_ids=[1], pad_id=0)
    with pytest.raises(EvidenceError, match="response 0 has 1 prompt and 21 response tokens"):
        valued(model, [[2]], [[3] * 21])
    with pytest.raises(EvidenceError, match="must start with 0"):
        true_advantages(torch.tensor([[1]]), torch.zeros(1, 1, 4), torch.zeros(1), torch.tensor([2]))
