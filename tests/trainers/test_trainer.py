"""The trainer as a user meets it: TRL's settings, per-token credit, runs that repeat and resume."""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from comppo.errors import ConfigError, RewardError, RunExistsError, TaskError, UnreadableModelError


def test_advantages_are_per_token_and_the_actor_and_critic_learn(tmp_path):
    run = tiny.trainer(tmp_path)
    before = tiny.weights(run.model)
    run.train()
    credit = run.last_credit
    assert credit.advantages.shape == credit.completion_ids.shape
    rows = credit.mask.sum(1) > 2
    within = torch.stack([a[m].std() for a, m in zip(credit.advantages[rows], credit.mask[rows], strict=True)])
    assert within.max() > 1e-3, "credit varies within a response"
    assert (credit.advantages[~credit.mask] == 0).all()
    assert (tiny.weights(run.model) - before).abs().max() > 0
    # Its last layer starts at zero
    assert run.critic.value.weight.abs().max() > 0
    for name in ("gate_mean", "gate_std", "retention", "value_mean", "explained_variance", "critic_loss", "unscorable"):
        assert len(tiny.logged(run, f"comppo/{name}")) == 2, name
    assert run.sampled_responses == 16
    assert 0 < run.sampled_tokens <= 160


def test_the_mean_gate_is_the_reference(tmp_path):
    run = tiny.trainer(tmp_path, gate_unit="coefficients", gate_minimum=0.8, gate_reference=0.93, gate_maximum=1.0)
    run.train()
    assert tiny.logged(run, "comppo/gate_mean") == pytest.approx([0.93, 0.93], abs=1e-6)
    assert min(tiny.logged(run, "comppo/gate_std")) > 1e-3


def test_the_group_operator_is_trls_grpo_to_the_last_bit(tmp_path):
    # One after the other: a trainer seeds the global generators when it is built
    ours = tiny.trainer(tmp_path / "a", operator="group_relative", max_steps=3)
    ours.train()
    theirs = tiny.trainer(tmp_path / "b", cls=GRPOTrainer, config=GRPOConfig, max_steps=3)
    theirs.train()
    assert torch.equal(tiny.weights(ours.model), tiny.weights(theirs.model))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_generations": 1},
        {"operator": "gae", "critic": "standard", "critic_epochs": 2},
        {"critic": "none"},
        {"operator": "redistribute"},
        {"operator": "prefix_tree", "negative_redistribution": "surprisal", "whiten_advantages": True},
        {"gate_control": "shuffled"},
        {"gate_control": "position_mean"},
        {"gate_control": "constant"},
        {"gate_control": "inverted"},
        {"gate_bootstrap": True, "length_adaptive_alpha": 0.05, "critic_lam": 0.9},
        {
            "gate_statistic": "output_entropy",
            "gate_residualize": "position",
            "gate_unit": "tokens",
            "gate_minimum": 2.0,
        },
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "steps_per_generation": 4, "max_steps": 4},
        {"loss_type": "cispo", "epsilon_high": 5.0, "mask_truncated_completions": True},
        {"beta": 0.1, "peft_config": LoraConfig(r=4, target_modules=["q_proj"])},
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in list(changes.items())[:2]),
)
def test_settings_train_to_finite_weights(changes, tmp_path):
    run = tiny.trainer(tmp_path, **changes)
    before = tiny.weights(run.model)
    run.train()
    after = tiny.weights(run.model)
    assert after.isfinite().all()
    assert not torch.equal(before, after)


OWN_STATISTIC = """
from comppo.computation import AttentionStatistic
peak = AttentionStatistic("peak", lambda rows: rows.rest_maximum * rows.rest_visible_keys)
def surprise(computation):
    return computation.hidden.norm(dim=-1) * computation.sink_mass
"""


