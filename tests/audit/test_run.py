"""Whole audits of the bundled model, small ones, and the command."""

import json
import re

import pytest
import torch
from click.testing import CliRunner

from comppo.audit.config import AuditConfig
from comppo.audit.operators import OPERATORS, Rollouts, critic_credit, group_credit
from comppo.audit.responses import Policy, sample_batch
from comppo.audit.run import _decisive, run_audit
from comppo.audit.table import as_table
from comppo.cli import cli
from comppo.computation import read_computation
from comppo.errors import ConfigError, EvidenceError
from comppo.tasks.base_models import resolve_model
from comppo.tasks.chain import EOS, TOKEN_IDS, chain_reward
from comppo.tasks.chain_steps import parse_prompt
from comppo.tasks.registry import load_task

SMALL = {"responses": 16, "group_size": 4, "continuations": 16, "every": 13, "critic_responses": 32, "bootstrap": 200}


@pytest.fixture(scope="module")
def policy():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("bundled")
    return Policy.of(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), [chain_reward],
        max_new_tokens=52, temperature=1.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(policy):
    rows = load_task("chain", params={"prompts": 8, "eval_prompts": 4}).eval_dataset
    batch = sample_batch(policy, [rows[i] for i in range(4)], 4, seed=0)
    read = read_computation(policy.model, batch.input_ids, batch.attention_mask, batch.mask.shape[1])
    return Rollouts(batch=batch, computation=read, seed=0)


@pytest.fixture(scope="module")
def result():
    return run_audit(AuditConfig(**SMALL))


def test_responses_are_laid_out_and_scored_as_in_training(policy, rollouts):
    batch = rollouts.batch
    for row in range(len(batch.rows)):
        real = batch.attention_mask[row]
        assert batch.input_ids[row, real].tolist() == batch.prompt_ids[row] + batch.response_ids[row]
        assert batch.completion_ids[row, batch.mask[row]].tolist() == batch.response_ids[row]
        text = policy.tokenizer.decode(batch.response_ids[row], skip_special_tokens=True)
        expected = chain_reward([text], [batch.rows[row]["answer"]], [batch.response_ids[row]])[0]
        assert batch.rewards[row] == expected
    assert batch.prompts.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert policy.eos_ids == (TOKEN_IDS[EOS],)


def test_decisive_tokens_are_the_digits_of_the_asked_chain(rollouts):
    decisive = _decisive("chain", rollouts.batch)
    places = parse_prompt(rollouts.batch.rows[0]["prompt"]).decisive_positions()
    kept = [p for p in places if p < len(rollouts.batch.response_ids[0])]
    assert decisive[0].nonzero().squeeze(1).tolist() == kept
    assert _decisive("reasoning_gym:basic_arithmetic", rollouts.batch) is None


def test_operators_give_what_their_formulas_say(rollouts):
    batch = rollouts.batch
    rewards = torch.arange(16.0) % 3
    values = torch.where(batch.mask, 0.25, 0.0)
    credit = critic_credit("gae", rollouts, rewards, values, lam=1.0).advantages
    torch.testing.assert_close(credit, torch.where(batch.mask, rewards[:, None] - 0.25, 0.0))
    zero = critic_credit("gae", rollouts, rewards, values, lam=0.0).advantages
    last = batch.mask & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))
    torch.testing.assert_close(zero, torch.where(last, rewards[:, None] - 0.25, 0.0))
    sharpening = group_credit("sharpening", rollouts, rewards)
    assert torch.equal(sharpening, group_credit("sharpening", rollouts, rewards.flip(0)))
    grpo = group_credit("grpo", rollouts, rewards).view(4, 4, -1)
    assert torch.allclose((grpo[:, :, 0]).sum(1), torch.zeros(4), atol=1e-6)
    spread = group_credit("redistribute", rollouts, rewards).sum(1) / batch.mask.sum(1)
    torch.testing.assert_close(spread, grpo[:, :, 0].flatten())
    gates = {control: rollouts.gates(control) for control in (None, "shuffled", "inverted")}
    assert not torch.equal(gates[None], gates["shuffled"]) and not torch.equal(gates[None], gates["inverted"])
    for control in ("shuffled", "inverted"):
        assert torch.equal(gates[None].sort(1).values, gates[control].sort(1).values)


