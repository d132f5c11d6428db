"""Credit fidelity against closed forms: columns of a Hadamard matrix are exactly uncorrelated."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import markov
import pytest
import torch

from comppo.audit import (
    ContinuationConfig,
    credit_fidelity,
    sample_continuations,
    true_advantages,
    value_prefixes,
)
from comppo.audit.controls import reversed_in_time, shuffled_in_time
from comppo.audit.resampling import interval, student_quantile
from comppo.errors import ConfigError, EvidenceError

ROWS, TOKENS = 4, 8


def hadamard(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


COLUMNS = hadamard(ROWS * TOKENS)
"""Column 0 is constant; the others have mean 0, variance 1 and no correlation with each other. Columns below `TOKENS`
are the same in every row, with a mean of 0 in each; column `TOKENS` is constant within rows."""
MASK = torch.ones(ROWS, TOKENS, dtype=torch.bool)


def column(index):
    return COLUMNS[:, index].view(ROWS, TOKENS)


A, E, F, U = (column(i) for i in (1, 2, 3, 4))
"""True advantages, the noise of both halves, and the noise of an operator."""
FIRST, SECOND = A + E, A + F


def fidelity(credit, first=FIRST, second=SECOND, mask=MASK, **options):
    return credit_fidelity({"it": credit}, first, second, mask, bootstrap=100, **options)["it"]


def test_noise_is_taken_out_and_the_attainable_correlation_is_spearman_browns():
    """corr(h, k) = 1/2, so the mean of the halves has reliability 2/3; A + U has correlation 1/sqrt 2 with A."""
    report = credit_fidelity({"it": A + U, "truth": A}, FIRST, SECOND, MASK, bootstrap=100)
    assert report.attainable == pytest.approx(math.sqrt(2 / 3), abs=1e-14)
    assert report["truth"].fidelity == pytest.approx(1.0, abs=1e-14)
    assert report["it"].fidelity == pytest.approx(math.sqrt(1 / 2), abs=1e-14)
    measured = torch.corrcoef(torch.stack(((A + U).flatten(), ((FIRST + SECOND) / 2).flatten())))[0, 1]
    assert report["it"].correlation == pytest.approx(float(measured), abs=1e-14)
    assert [row.operator for row in report.operators] == ["truth", "it"]


@pytest.mark.parametrize(("scale", "shift", "sign"), [(3.0, 0.0, 1), (1e-3, 7.0, 1), (-2.0, 1.0, -1)])
def test_scale_and_shift_do_not_matter_and_the_sign_does(scale, shift, sign):
    assert fidelity(scale * (A + U) + shift).fidelity == pytest.approx(sign * math.sqrt(1 / 2), abs=1e-9)


def test_an_operator_made_of_the_continuations_is_judged_by_the_other_half():
    """h against k: cov(h, k) / sqrt(var(h) cov(h, k)) = 1 / sqrt 2. Where k matters, its sign is A's; h is 2 A
    or 0 there, equally often: three quarters of the signs agree."""
    assert fidelity((FIRST, SECOND)).fidelity == pytest.approx(math.sqrt(1 / 2), abs=1e-14)
    assert fidelity((E, F)).fidelity == pytest.approx(0.0, abs=1e-14)
    errors = torch.full_like(A, 0.1)
    assert fidelity((FIRST, SECOND), standard_errors=errors).sign_agreement == 0.75


def test_what_is_constant_within_responses_tells_no_tokens_apart():
    between = column(TOKENS)
    truth = A + between
    broadcast = fidelity(between, truth + E, truth + F)
    assert broadcast.fidelity == pytest.approx(math.sqrt(1 / 2), abs=1e-14)
    assert math.isnan(broadcast.within) and math.isnan(broadcast.within_low)
    assert fidelity(A, truth + E, truth + F).within == pytest.approx(1.0, abs=1e-14)
    assert fidelity(A + between, A + E, A + F).within == pytest.approx(1.0, abs=1e-14)
    assert math.isnan(fidelity(torch.ones_like(A)).fidelity)


def test_halves_of_the_response():
    early = torch.arange(TOKENS) < TOKENS // 2
    row = fidelity(torch.where(early, A, column(TOKENS + 2)))
    assert row.early == pytest.approx(1.0, abs=1e-14) and row.late == pytest.approx(0.0, abs=1e-14)


def test_the_sharpening_direction_is_projected_out_of_credit_and_truth():
    sharpening = column(5)
    first, second = FIRST + 2 * sharpening, SECOND + 2 * sharpening
    pure = fidelity(sharpening, first, second, sharpening=sharpening)
    assert pure.fidelity == pytest.approx(2 / math.sqrt(5), abs=1e-14)
    assert math.isnan(pure.without_sharpening)
    mixed = fidelity(3 * sharpening + A + U, first, second, sharpening=sharpening + 4.0)
    assert mixed.without_sharpening == pytest.approx(math.sqrt(1 / 2), abs=1e-14)
    assert math.isnan(fidelity(A).without_sharpening)


def test_gain_bias_and_variance():
    row = fidelity(2 * (A + U) + 3.0, FIRST + 1.0, SECOND + 1.0)
    assert (row.gain, row.bias, row.variance) == pytest.approx((2.0, 0.5, 1.0), abs=1e-12)
    wrong = fidelity(-A)
    assert wrong.gain == pytest.approx(-1.0) and math.isnan(wrong.bias) and math.isnan(wrong.variance)


def test_sign_agreement_on_the_tokens_that_matter():
    truth = torch.tensor([[0.5, -0.5, 0.1, 0.3, -0.6]])
    credit = torch.tensor([[1.0, 1.0, -1.0, 0.0, -1.0]])
    mask, errors = torch.ones(1, 5, dtype=torch.bool), torch.full((1, 5), 0.1)
    row = fidelity(credit, truth, truth, mask, standard_errors=errors)
    assert row.sign_agreement == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    report = credit_fidelity({"it": credit}, truth, truth, mask, standard_errors=errors, bootstrap=100)
    assert report.matters == pytest.approx(4 / 5)


def test_share_of_credit_on_decisive_tokens():
    truth = torch.tensor([[3.0, 1.0, 0.0, 0.0]])
    decisive = torch.tensor([[True, False, False, False]])
    report = credit_fidelity(
        {"half": torch.tensor([[1.0, 0.0, -1.0, 0.0]]), "all": torch.tensor([[2.0, 0.0, 0.0, 0.0]])},
        truth, truth, torch.ones(1, 4, dtype=torch.bool), decisive=decisive, bootstrap=100,
    )  # fmt: skip
    assert report["half"].decisive_share == 0.5 and report["all"].decisive_share == 1.0
    assert report.decisive_truth == pytest.approx(0.9) and report.decisive_tokens == 0.25


def test_drift_is_the_mean_fidelity_over_shuffles():
    report = credit_fidelity({"it": A}, FIRST, SECOND, MASK, drift={"it": torch.stack((A, U))}, bootstrap=100)
    assert report["it"].drift == pytest.approx(0.5, abs=1e-14)
    assert fidelity(A).drift != fidelity(A).drift  # not given: NaN


def test_credit_is_averaged_over_segments_as_the_truth_is():
    segments = (torch.arange(TOKENS) // 2).expand(ROWS, -1)
    truth = column(2)  # changes its sign every two tokens: constant in segments
    alternating = 5.0 * column(1)  # cancels in each segment
    assert fidelity(truth + alternating, truth, truth).fidelity == pytest.approx(1 / math.sqrt(26), abs=1e-14)
    assert fidelity(truth + alternating, truth, truth, segments=segments).fidelity == pytest.approx(1.0, abs=1e-14)


def test_padding_dtype_and_what_stands_at_masked_slots_change_nothing():
    generator = torch.Generator().manual_seed(0)
    truth, noise = torch.randn(2, 6, 9, generator=generator)
    mask = torch.arange(9) < torch.tensor([[9], [4], [7], [1], [9], [2]])
    prompts = torch.tensor([5, 5, 7, 7, 2, 2])

    def report(pad, order):
        width = 9 + pad
        wide = [torch.full((6, width), torch.nan) for _ in range(3)]
        keep = torch.zeros(6, width, dtype=torch.bool)
        for row in range(6):
            at = torch.arange(width)[order][: int(mask[row].sum())].sort().values
            for tensor, values in zip(wide, (truth + noise, truth, truth + 0.1 * noise), strict=True):
                tensor[row, at] = values[row, mask[row]]
            keep[row, at] = True
        return credit_fidelity({"it": wide[0]}, wide[1], wide[2], keep, prompts=prompts, bootstrap=100).as_json()

    plain = report(0, slice(None))
    moved = report(3, torch.arange(11, -1, -1))
    for name, value in plain["operators"][0].items():
        assert moved["operators"][0][name] == pytest.approx(value, abs=1e-12), name


def test_the_report_is_json_with_none_where_undefined():
    report = credit_fidelity({"grpo": column(TOKENS), "it": A}, FIRST, SECOND, MASK, reference="grpo", bootstrap=100)
    written = json.loads(json.dumps(report.as_json(), allow_nan=False))
    rows = {row["operator"]: row for row in written["operators"]}
    assert rows["grpo"]["within"] is None and rows["it"]["difference"] == pytest.approx(1.0)
    assert rows["grpo"]["difference"] == 0.0 and written["prompts"] == ROWS
    with pytest.raises(KeyError):
        report["gae"]


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.3027), (3, 3.1824), (7, 2.3646), (30, 2.0423)])
def test_students_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, abs=0.02 if degrees == 3 else 1e-3)


def test_no_interval_with_two_prompts_or_many_undefined_resamples():
    draws = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert math.isnan(interval(draws, 2).low) and not math.isnan(interval(draws, 3).low)
    draws[1:8] = torch.nan
    assert math.isnan(interval(draws, 9).low) and interval(draws, 9).value == 0.0


def simulated(generator, prompts=12, group=4, tokens=10):
    """Truth with an effect of the prompt and of the token; an operator with correlation .6 / sqrt(.36 + .64) = .6."""
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    truth = (0.6 * normal(prompts, 1, 1) + 0.8 * normal(prompts, group, tokens)).view(-1, tokens)
    credit = 0.6 * truth + 0.8 * normal(*truth.shape)
    return credit, truth + normal(*truth.shape), truth + normal(*truth.shape)


def test_intervals_cover_as_often_as_they_say():
    """300 replicates: a coverage of .95 is measured with a standard error of .013."""
    generator, mask = torch.Generator().manual_seed(1), torch.ones(48, 10, dtype=torch.bool)
    prompts = torch.arange(12).repeat_interleave(4)
    covered, values = 0, []
    for seed in range(300):
        credit, first, second = simulated(generator)
        row = credit_fidelity({"it": credit}, first, second, mask, prompts=prompts, bootstrap=200, seed=seed)["it"]
        covered += row.low <= 0.6 <= row.high
        values.append(row.fidelity)
    assert torch.tensor(values).mean() == pytest.approx(0.6, abs=0.015)
    assert 0.91 <= covered / 300 <= 0.99


@pytest.fixture(scope="module")
def chain():
    """24 prompts with 4 responses each, the exact advantages of their tokens, and Monte-Carlo ones."""
    model = markov.make_model()
    prompts = [[2 + i % 6, 2 + i // 6] for i in range(24) for _ in range(4)]
    settings = {"eos_ids": [markov.EOS], "pad_id": markov.PAD}
    responses = sample_continuations(
        model, prompts[::4], count=4, limits=[markov.LIMIT] * 24, generator=torch.Generator().manual_seed(0), **settings
    )
    config = ContinuationConfig(continuations=64, max_new_tokens=markov.LIMIT, seed=1)
    valued = value_prefixes(model, prompts, responses, markov.scorer(prompts), config, **settings)
    outcomes = torch.tensor([markov.reward(p, r) for p, r in zip(prompts, responses, strict=True)])
    truth = true_advantages(valued.positions, valued.rewards, outcomes, torch.tensor([len(r) for r in responses]))
    exact = torch.zeros_like(truth.advantages)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        exact[row, : len(response)] = markov.exact_state_values(prompt, response).diff()
    return exact, outcomes, truth


def test_on_a_chain_with_known_values_the_truth_comes_first_and_wrong_operators_last(chain):
    exact, outcomes, truth = chain
    mask, prompts = truth.mask, torch.arange(24).repeat_interleave(4)
    broadcast = (outcomes.view(24, 4) - outcomes.view(24, 4).mean(1, keepdim=True)).view(-1, 1).expand(mask.shape)
    halves = truth.first_half, truth.second_half
    dice = torch.Generator().manual_seed(0)
    orders = dice.get_state()
    shuffled = tuple(shuffled_in_time(half, mask, dice.set_state(orders)) for half in halves)
    report = credit_fidelity(
        {
            "reversed": tuple(reversed_in_time(half, mask) for half in halves),
            "shuffled": shuffled,
            "broadcast": broadcast,
            "oracle": halves,
            "exact": exact,
        },
        *halves, mask, prompts=prompts, standard_errors=truth.standard_errors, reference="broadcast",
    )  # fmt: skip
    names = [row.operator for row in report.operators]
    assert names[:2] == ["exact", "oracle"] and names[2] == "broadcast" and set(names[3:]) == {"reversed", "shuffled"}
    assert report["exact"].low <= 1.0 <= report["exact"].high
    # Noise takes at most 2.3 % of all tokens beyond two standard errors on the wrong side
    assert report["exact"].sign_agreement > 1 - 2 * 0.023 / report.matters
    measured = torch.corrcoef(torch.stack((exact[mask], truth.advantages[mask])))[0, 1]
    assert report.attainable == pytest.approx(float(measured), abs=0.02)
    halved = [float(torch.corrcoef(torch.stack((exact[mask], half[mask])))[0, 1]) for half in halves]
    assert report["oracle"].fidelity == pytest.approx(sum(halved) / 2, abs=0.02)
    assert report["exact"].difference_low > 0


def broadcast_credit(outcome, group, mask):
    """Reward minus the group's mean, at every token."""
    grouped = outcome.view(-1, group)
    return (grouped - grouped.mean(1, keepdim=True)).view(-1, 1).expand(mask.shape)


