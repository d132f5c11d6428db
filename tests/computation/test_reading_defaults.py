"""The study of the default reading: measures against closed forms, the rule, a whole run on made-up readings."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))

import reading_candidates
import reading_defaults
import reading_measures as measures
import reading_page
import reading_samples
from reading_candidates import Candidate

RESPONSE = np.repeat(np.arange(4), [5, 8, 3, 6])
STEP = np.concatenate([np.arange(n) for n in (5, 8, 3, 6)])
ONES = np.ones(4)


def close(got, want, atol=1e-9):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
    ("how", "explained"),
    [
        ("none", lambda log_keys, token: np.full(22, 3.0)),
        ("log_keys", lambda log_keys, token: 2 - 5 * log_keys),
        ("position", lambda log_keys, token: 7.0 * STEP - 1),
        ("position_bins", lambda log_keys, token: np.array([4, 1, 1, -2, -2, -2, -2, 9.0])[STEP]),
        ("log_keys_position", lambda log_keys, token: 4 * log_keys - 3 * np.log1p(STEP)),
        ("log_keys_token", lambda log_keys, token: np.array([3.0, -1.0])[token] + 0 * log_keys),
    ],
)
def test_residuals_take_away_what_they_name_and_no_more(how, explained):
    """Adding what is explained changes nothing, and what is left has mean 0."""
    log_keys, token = np.log(40 + STEP + 3.0 * RESPONSE), np.arange(22) % 2
    options = {"how": how, "log_keys": log_keys, "step": STEP, "token": token}
    x = noise(22, 2)
    left = measures.residuals(x, **options)
    if how != "log_keys_token":  # two fits, one after the other, are no joint fit
        close(measures.residuals(x + explained(log_keys, token)[:, None], **options), left)
    close(left.mean(0), 0)
    close(measures.residuals(left, **options) - left, 0, atol=1e-9 if how != "log_keys_token" else 0.2)
    assert left.std() > 0.5


def test_rare_tokens_count_as_one():
    token, x = np.array([5, 5, 5, 8, 8, 1]), np.array([1.0, 2, 6, 4, 8, 3])
    close(measures.without_identity(x, token), [-2, -1, 3, -1, 3, -2])


def test_mixed_batches_read_each_token_behind_either_prompt():
    """A constant added behind the longer prompt is all of the shift; on two prompt lengths, log n takes it away."""
    response, step = np.repeat(np.arange(4), 6), np.tile(np.arange(6), 4)
    near, token = np.tile(noise(6, 1), (4, 1)), np.zeros(24, dtype=np.int64)
    keys = np.full(24, np.log(50.0)), np.full(24, np.log(700.0))
    left = measures.mixed_residuals(near, near + 5, response, *keys, how="none", step=step, token=token)
    close(left[1] - left[0], 5)
    close(measures.shift(*left, response)(ONES), 5 / near.std())
    left = measures.mixed_residuals(near, near + 5, response, *keys, how="log_keys", step=step, token=token)
    close(left[1] - left[0], 0)


def test_position_share_of_a_cubic_is_one_and_weights_are_copies():
    place = np.log1p(STEP)
    x = np.stack([1 - 2 * place + place**3, *noise(2, 22)], -1)
    share = measures.position_share(x, RESPONSE, STEP)
    close(share(ONES)[0], 1)
    copied = np.concatenate([np.flatnonzero(r == RESPONSE) for r in (0, 1, 1, 3)])
    basis = np.vander(place[copied], 4)
    error = x[copied] - basis @ np.linalg.lstsq(basis, x[copied], rcond=None)[0]
    n = len(copied)
    adjusted = 1 - (error**2).sum(0) / (x[copied].var(0) * n) * (n - 1) / (n - 4)
    close(share(np.array([1.0, 2, 0, 1])), adjusted)


def test_identity_share_is_one_for_a_function_of_the_token_and_counts_pairs_of_different_responses():
    response, token = np.repeat(np.arange(3), 4), np.tile([0, 1, 0, 1], 3)
    x = np.stack([np.where(token == 0, 2.0, -2.0), np.tile([1.0, 1, -1, -1], 3)], -1)
    close(measures.identity_share(x, response, token)(np.ones(3)), [1, 0])
    # Token 0 holds a, b, c in three responses, token 1 the opposites: pair mean (ab + ac + bc) / 3, mean 0
    a, b, c = 1.0, 2.0, 6.0
    x = np.array([a, -a, b, -b, c, -c])[:, None]
    response, token = np.repeat(np.arange(3), 2), np.tile([0, 1], 3)
    close(measures.identity_share(x, response, token)(np.ones(3)), (a * b + a * c + b * c) / (a * a + b * b + c * c))
    # A response drawn twice makes no pair with itself: pairs aab, aac, bc of 2 + 2 + 1, over aa twice, bb, cc
    drawn = measures.identity_share(x, response, token)(np.array([2.0, 1, 1]))
    close(drawn, (2 * a * b + 2 * a * c + b * c) / 5 / ((2 * a * a + b * b + c * c) / 4))


def test_identity_share_leaves_rare_tokens_out():
    response, token = np.array([0, 0, 1, 1, 2, 2, 2]), np.array([0, 1, 0, 1, 0, 1, 9])
    x = np.array([1.0, -1, 1, -1, 1, -1, 1000])[:, None]
    close(measures.identity_share(x, response, token)(np.ones(3)), 1)


def test_response_share():
    """1 where a response is constant; -1 / (n - 1) where it alternates around one mean."""
    x = np.stack([np.array([1.0, -3, 2, 7])[RESPONSE], noise(22)], -1)
    close(measures.response_share(x, RESPONSE)(ONES)[0], 1)
    response = np.repeat(np.arange(3), 6)
    close(measures.response_share(np.tile([1.0, -1.0], 9)[:, None], response)(np.ones(3)), -1 / 5)


def test_correlation_shift_and_split_half():
    x = noise(22, 3)
    close(measures.correlation(x, 3 - 2 * x, RESPONSE)(ONES), -1)
    close(measures.correlation(x, x[:, :1], RESPONSE)(ONES)[2], np.corrcoef(x[:, 2], x[:, 0])[0, 1])
    used = STEP > 1
    got = measures.correlation(x, x[:, :1], RESPONSE, used)(ONES)[2]
    close(got, np.corrcoef(x[used, 2], x[used, 0])[0, 1])
    close(measures.shift(x, 2 * x + 3, RESPONSE)(ONES), (x.mean(0) + 3) / x.std(0))
    # Signal of variance 1, noise of variance 1/2 in each half, all orthogonal: r = 2/3, twice as many heads 4/5
    signal, first = np.array([1.0, 1, -1, -1]), np.array([1.0, -1, 1, -1]) / 2**0.5
    second = np.array([1.0, -1, -1, 1]) / 2**0.5
    halves = np.stack([signal + first, signal + second], 1)[:, :, None, None].repeat(3, 2)
    close(measures.split_half(halves, np.array([0, 0, 1, 1]))(np.ones(2)), 4 / 5)


def test_layer_sets():
    sets = reading_candidates.layer_sets(30)
    assert sets["middle third"] == tuple(range(10, 20))
    assert sets["every second of the middle third"] == (10, 12, 14, 16, 18)
    assert sets["middle quarter"] == tuple(range(11, 19))
    assert sets["single middle layer"] == (15,)
    assert sets["every fourth layer"] == (2, 6, 10, 14, 18, 22, 26)
    assert len(sets["first third"]) == len(sets["last third"]) == 10
    small = {"middle third": (1,), "all": (0, 1, 2), "first third": (0,), "last third": (2,)}
    assert reading_candidates.layer_sets(3) == small


def rule_case(**changes):
    """Four candidates with 8, 8, 2 and 1 layers: the third is within a tie of the best, the fourth is not."""
    numbers = (tuple(range(8)), tuple(range(8)), (0, 1), (0,))
    candidates = [
        Candidate(statistic="maximum", sink_excluded=True, layers=str(n), numbers=n, residualize=how)
        for n, how in zip(numbers, ("none", "log_keys", "none", "none"), strict=True)
    ]
    found = {
        "score": np.array([0.5, 0.51, 0.495, 0.4]),
        "worst_position": np.full(4, 0.05),
        "agreement": np.full(4, 0.9),
        "shift": np.full(4, -0.5),
    }
    for name, (place, value) in changes.items():
        found[name][place] = value
    return found, candidates


def test_the_rule_takes_the_greatest_score_and_breaks_ties_by_layers():
    assert reading_candidates.choose(*rule_case()) == 2
    assert reading_candidates.choose(*rule_case(score=(1, 0.53))) == 1
    assert reading_candidates.choose(*rule_case(score=(2, 0.48))) == 1


@pytest.mark.parametrize(("name", "value"), [("worst_position", 0.06), ("agreement", 0.89), ("shift", 0.51)])
def test_the_rule_keeps_its_bounds(name, value):
    assert reading_candidates.choose(*rule_case(**{name: (2, value)})) == 1


def test_the_rule_never_takes_the_reference_and_may_take_nothing():
    found, candidates = rule_case()
    slots = Candidate.__slots__
    named = [Candidate(**{f: getattr(c, f) for f in slots} | {"residualize": "log_keys_token"}) for c in candidates]
    assert reading_candidates.choose(found, named) is None
    named = [Candidate(**{f: getattr(c, f) for f in slots} | {"residualize": "log_keys_position"}) for c in candidates]
    assert reading_candidates.choose(found, named) is None
    assert reading_candidates.choose(found, named, reading_candidates.Rule(added=True)) == 2
    assert reading_candidates.choose(found | {"worst_position": np.full(4, 0.1)}, candidates) is None


def test_a_sample_is_read_at_the_emitting_positions():
    """One layer and head of the chain model, against the whole attention matrix."""
    torch.manual_seed(0)
    model = reading_samples.load_chain()[0]
    sample = reading_samples.Sample(prompt=[5, 9, 12, 3], response=[8, 2, 7], longer=[4, 4, 5, 9, 12, 3])
    read = reading_samples.read_samples(model, [sample, sample])
    assert read.token.tolist() == [3, 8, 2] * 2
    assert read.step.tolist() == [0, 1, 2] * 2
    assert read.response.tolist() == [0] * 3 + [1] * 3
    assert read.keys["near"].tolist() == [4, 5, 6] * 2
    assert read.keys["far"].tolist() == [6, 7, 8] * 2
    model.set_attn_implementation("eager")
    for side, prompt in (("near", sample.prompt), ("far", sample.longer)):
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([prompt + sample.response]), output_attentions=True).attentions
        p = whole[1][0, 2, len(prompt) - 1 : -1].double()
        rest = p[:, 1:] / p[:, 1:].sum(-1, keepdim=True)
        for excluded, rows in ((True, rest), (False, p)):
            got = {name: read.values[side, name, excluded][:3, 1, 2] for name in ("maximum", "effective_keys")}
            close(got["maximum"], rows.amax(-1), atol=1e-6)
            close(got["effective_keys"], 1 / rows.square().sum(-1), atol=1e-4)
        close(read.values[side, "sink_mass", True][:3, 1, 2], p[:, 0], atol=1e-6)


def made_up(far):
    """Readings of 6 responses, 6 layers and 4 heads, in which one signal per token is shared by all heads."""
    rng = np.random.default_rng(0)
    response, step = np.repeat(np.arange(6), 30), np.tile(np.arange(30), 6)
    signal = rng.normal(size=(180, 1, 1))
    values = {}
    for side in ("near", "far") if far else ("near",):
        for name, excluded in (("collision", True), ("collision", False), ("entropy", True), ("sink_mass", True)):
            scale = {"entropy": 10.0, "sink_mass": 2.0}.get(name, 0.3)
            drift = step[:, None, None] if name == "sink_mass" else 0
            values[side, name, excluded] = (signal + scale * rng.normal(size=(180, 6, 4)) + drift).astype(np.float32)
    keys = {side: (40.0 if side == "near" else 700.0) + step for side in (("near", "far") if far else ("near",))}
    token = rng.integers(0, 5, 180)
    return reading_samples.Readings(response=response, step=step, token=token, keys=keys, values=values)


@pytest.mark.parametrize("far", [True, False])
def test_a_whole_run_finds_the_planted_statistic_and_writes_it_down(far):
    sample = reading_samples.Sample(prompt=[1] * 40, response=[1] * 30, longer=[1] * 700 if far else None)
    record = reading_defaults.study([sample] * 6, made_up(far), seed=0, replicates=5)
    chosen = record["candidates"][record["chosen"]]
    assert chosen["statistic"] == "collision" and len(chosen["numbers"]) <= 2
    assert chosen["score"][0] > 0.9
    drifting = [c for c in record["candidates"] if c["statistic"] == "sink_mass" and c["residualize"] == "none"]
    assert drifting and not any(c["eligible"] for c in drifting)
    assert all(("agreement" in c) == far for c in record["candidates"])
    settings = {"rule": "the rule", "seed": 0, "replicates": 5, "python": "3", "versions": {"numpy": "2"}}
    text = reading_page.page(settings, {"smollm2": record})
    assert "**Chosen: collision" in text and ("not applicable" in text) != far
    read = json.loads(reading_page.to_json(settings, {"smollm2": record, "chain": record}))["models"]["chain"]
    row = dict(zip(read["columns"], read["candidates"][record["chosen"]], strict=True))
    assert row["score"] == chosen["score"][0] and row["residualize"] == chosen["residualize"]
    assert read["named"]["chosen"]["score"] == chosen["score"]
