"""`comppo train` refuses bad input in one message, before anything is loaded, and leaves a complete run folder."""

import json
import os
import subprocess
import sys

import pytest

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
    (tmp_path / "run" / "result.json").unlink()
    done = comppo("train", "--config", recipe(tmp_path), "--output_dir", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["responses"] == 16
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


def test_help_lists_commands_without_heavy_imports(tmp_path):
    code = (
        "import sys\nsys.argv=['comppo','--help']\nfrom comppo.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch','transformers','trl'} & set(sys.modules) - {'torch'}, 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert "train" in done.stdout
