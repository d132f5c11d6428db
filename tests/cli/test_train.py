"""`comppo train` refuses bad input in one message, before anything is loaded, and leaves a complete run folder."""

import json
import os
import subprocess
import sys

import pytest

from comppo.cli.quickstart import choose_folder
from comppo.cli.train import WRITTEN, check_output
from comppo.errors import ConfigError, RunExistsError

FAST = {
    "model_name_or_path": "bundled",
    "task": "chain",
    "task_params": {"length": 1, "distractors": 0, "prompts": 16, "eval_prompts": 4},
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 14,
    "max_steps": 2,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 1,
}


def comppo(*arguments, cwd):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("COMPPO_UNHOOKED", None)
    return subprocess.run(
        [sys.executable, "-c", "from comppo.cli import main; main()", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def in_process(tmp_path, monkeypatch, capsys):
    """The same command without the seconds that a new process needs for its imports."""

    def run(*arguments):
        from comppo.cli import main

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["comppo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


def recipe(folder, **changes):
    path = folder / "recipe.yaml"
    # JSON is YAML
    path.write_text(json.dumps({k: v for k, v in (FAST | changes).items() if v is not None}))
    return str(path)


def test_a_run_leaves_its_records_and_a_model_that_loads(tmp_path):
    done = comppo("train", "--config", recipe(tmp_path), "--output_dir", "run", "--learning_rate", "1e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Held-out greedy accuracy" in done.stdout
    run = tmp_path / "run"
    assert json.loads((run / "run.json").read_text())["config"]["learning_rate"] == 1e-4
    result = json.loads((run / "result.json").read_text())
    assert (result["responses"], result["eval_count"], result["status"]) == (16, 4, "finished")
    assert (run / "metrics.jsonl").read_text().count("comppo/gate_mean") == 2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")

    again = comppo("train", "--config", recipe(tmp_path), "--output_dir", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert "Traceback" not in again.stderr


def test_resume_continues_and_repeats_nothing(tmp_path):
    first = comppo("train", "--config", recipe(tmp_path, max_steps=1), "--output_dir", "run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    # As if the machine had stopped before the end
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").unlink()
    done = comppo("train", "--config", recipe(tmp_path), "--output_dir", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["responses"] == 16
    assert result["accuracy_before"] == before["accuracy_before"] is not None
    # The steps before the checkpoint count, and time goes on from there
    saved = max(row["time_s"] for row in rows if row["step"] <= 1)
    assert result["time_s"] > saved > 0
    assert all(row["time_s"] > saved for row in rows if row["step"] == 2)
    finished = comppo("train", "--config", recipe(tmp_path), "--output_dir", "run", "--resume", cwd=tmp_path)
    assert finished.returncode == 2
    assert "finished" in finished.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lerning_rate": 1}, "learning_rate"),
        ({"task": "chian"}, "chain"),
        ({"task": "reasoning_gym:no_such_task"}, "no_such_task"),
        ({"task_params": {"lenght": 3}}, "length"),
        ({"lam": 1.5}, "lam"),
        ({"gate_minimum": 9.0}, "minimum"),
        ({"model_name_or_path": None}, "model_name_or_path"),
        ({"task": None}, "task is missing"),
        # Types that YAML gives and a field does not take
        ({"gamma": [1]}, "gamma=[1] does not fit: gamma takes a number"),
        ({"gamma": "high"}, "--gamma: invalid float value: 'high'"),
        ({"max_steps": 1.5}, "max_steps=1.5 does not fit"),
        ({"max_steps": {"a": 1}}, "max_steps={'a': 1} does not fit"),
        ({"save_strategy": False}, "put the word in quotes"),
        ({"critic_hidden_layers": ["a"]}, "a list of whole numbers"),
        ({"output_dir": [1]}, "output_dir=[1] does not fit: output_dir takes text"),
        ({"parallelism_config": True}, "parallelism_config takes an object, which only a program can give"),
        ({"heldout_every": -1}, "heldout_every=-1 must be at least 0"),
        ({"task": "data.jsonl", "task_params": {"reward": 3}}, "reward=3 must be a name or a list of names"),
        ({"env": 3}, "env=3 must be a mapping"),
        ({"gate_statistic": "no_such_module_here:x"}, "gate_statistic='no_such_module_here:x': importing module"),
        ({"gate_statistic": "router_entropy"}, "has no experts"),
        ({"no_shuffle_dataset": "maybe"}, "no_shuffle_dataset='maybe' must be true or false"),
        ({"no_shuffle_dataset": True, "shuffle_dataset": True}, "set the same field"),
        ({"learning-rate": 1e-4, "learning_rate": 1e-4}, "set the same field"),
        # What TRL and Transformers refuse
        ({"save_strategy": "sometimes"}, "sometimes"),
        ({"num_generations": 3}, "num_generations"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights"),
        ({"model_name_or_path": "./no_such_model"}, "model_name_or_path='./no_such_model' cannot be read"),
        ({"attn_implementation": "no_such_attention"}, "no_such_attention"),
        # Fields that would be ignored
        ({"dataset_streaming": True}, "dataset_streaming=True is not supported"),
        ({"resume_from_checkpoint": "run/checkpoint-1"}, "use --resume"),
        ({"dataset_train_split": "train"}, "dataset_train_split='train' cannot apply to task 'chain'"),
        ({"dataset_test_split": "test"}, "dataset_test_split='test' cannot apply to task 'chain'"),
        ({"dataset_config": "main"}, "dataset_config='main' cannot apply to task 'chain'"),
        ({"reward_funcs": ["exact_match"]}, "reward_funcs=['exact_match'] cannot apply to task 'chain'"),
        ({"dataset_name": "a/b"}, "task='chain' and dataset_name='a/b' differ"),
    ],
)
def test_bad_input_is_one_message(changes, message, tmp_path, in_process):
    code, printed = in_process("train", "--config", recipe(tmp_path, **changes), "--output_dir", "run")
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_a_data_set_without_prompts_and_a_bad_reward_are_named(tmp_path, in_process):
    (tmp_path / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 4)
    changes = {"task": "data.jsonl", "task_params": None, "reward_funcs": ["exact_match"]}
    code, printed = in_process("train", "--config", recipe(tmp_path, **changes), "--output_dir", "run")
    assert code == 2
    assert "prompt" in printed
    assert "question" in printed

    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 4)
    (tmp_path / "judges.py").write_text("def short(completions, **_):\n    return [0.0]\n")
    changes["reward_funcs"] = ["judges:short"]
    code, printed = in_process("train", "--config", recipe(tmp_path, **changes), "--output_dir", "run")
    assert code == 2
    assert "short" in printed


def test_the_command_line_is_refused_in_one_message(tmp_path, in_process):
    config = recipe(tmp_path)
    for arguments, message in [
        (["--config", config, "--gamma", "high"], "--gamma: invalid float value: 'high'"),
        (["--config", config, "stray"], "stray"),
        (["--config", config, "--parallelism_config", "x"], "parallelism_config"),
        (["--config", config, f"--config={config}"], "--config is given 2 times"),
        (["--config"], "needs the path"),
        (["--config="], "needs the path"),
        (["--config", "--gamma"], "needs the path"),
        ([f"--config={tmp_path}"], "cannot be read"),
        ([f"--config={tmp_path / 'none.yaml'}"], "there is no such file"),
    ]:
        code, printed = in_process("train", *arguments, "--output_dir", "run")
        assert code == 2 and message in printed, (arguments, printed)
        assert "Traceback" not in printed and "usage:" not in printed
    assert not (tmp_path / "run").exists()


def arguments_of(tmp_path, *words, **fields):
    """What the command line makes of a file with these fields."""
    from comppo.cli.train import parse

    path = tmp_path / "fields.yaml"
    path.write_text(json.dumps({"output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False} | fields))
    return parse([f"--config={path}", *words])


def test_files_may_write_fields_as_the_command_line_does(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPPO_TEST_VARIABLE", raising=False)
    script, args, model = arguments_of(
        tmp_path,
        "--lam",
        "0.5",
        **{"learning-rate": 0.25, "no_shuffle_dataset": True, "lam": 0.75},
        gamma=1,
        max_steps="7",
        run_name=3,
        reward_funcs="exact_match",
        reward_weights=[1, 2.5],
        scale_rewards=False,
        model_revision=12,
        env={"COMPPO_TEST_VARIABLE": 5},
    )
    assert (args.learning_rate, args.shuffle_dataset, args.lam, args.max_steps) == (0.25, False, 0.5, 7)
    assert type(args.gamma) is float and args.run_name == "3" and model.model_revision == "12"
    assert script.reward_funcs == ["exact_match"] and args.reward_weights == [1.0, 2.5]
    assert args.scale_rewards == "none" and script.dataset_train_split is None
    assert os.environ.pop("COMPPO_TEST_VARIABLE") == "5"
    assert arguments_of(tmp_path, no_shuffle_dataset=False)[1].shuffle_dataset is True


def test_trls_data_set_fields_are_the_tasks_parameters(tmp_path):
    from comppo.cli.train import task_of

    def found(**fields):
        return task_of(arguments_of(tmp_path, **fields)[0])

    fields = {"dataset_train_split": "train[:9]", "dataset_test_split": "test", "reward_funcs": ["exact_match"]}
    assert found(dataset_name="a/b", dataset_config="main", task_params={"config": "main", "prompts": 3}, **fields) == (
        "a/b",
        {"config": "main", "prompts": 3, "split": "train[:9]", "eval_split": "test", "reward": ["exact_match"]},
    )
    assert found(task="a/b") == ("a/b", {})
    with pytest.raises(ConfigError, match=r"dataset_config='main' cannot apply to task 'x.jsonl'.*hub data sets"):
        found(task="x.jsonl", dataset_config="main")
    with pytest.raises(ConfigError, match="dataset_train_split='a' contradicts split='b'"):
        found(task="a/b", dataset_train_split="a", task_params={"split": "b"})
    with pytest.raises(ConfigError, match="dataset_test_split='test' cannot apply to task 'reasoning_gym:chain_sum'"):
        found(task="reasoning_gym:chain_sum", dataset_test_split="test")


@pytest.mark.parametrize("name", [*WRITTEN, "checkpoint-3"])
def test_files_that_a_run_would_replace_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunExistsError, match=rf"\({name}\).*choose another folder"):
        check_output(tmp_path, resume=False)
    assert (tmp_path / name).read_text() == "mine"


def test_the_list_of_what_a_run_writes_is_complete(tmp_path, monkeypatch):
    """A run in a folder with files of the user's own, a statistic among them, adds nothing but what is on the list."""
    (tmp_path / "statistics_of_a_run.py").write_text(
        "from comppo.computation import AttentionStatistic\n"
        "own = AttentionStatistic('own', lambda rows: rows.rest_maximum)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "checkpoint-best").mkdir()
    changes = {"log_completions": True, "inspect_every": 1, "gate_statistic": "statistics_of_a_run:own"}
    train_here = recipe(tmp_path, max_steps=1, hub_token="hf_secret_of_the_file_1234", **changes)
    from comppo.cli.train import train

    folder = tmp_path / "run"
    train(["--config", train_here, "--output_dir", str(folder), "--hub_token", "hidden-2", "--lam=1.0"])
    assert {path.name for path in folder.iterdir()} == {*WRITTEN, "checkpoint-1", "checkpoint-best", "notes.txt"}
    recorded = (folder / "run.json").read_text()
    assert "secret_of_the_file" not in recorded and "hidden-2" not in recorded
    run = json.loads(recorded)
    assert run["command"].endswith("--hub_token '***' --lam=1.0")
    assert run["config"]["gate_statistic"] == "statistics_of_a_run:own"
    assert run["config"]["task_params"]["length"] == 1 and run["config"]["model_config"]["lora_r"] == 16


def test_checkpoints_are_counted_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "checkpoint-11-old", "my-checkpoint-12"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.json").write_text("{}")
    assert check_output(tmp_path, resume=True) == 10
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RunExistsError, match="is finished"):
        check_output(tmp_path, resume=True)


def test_there_must_be_something_to_resume(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    assert check_output(tmp_path, resume=False) is None
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        check_output(tmp_path, resume=True)
    (tmp_path / "checkpoint-2").rmdir()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="before its first checkpoint"):
        check_output(tmp_path, resume=True)


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "run"):
        for resume in (False, True):
            with pytest.raises(ConfigError, match=r"output_dir=.*file' is a file: choose a folder"):
                check_output(folder, resume=resume)
        with pytest.raises(ConfigError, match=r"--output=.*is a file"):
            choose_folder(folder)
    assert check_output(tmp_path / "new" / "run", resume=False) is None


def test_help_lists_commands_without_heavy_imports(tmp_path):
    code = (
        "import sys\nsys.argv=['comppo','--help']\nfrom comppo.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'jaxtyping'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert "train" in done.stdout


def test_every_public_name_is_found():
    import comppo

    for name in comppo.__all__:
        assert getattr(comppo, name).__name__ == name


@pytest.mark.parametrize("given", ["{length: 2, distractors: 0}", '{"length": 2, "distractors": 0}'])
def test_parameters_of_a_task_are_yaml_or_json_on_the_command_line(given, tmp_path):
    from comppo.cli.train import parse, task_of

    on_cpu = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    script, _, _ = parse(["--task", "chain", "--task_params", given, *on_cpu])
    assert task_of(script) == ("chain", {"length": 2, "distractors": 0})