def test_on_the_chain_intervals_cover_the_exact_fidelity_of_a_broadcast():
    """Target: the correlation with exact advantages over 100 000 responses. 300 audits of 16 prompts x 4 responses."""
    generator = torch.Generator().manual_seed(0)
    exact, _, _, mask, outcome = markov.simulate(25_000, 4, 16, generator)
    credit = broadcast_credit(outcome, 4, mask)
    target = float(torch.corrcoef(torch.stack((credit[mask], exact[mask])))[0, 1])
    prompts, covered, values = torch.arange(16).repeat_interleave(4), 0, []
    for seed in range(300):
        _, first, second, mask, outcome = markov.simulate(16, 4, 16, generator)
        credit = broadcast_credit(outcome, 4, mask)
        row = credit_fidelity({"it": credit}, first, second, mask, prompts=prompts, bootstrap=200, seed=seed)["it"]
        covered += row.low <= target <= row.high
        values.append(row.fidelity)
    assert torch.tensor(values).mean() == pytest.approx(target, abs=0.02)
    assert 0.91 <= covered / 300 <= 0.99


def test_wrong_orders_by_hand():
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    credit = torch.tensor([[1.0, 9.0, 2.0, 3.0], [9.0, 4.0, 9.0, 9.0]])
    assert reversed_in_time(credit, mask).tolist() == [[3.0, 0.0, 2.0, 1.0], [0.0, 4.0, 0.0, 0.0]]
    moved = shuffled_in_time(credit, mask, torch.Generator().manual_seed(0))
    assert sorted(moved[0, mask[0]].tolist()) == [1.0, 2.0, 3.0] and moved[1].tolist() == [0.0, 4.0, 0.0, 0.0]


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigError, match="'ppo' is not among the operators it"):
        fidelity(A, reference="ppo")
    with pytest.raises(ConfigError, match="bootstrap must be at least 100"):
        credit_fidelity({"it": A}, A, A, MASK, bootstrap=10)
    with pytest.raises(ConfigError, match="advantages is empty"):
        credit_fidelity({}, A, A, MASK)
    with pytest.raises(EvidenceError, match=r"advantages\['it'\] holds a number that is not finite"):
        fidelity(torch.full_like(A, torch.nan))
    with pytest.raises(EvidenceError, match="mask is false everywhere"):
        fidelity(A, mask=torch.zeros_like(MASK))


@pytest.mark.shapes
@pytest.mark.skipif(not os.environ.get("COMPPO_UNHOOKED"), reason="jaxtyping speaks first")
def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(EvidenceError, match=r"first_half has shape \(3, 8\), but mask has \(4, 8\)"):
        fidelity(A, FIRST[:3])
    with pytest.raises(EvidenceError, match="prompts has shape"):
        fidelity(A, prompts=torch.arange(3))
    with pytest.raises(EvidenceError, match=r"drift\['it'\] has shape"):
        credit_fidelity({"it": A}, A, A, MASK, drift={"it": A[:, :3]})


def test_the_example_of_the_documentation_runs():
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    names: dict = {}
    torch.manual_seed(0)
    exec(text.split("```python\n")[1].split("```")[0], names)
    report = names["report"]
    assert report["mine"].fidelity == pytest.approx(2**-0.5, abs=0.1) and math.isnan(report["constant"].fidelity)


def test_auditing_tensors_loads_neither_transformers_nor_trl():
    code = "import sys, comppo.audit; print([m for m in ('transformers', 'trl', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
