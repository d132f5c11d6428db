"""Responses sampled from the bundled model, read and credited."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comppo.errors import ConfigError
from comppo.inspect.sampling import Plan, sample_and_inspect
from comppo.report.inspect_page import render
from comppo.tasks.base_models import resolve_model
from comppo.tasks.chain import chain_reward

ROWS = [
    {"prompt": "a7 b3 ca@1 db+5 ec+4 fd@9 ge@9 hf+6 ?g>", "answer": "5"},
    {"prompt": "a2 b7 ca+3 db@7 ed@5 fc+0 ?f>", "answer": "5"},
]
PLAN = Plan(reward_funcs=[chain_reward], responses=3, max_new_tokens=60, keys=3)
SCORED = [
    "Comp-GAE", "GRPO", "Fixed GAE", "GAE", "Redistribution", "Prefix tree", "Shuffled gates", "Gates by position",
    "Inverted gates", "Sharpening",
]  # fmt: skip


@pytest.fixture(scope="module")
def chain():
    folder = resolve_model("bundled")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def inspection(chain):
    return sample_and_inspect(*chain, ROWS, PLAN, title="t")


def test_every_operator_sees_the_same_responses(inspection):
    assert [operator.label for operator in inspection.operators] == SCORED
    assert [sample.group for sample in inspection.samples] == [0, 0, 0, 1, 1, 1]
    assert all(sample.reward in (0.0, 1.0) for sample in inspection.samples)
    assert {"statistic", "logp", "entropy", "sink_mass", "value"} == set(inspection.samples[0].series)
    assert "Comp-GAE" in render(inspection)
    for sample in inspection.samples:
        for operator, credit in zip(inspection.operators, sample.credit, strict=True):
            if credit.decays is None:
                continue
            carried = 0.0
            for t in reversed(range(len(sample.tokens))):
                carried = credit.deltas[t] + credit.decays[t] * carried
                assert carried == pytest.approx(credit.advantages[t], abs=1e-5), operator.label


def test_gated_operators_share_their_mean_gate(inspection):
    means = {}
    for index, operator in enumerate(inspection.operators):
        gates = [g for sample in inspection.samples for g in sample.credit[index].gates or ()]
        if gates:
            means[operator.label] = sum(gates) / len(gates)
    assert set(means) == {"Comp-GAE", "Fixed GAE", "Shuffled gates", "Gates by position", "Inverted gates"}
    for mean in means.values():
        assert mean == pytest.approx(means["Comp-GAE"], abs=1e-3)


def test_what_was_read_is_of_the_emitting_position(chain, inspection):
    model, tokenizer = chain
    for sample in inspection.samples:
        ids = tokenizer.convert_tokens_to_ids([*sample.prompt, *sample.tokens])
        with torch.no_grad():
            model.set_attn_implementation("eager")
            out = model(torch.tensor([ids]), output_attentions=True)
            model.set_attn_implementation("sdpa")
        start = len(sample.prompt) - 1
        logps = out.logits[0, start:-1].log_softmax(-1)
        wanted = logps.gather(1, torch.tensor(ids[start + 1 :])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.series["logp"]), wanted, rtol=1e-3, atol=1e-4, check_dtype=False)
        last = out.attentions[-1][0].mean(0)[start:-1]  # the last third of three layers
        for row, keys in zip(last, sample.keys, strict=True):
            assert [weight for _, weight in keys] == pytest.approx(row.topk(3).values.tolist(), rel=1e-3, abs=1e-5)


def test_a_seed_repeats_and_leaves_the_random_state(chain, inspection):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = sample_and_inspect(*chain, ROWS, PLAN, title="t")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert render(again) == render(inspection)
    other = sample_and_inspect(*chain, ROWS, dataclasses.replace(PLAN, seed=1), title="t")
    assert render(other) != render(inspection)


def test_without_rewards_a_unit_of_reward_is_carried(chain):
    plan = dataclasses.replace(PLAN, reward_funcs=())
    found = sample_and_inspect(*chain, ROWS[:1], plan, title="t")
    assert "GRPO" not in [operator.label for operator in found.operators]
    assert any("No reward function" in note for note in found.notes)
    for sample in found.samples:
        assert sample.reward is None and "value" not in sample.series
        credit, kept = sample.credit[0], 1.0
        for t in reversed(range(len(sample.tokens))):
            assert credit.advantages[t] == pytest.approx(kept, rel=1e-4)
            kept *= credit.gates[t - 1]


def test_unscorable_responses_get_no_credit(chain):
    def odd(completions, **_):
        return [None if index == 1 else float(index) for index, _ in enumerate(completions)]

    found = sample_and_inspect(*chain, ROWS[:1], dataclasses.replace(PLAN, reward_funcs=[odd]), title="t")
    assert [sample.reward for sample in found.samples] == [0.0, None, 2.0]
    assert all(value == 0 for credit in found.samples[1].credit for value in credit.advantages)


def test_one_response_has_no_group(chain):
    found = sample_and_inspect(*chain, ROWS, dataclasses.replace(PLAN, responses=1), title="t")
    labels = [operator.label for operator in found.operators]
    assert "GRPO" not in labels and "Prefix tree" not in labels and "Comp-GAE" in labels


def test_a_critic_gives_the_values(chain):
    def critic(batch, computation, baseline):
        assert baseline.shape == (6,) and batch.mask.shape == computation.logps.shape
        return torch.full_like(computation.logps, 0.25)

    found = sample_and_inspect(*chain, ROWS, dataclasses.replace(PLAN, critic=critic), title="t")
    assert set(found.samples[0].series["value"]) == {0.25}
    assert not any("There is no critic" in note for note in found.notes)


def test_nothing_to_sample_is_refused(chain):
    with pytest.raises(ConfigError, match="no prompts"):
        sample_and_inspect(*chain, [], PLAN, title="t")
    with pytest.raises(ConfigError, match="responses must be at least 1, got 0"):
        Plan(responses=0)
    with pytest.raises(ConfigError, match="a prompt has no tokens"):
        sample_and_inspect(*chain, [{"prompt": ""}], PLAN, title="t")
