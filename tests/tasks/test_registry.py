"""Finding tasks, and saying what is wrong before any model is loaded."""

import json
import sys

import pytest
from datasets import Dataset, DatasetDict

from comppo.errors import ConfigError, RewardError, TaskError
from comppo.tasks.base_models import resolve_model
from comppo.tasks.procedural import extract_answer
from comppo.tasks.registry import accepted_parameters, load_task


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_chain():
    task = load_task("chain", seed=3, params={"length": 2, "prompts": 30, "eval_prompts": 7})
    again = load_task("chain", seed=3, params={"length": 2, "prompts": 30, "eval_prompts": 7})
    assert task.train_dataset.column_names == ["prompt", "answer"]
    assert (len(task.train_dataset), len(task.eval_dataset)) == (30, 7)
    assert task.train_dataset[:] == again.train_dataset[:]
    assert not set(task.train_dataset["prompt"]) & set(task.eval_dataset["prompt"])
    assert task.max_completion_length == 8 * 4 + 4
    row = task.train_dataset[0]
    assert task.reward_funcs[0](prompts=[""], completions=["#" + row["answer"]], answer=[row["answer"]]) == [1.0]
    assert load_task("chain", params={"prompts": 5, "eval_prompts": 0}).eval_dataset is None


@pytest.mark.parametrize(
    ("spec", "params", "words"),
    [
        ("chian", {}, "Did you mean 'chain'.*There are: chain, reasoning_gym:NAME"),
        ("reasoning-gym:chain_sum", {}, "Did you mean 'reasoning_gym'"),
        ("", {}, "is unknown"),
        ("chain", {"lenght": 3}, "no parameter 'lenght'. Did you mean 'length'.*distractors, prompts, eval_prompts"),
        ("chain", {"seed": 3}, "seed is an argument"),
        ("reasoning_gym:chain_sm", {}, "no 'chain_sm'. Did you mean 'chain_sum'.*leg_counting"),
        ("reasoning_gym:chain_sum", {"min_term": 3}, "Did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum", {"size": 3}, "no parameter 'size'"),
        ("reasoning_gym:chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum", {"prompts": 0}, "prompts must be a whole number of at least 1, got 0"),
        ("data.jsonl", {}, "needs the parameter reward"),
        ("data.jsonl", {"reward": "exact_match"}, "no such file"),
        ("data.jsonl", {"reward": "exact_match", "config": "main"}, "no parameter 'config'"),
        ("owner/name", {"reward": "exact_match"}, "cannot be read"),
        ("owner/name", {"rewards": "exact_match"}, "Did you mean 'reward'"),
    ],
)
def test_what_is_wrong_is_said(spec, params, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=words):
        load_task(spec, params=params)


def test_values_out_of_range():
    with pytest.raises(ConfigError, match="length must be"):
        load_task("chain", params={"length": 0})
    with pytest.raises(TaskError, match="seed must be"):
        load_task("chain", seed=-1)


def test_reasoning_gym_scores_with_its_own_judge():
    params = {"prompts": 40, "eval_prompts": 10, "min_terms": 2, "max_terms": 3}
    task = load_task("reasoning_gym:chain_sum", seed=2, params=params)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (40, 10)
    judge = task.reward_funcs[0]
    for part in (task.train_dataset, task.eval_dataset):
        row = part[3]
        completions = [
            f"let me see\n<answer>{row['answer']}</answer>",
            f"it is\n{row['answer']}\n",
            [{"role": "assistant", "content": f"<answer> {row['answer']} </answer>"}],
            "<answer>no</answer>",
            "",
        ]
        assert judge(completions=completions, entry=[row["entry"]] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
        assert row["prompt"].endswith("<answer>...</answer>.")
    assert load_task("reasoning_gym:chain_sum", seed=2, params=params).train_dataset[:] == task.train_dataset[:]


def test_reasoning_gym_parts_share_no_question_even_where_there_are_few():
    """One-digit sums have 200 questions at most: seeds alone would not keep the parts apart."""
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "prompts": 100, "eval_prompts": 30}
    task = load_task("reasoning_gym:chain_sum", params=params)
    train, held_out = task.train_dataset["prompt"], task.eval_dataset["prompt"]
    assert len(set(train)) == 100 and len(set(held_out)) == 30
    assert not set(train) & set(held_out)
    with pytest.raises(TaskError, match="choose fewer prompts"):
        load_task("reasoning_gym:chain_sum", params={**params, "prompts": 500})


def test_reasoning_gym_conversations():
    task = load_task(
        "reasoning_gym:chain_sum", params={"prompts": 3, "eval_prompts": 0, "conversational": True, "instruction": ""}
    )
    (message,) = task.train_dataset[0]["prompt"]
    assert message["role"] == "user" and message["content"].endswith("=")
    assert task.eval_dataset is None