def test_an_audit_gives_a_row_per_operator_and_is_json(result):
    written = json.loads(json.dumps(result, allow_nan=False))
    rows = {row["operator"]: row for row in written["operators"]}
    assert set(rows) == set(OPERATORS)
    for row in rows.values():
        assert {"fidelity", "low", "high", "cosine", "cosine_other", "drift", "within"} <= set(row)
    order = [row["fidelity"] for row in written["operators"] if row["fidelity"] is not None]
    assert order == sorted(order, reverse=True)
    assert rows["oracle"]["drift"] is None and rows["sharpening"]["without_sharpening"] is None
    assert rows["grpo"]["within"] is None and rows["grpo"]["difference"] == 0.0
    assert rows["sharpening"]["drift"] == pytest.approx(rows["sharpening"]["fidelity"])  # it never looked at rewards
    assert written["prefixes"]["left"] == 0 and written["responses"] == 16 and written["prompts"] == 4
    collision = written["proxies"]["statistics"]["collision"]
    assert collision["layers"] == [0, 1, 2] and [len(row) for row in collision["partial"]] == [4, 4, 4]
    assert set(written["critics"]) == {"gae", "comppo", "comppo_shuffled", "comppo_inverted"}


def test_the_table_has_every_operator_and_says_what_was_left(result):
    text = as_table(result)
    for name in OPERATORS:
        assert re.search(rf"^\| {name} \|", text, re.MULTILINE)
    left = {**result, "prefixes": {**result["prefixes"], "left": 7}}
    assert "The budget left 7 prefixes" in as_table(left)


def test_the_command_writes_json_and_a_second_run_goes_on_from_the_records(tmp_path):
    output, records = tmp_path / "new" / "audit.json", tmp_path / "new" / "audit.continuations.jsonl"
    arguments = [
        "audit", "bundled", "--responses", "8", "--group-size", "4", "--continuations", "4", "--every", "26",
        "--operators", "oracle,grpo", "--no-gradients", "--no-proxies", "--json", str(output),
    ]  # fmt: skip
    first = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert first.exit_code == 0 and "| oracle |" in first.output and f"Written: {output}" in first.output
    written, lines = json.loads(output.read_text()), records.read_text()
    assert {row["operator"] for row in written["operators"]} == {"oracle", "grpo", "sharpening"}
    assert "cosine" not in written["operators"][0] and "proxies" not in written
    CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert records.read_text() == lines
    assert json.loads(output.read_text())["operators"] == written["operators"]
    with pytest.raises(ConfigError, match="another audit"):
        CliRunner().invoke(cli, [*arguments, "--seed", "1"], catch_exceptions=False)


def test_a_budget_that_is_too_small_says_what_is_left(tmp_path):
    with pytest.raises(EvidenceError, match=r"budget of 1e-09 minutes left 0 prompts .* prefixes missing"):
        run_audit(AuditConfig(**{**SMALL, "budget_minutes": 1e-9}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"operators": ("ppo",)}, "'ppo' is unknown: choose from grpo"),
        ({"responses": 12}, "responses=12 must be a multiple of group_size=8"),
        ({"responses": 8}, "at least two groups"),
        ({"continuations": 3}, "continuations must be an even number"),
        ({"lam": 2.0}, r"lam must lie in \[0, 1\]"),
        ({"critic_responses": 2}, "critic_responses=2 must be at least"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        AuditConfig(**settings)


def test_wrong_task_parameters_and_models_are_named():
    for text in ("{", "[1]"):
        with pytest.raises(ConfigError, match="--task-params"):
            CliRunner().invoke(cli, ["audit", "--task-params", text], catch_exceptions=False)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        run_audit(AuditConfig(model="./no/such/folder"))