@pytest.fixture
def own_statistics(tmp_path, monkeypatch):
    (tmp_path / "statistics_of_a_trainer.py").write_text(OWN_STATISTIC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_statistic": "router_entropy"},
        {"gate_statistic": "router_top_k_mass", "critic_features": ["statistic", "group_mean"]},
        {"gate_statistic": "statistics_of_a_trainer:peak"},
        {"gate_statistic": "statistics_of_a_trainer:surprise"},
    ],
    ids=lambda changes: changes["gate_statistic"],
)
def test_routers_and_statistics_of_one_s_own_drive_the_gate(changes, tmp_path, own_statistics):
    run = tiny.trainer(tmp_path / "run", actor=tiny.mixture, **changes)
    before = tiny.weights(run.model)
    run.train()
    credit = run.last_credit
    assert credit.advantages.isfinite().all() and credit.advantages[credit.mask].std() > 0
    assert credit.gates[credit.mask].std() > 1e-3 and credit.statistic[credit.mask].std() > 0
    assert tiny.weights(run.model).isfinite().all() and not torch.equal(tiny.weights(run.model), before)
    assert run.args.to_dict()["gate_statistic"] == changes["gate_statistic"]


def test_a_run_with_a_statistic_of_one_s_own_resumes(tmp_path, own_statistics):
    """Its checkpoint holds the name, not the object, which could not be pickled."""
    changes = {"gate_statistic": "statistics_of_a_trainer:peak", "save_strategy": "steps", "save_steps": 1}
    whole = tiny.trainer(tmp_path / "run", **changes)
    whole.train()
    saved = torch.load(tmp_path / "run" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.gate_statistic == "statistics_of_a_trainer:peak"
    again = tiny.trainer(tmp_path / "run", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(tiny.weights(whole.model), tiny.weights(again.model))


def test_lora_trains_adapters_only_and_saves_as_peft(tmp_path):
    run = tiny.trainer(tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    frozen = {n: p.detach().clone() for n, p in run.model.named_parameters() if not p.requires_grad}
    run.train()
    for name, parameter in run.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    run.save_model(str(tmp_path / "adapter"))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names
    assert not any("critic" in name for name in names)


def test_two_runs_with_one_seed_are_identical_and_another_seed_differs(tmp_path):
    models, critics = [], []
    for number, seed in enumerate((5, 5, 6)):
        run = tiny.trainer(tmp_path / str(number), max_steps=3, seed=seed)
        run.train()
        models.append(tiny.weights(run.model))
        critics.append(tiny.weights(run.critic))
    for results in (models, critics):
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])


def test_the_seed_reaches_the_critics_first_weights(tmp_path):
    layers = []
    for seed in (1, 2):
        run = tiny.trainer(tmp_path / str(seed), max_steps=1, seed=seed, critic_learning_rate=1e-12)
        run.train()
        layers.append(run.critic.layer.weight.detach())
    assert (layers[0] - layers[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [{}, {"critic_lr_scheduler_type": "linear", "gate_control": "shuffled", "num_generations": 1}],
    ids=["plain", "scheduled"],
)
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, changes):
    common = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **changes}
    whole = tiny.trainer(tmp_path, **common)
    whole.train()
    again = tiny.trainer(tmp_path, **common)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(tiny.weights(whole.model), tiny.weights(again.model))
    assert torch.equal(tiny.weights(whole.critic), tiny.weights(again.critic))
    assert again.sampled_tokens == whole.sampled_tokens
    assert (
        tiny.logged(again, "comppo/critic_learning_rate")[-3:] == tiny.logged(whole, "comppo/critic_learning_rate")[-3:]
    )


def test_resuming_with_another_critic_is_refused(tmp_path):
    tiny.trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ConfigError, match="does not fit"):
        tiny.trainer(tmp_path, max_steps=2, critic_hidden_size=3).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="written with a critic"):
        tiny.trainer(tmp_path, max_steps=2, operator="group_relative").train(resume_from_checkpoint=True)