def test_extract_answer():
    assert extract_answer("a <answer>1</answer> b <ANSWER>\n2 </ANSWER>") == "2"
    assert extract_answer("so\n 7 \n\n") == "7"
    assert extract_answer(" \n") == ""


ROWS = [{"prompt": f"p{i}", "answer": str(i), "level": i % 3} for i in range(10)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder", "saved", "splits"])
def test_local_data(tmp_path, kind):
    spec = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write(spec, ROWS)
    elif kind == "json":
        spec.write_text(json.dumps(ROWS))
    elif kind == "csv":
        Dataset.from_list(ROWS).to_csv(spec)
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(spec)
    elif kind == "folder":
        spec.mkdir()
        write(spec / "a.jsonl", ROWS[:5])
        write(spec / "b.jsonl", ROWS[5:])
    elif kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(spec)
    else:
        DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:4])).save_to_disk(spec)
    task = load_task(str(spec), params={"reward": "exact_match"})
    assert task.train_dataset["prompt"][:] == [row["prompt"] for row in ROWS]
    assert task.train_dataset["level"][:] == [row["level"] for row in ROWS]
    assert task.eval_dataset is None and task.max_completion_length is None
    answers = task.train_dataset["answer"][:]
    assert task.reward_funcs[0](completions=["0", "0"], answer=answers[:2]) == [1.0, 0.0]
    if kind == "splits":
        task = load_task(str(spec), params={"reward": "exact_match", "eval_split": "test"})
        assert (len(task.train_dataset), len(task.eval_dataset)) == (6, 4)
        with pytest.raises(TaskError, match="no split 'dev'; it has: train, test"):
            load_task(str(spec), params={"reward": "exact_match", "eval_split": "dev"})


def test_holding_out_and_limits(tmp_path):
    spec = write(tmp_path / "d.jsonl", [*ROWS, *ROWS])  # each prompt twice: none may be in both parts
    params = {"reward": "exact_match", "eval_prompts": 4}
    task = load_task(spec, seed=1, params=params)
    held_out = set(task.eval_dataset["prompt"])
    assert len(task.eval_dataset) == 4 and not held_out & set(task.train_dataset["prompt"])
    assert load_task(spec, seed=1, params=params).eval_dataset[:] == task.eval_dataset[:]
    assert len(load_task(spec, params={**params, "prompts": 3}).train_dataset) == 3
    with pytest.raises(TaskError, match="leaves none"):
        load_task(spec, params={**params, "eval_prompts": 20})


def test_columns(tmp_path):
    spec = write(tmp_path / "d.jsonl", [{"question": "q", "solution": "1"}])
    with pytest.raises(TaskError, match="no column 'prompt'; its columns are: question, solution"):
        load_task(spec, params={"reward": "exact_match"})
    named = {"reward": "exact_match", "prompt_column": "question"}
    with pytest.raises(TaskError, match="no column 'answer'"):
        load_task(spec, params=named)
    task = load_task(spec, params={**named, "answer_column": "solution", "conversational": True})
    assert task.train_dataset[0] == {"prompt": [{"role": "user", "content": "q"}], "answer": "1"}
    empty = write(tmp_path / "e.jsonl", [{"prompt": "p", "answer": "1"}, {"prompt": None, "answer": "2"}])
    with pytest.raises(TaskError, match="prompt of row 1 is None"):
        load_task(empty, params={"reward": "exact_match"})


def test_unreadable_data(tmp_path):
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(TaskError, match="cannot be read"):
        load_task(str(broken), params={"reward": "exact_match"})
    (tmp_path / "nothing").mkdir()
    with pytest.raises(TaskError, match="expected a file"):
        load_task(str(tmp_path / "nothing"), params={"reward": "exact_match"})


def test_own_rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_test_registry.py").write_text(
        "def length(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = write(tmp_path / "d.jsonl", [{"prompt": "q"}])
    task = load_task(spec, params={"reward": ["rewards_of_test_registry:length"]})
    assert task.reward_funcs[0](completions=["abc"]) == [3]
    with pytest.raises(RewardError, match="has no 'width'"):
        load_task(spec, params={"reward": "rewards_of_test_registry:width"})


def test_accepted_parameters():
    assert accepted_parameters("chain") == ["length", "distractors", "prompts", "eval_prompts"]
    assert "config" in accepted_parameters("owner/name") and "config" not in accepted_parameters("x.csv")


def test_resolve_model():
    assert resolve_model("bundled") == resolve_model("bundled:chain")
    assert resolve_model("owner/name") == "owner/name"
    with pytest.raises(TaskError, match="bundled:chain"):
        resolve_model("bundled:other")


def test_heavy_packages_stay_out_until_needed():
    import subprocess

    modules = "comppo.tasks.registry, comppo.tasks.base_models, comppo.evidence.verifiers, comppo.evaluation.greedy"
    heavy = ("datasets", "transformers", "reasoning_gym", "math_verify", "trl")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