def test_a_finished_folder_is_not_overwritten(tmp_path):
    tiny.trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(RunExistsError, match="already holds checkpoint-1"):
        tiny.trainer(tmp_path, max_steps=1).train()
    # The field of TRL's configuration resumes as well, rather than starting over
    again = tiny.trainer(tmp_path, max_steps=2, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again.train()
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2]
    assert again.sampled_responses == 16


def test_unscorable_responses_weigh_nothing_and_are_counted(tmp_path):
    def sometimes(completions, **_):
        return [None if row % 3 == 0 else float(row % 2) for row in range(len(completions))]

    run = tiny.trainer(tmp_path, reward_funcs=sometimes, max_steps=1)
    run.train()
    credit = run.last_credit
    assert tiny.logged(run, "comppo/unscorable") == [3.0]
    assert (~credit.scorable).sum() == 3
    assert (credit.advantages[~credit.scorable] == 0).all()
    assert (credit.advantages[credit.scorable] != 0).any()
    assert credit.advantages.isfinite().all()


@pytest.fixture
def quiet_rollouts(monkeypatch):
    """TRL warns that rollout functions are experimental."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def test_empty_and_one_token_completions_train(tmp_path, quiet_rollouts):
    def rollout(prompts, trainer):
        ids = [[], [5], [6, 7, 2], []] * (len(prompts) // 4)
        return {
            "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
            "completion_ids": [list(i) for i in ids],
            "logprobs": [[-1.0] * len(i) for i in ids],
        }

    run = tiny.trainer(tmp_path, rollout_func=rollout)
    run.train()
    assert tiny.weights(run.model).isfinite().all()
    assert run.last_credit.completion_mask.sum(1).tolist() == [1, 1, 3, 1] * 2


def test_observations_get_no_credit_but_carry_it(tmp_path, quiet_rollouts):
    """A response with an observation in it gets, on its own tokens, what the same response gets without it.

    Without critic and gate, so that credit does not depend on what the model computes from the observation.
    """
    kept = [[5, 6 + 9 * (row % 2), 9 + 5 * (row % 3)] for row in range(8)]

    def rollout_with(observation):
        def rollout(prompts, trainer):
            return {
                "prompt_ids": [trainer.processing_class(p)["input_ids"] for p in prompts],
                "completion_ids": [[*ids[:2], *observation, ids[2]] for ids in kept],
                "logprobs": [[-1.0] * (3 + len(observation))] * len(prompts),
                "env_mask": [[1, 1, *[0] * len(observation), 1]] * len(prompts),
            }

        return rollout

    def reward(completion_ids, **_):
        return [(ids[1] + ids[-1]) / 10 for ids in completion_ids]

    credits = []
    for observation in ([], [7, 8, 7]):
        run = tiny.trainer(
            tmp_path / str(len(observation)),
            rollout_func=rollout_with(observation),
            reward_funcs=reward,
            max_steps=1,
            operator="gae",
            critic="none",
            lam=0.9,
            gamma=0.8,
            probe_rewards=False,
        )
        run.train()
        credits.append(run.last_credit)
    plain, observed = credits
    assert (observed.advantages[:, 2:5] == 0).all()
    assert (plain.advantages != 0).all()
    torch.testing.assert_close(observed.advantages[:, [0, 1, 5]], plain.advantages)
    assert run.sampled_tokens == 24, "what an environment said was not sampled"


def test_controls_and_lambdas_change_what_they_name(tmp_path):
    def first(**changes):
        run = tiny.trainer(tmp_path / "-".join(map(str, changes)), max_steps=1, **changes)
        run.train()
        return run.last_credit

    plain = first()
    for control in ("shuffled", "inverted", "constant", "position_mean"):
        controlled = first(gate_control=control)
        assert torch.equal(controlled.completion_ids, plain.completion_ids), "the same responses"
        assert not torch.allclose(controlled.gates, plain.gates)
        assert not torch.allclose(controlled.advantages, plain.advantages)
    for changes in (
        {"lam": 0.5},
        {"length_adaptive_alpha": 0.5},
        {"gate_bootstrap": True},
        {"gate_trace": False, "gate_bootstrap": True},
    ):
        assert not torch.allclose(first(**changes).advantages, plain.advantages), changes


def test_streams_and_positional_arguments_train_as_in_trl(tmp_path):
    from comppo import CompPOConfig, CompPOTrainer

    run = CompPOTrainer(
        tiny.model(),
        (tiny.digit_reward,),
        CompPOConfig(**tiny.settings(tmp_path)),
        tiny.dataset().to_iterable_dataset(),
        None,
        tiny.tokenizer(),
    )
    run.train()
    assert run.sampled_responses == 16


def test_async_weighted_and_partial_rewards(tmp_path):
    from functools import partial

    async def slow(completions, **_):
        return [float(len(text)) for text in completions]

    run = tiny.trainer(
        tmp_path, reward_funcs=[slow, partial(tiny.digit_reward)], reward_weights=[0.5, 2.0], max_steps=1
    )
    run.train()
    expected = [
        0.5 * length + 2.0 * digits
        for length, digits in zip(
            run._logs["rewards"]["slow"], run._logs["rewards"][run.reward_func_names[1]], strict=True
        )
    ]
    assert run.last_credit.response_rewards.tolist() == pytest.approx(expected)


def test_tokens_are_counted_although_truncated_responses_are_masked(tmp_path):
    run = tiny.trainer(tmp_path, mask_truncated_completions=True, max_completion_length=1, max_steps=1)
    run.train()
    assert run.sampled_tokens == 8


def test_retention_is_the_product_of_the_gates_between_first_token_and_reward(tmp_path):
    run = tiny.trainer(tmp_path, max_steps=1)
    run.train()
    credit = run.last_credit
    by_hand = [gates[mask][:-1].double().prod().item() for gates, mask in zip(credit.gates, credit.mask, strict=True)]
    assert tiny.logged(run, "comppo/retention") == pytest.approx([sum(by_hand) / len(by_hand)])


def _no_answer(completions, **_):
    return [0.0] * (len(completions) + 1)


def _words(completions, **_):
    return ["good"] * len(completions)


def test_bad_rewards_are_named_before_the_model_is_touched(tmp_path):
    from comppo import CompPOConfig, CompPOTrainer

    for bad in (_no_answer, _words):
        with pytest.raises(RewardError, match=bad.__name__):
            CompPOTrainer(
                "no/such-model",
                bad,
                args=CompPOConfig(**tiny.settings(tmp_path, operator="group_relative")),
                train_dataset=tiny.dataset(),
            )


def test_rewards_that_turn_bad_later_are_named(tmp_path):
    calls = []

    def tired(completions, **_):
        calls.append(1)
        return [0.0] * len(completions) if len(calls) < 2 else ["no"] * len(completions)

    run = tiny.trainer(tmp_path, reward_funcs=tired)
    with pytest.raises(RewardError, match="tired"):
        run.train()


QUESTIONS = tiny.dataset().rename_column("prompt", "question")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"train_dataset": tiny.dataset().rename_column("prompt", "question")},
            TaskError,
            "train_dataset.*no 'prompt'",
        ),
        ({"eval_dataset": tiny.dataset().rename_column("prompt", "question")}, TaskError, "eval_dataset.*no 'prompt'"),
        ({"train_dataset": {"train": tiny.dataset()}}, TaskError, "splits"),
        ({"train_dataset": None}, TaskError, "train_dataset is missing"),
        ({"reward_funcs": None}, RewardError, "reward_funcs is empty"),
        ({"reward_weights": [1.0, 2.0]}, ConfigError, "reward_weights has 2"),
    ],
    ids=["train", "eval", "splits", "none", "rewards", "weights"],
)
def test_arguments_that_cannot_work_are_refused_before_the_model_is_touched(changes, error, message, tmp_path):
    from comppo import CompPOConfig, CompPOTrainer

    settings = tiny.settings(tmp_path, **{k: v for k, v in changes.items() if k == "reward_weights"})
    arguments = {"reward_funcs": tiny.digit_reward, "train_dataset": tiny.dataset()}
    arguments |= {k: v for k, v in changes.items() if k != "reward_weights"}
    with pytest.raises(error, match=message):
        CompPOTrainer("no/such-model", args=CompPOConfig(**settings), **arguments)


def test_an_unreadable_model_is_refused_before_it_is_loaded(tmp_path):
    from transformers import MambaConfig

    from comppo import CompPOConfig, CompPOTrainer

    MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnreadableModelError, match="layer"):
        CompPOTrainer(
            str(tmp_path / "mamba"),
            tiny.digit_reward,
            args=CompPOConfig(**tiny.settings(tmp_path / "run")),
            train_dataset=tiny.dataset(),
        )


@pytest.mark.parametrize("features", [["routing", "group_mean"], ["group_mean"]], ids=["attention", "routers"])
def test_routers_are_missed_before_the_model_is_loaded(features, tmp_path):
    from comppo import CompPOConfig, CompPOTrainer

    tiny.model().config.save_pretrained(tmp_path / "llama")  # no weights: loading would fail
    with pytest.raises(
        UnreadableModelError, match=r"LlamaDecoderLayer has no experts.*gate_statistic='router_entropy'"
    ):
        CompPOTrainer(
            str(tmp_path / "llama"),
            tiny.digit_reward,
            args=CompPOConfig(
                **tiny.settings(tmp_path / "run", gate_statistic="router_entropy", critic_features=features)
            ),
            train_dataset=tiny.dataset(),
        )


def test_a_model_without_attention_trains_where_none_is_needed(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    from comppo import CompPOConfig, CompPOTrainer

    torch.manual_seed(0)
    size = len(tiny.tokenizer())
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=size, state_size=4))
    changes = {"gate_statistic": "output_entropy", "critic_features": ["surprisal", "entropy", "group_mean"]}
    run = CompPOTrainer(
        mamba,
        tiny.digit_reward,
        args=CompPOConfig(**tiny.settings(tmp_path, **changes)),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
    )
    run.train()
    assert tiny.weights(run.model).isfinite().all()
    assert run.last_credit.gates[run.last_credit.mask].std() > 0


def test_attention_that_hides_its_masks_is_refused_before_the_model_is_loaded(tmp_path):
    from comppo import CompPOConfig, CompPOTrainer

    tiny.model().config.save_pretrained(tmp_path / "llama")  # no weights: loading would fail
    with pytest.raises(UnreadableModelError, match="paged"):
        CompPOTrainer(
            str(tmp_path / "llama"),
            tiny.digit_reward,
            args=CompPOConfig(
                **tiny.settings(tmp_path / "run", model_init_kwargs={"attn_implementation": "paged|sdpa"})
            ),
            train_dataset=tiny.dataset(),
        )


def test_trl_arguments_are_refused_with_the_remedy(tmp_path):
    from comppo import CompPOTrainer

    with pytest.raises(ConfigError, match="CompPOConfig"):
        CompPOTrainer(
            "no/such-model",
            tiny.digit_reward,
            args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True),
            train_dataset=tiny.dataset(),
        )


def test_credit_records_tell_one_response_token_by_token(tmp_path):
    run = tiny.trainer(tmp_path)
    assert run.credit_records() == []
    run.train()
    records = run.credit_records(3)
    assert len(records) == 3
    for record in records:
        length = len(record["tokens"])
        assert all(len(record[name]) == length for name in ("advantages", "gates", "values", "logps", "trained"))
    assert records[0]["reward"] >= records[1]["reward"]
    histogram = run.gate_histogram()
    assert sum(histogram["counts"]) == int(run.last_credit.mask.sum())
