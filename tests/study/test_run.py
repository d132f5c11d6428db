"""Runs that are executed and resumed: what their records say."""

import json

import pytest

from comppo.errors import ConfigError, RunExistsError
from comppo.study.record import RunRecorder
from comppo.study.run import RecordingCallback, RunSpec, earlier_sessions, execute, held_out_evaluation

SPEC = {
    "arm": "grpo",
    "task_params": {"length": 1, "distractors": 0, "prompts": 8, "eval_prompts": 2},
    "config": {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "beta": 0.0,
        "hub_token": "abc-secret",
    },
}


def test_a_run_records_every_setting_that_was_used(tmp_path):
    result = execute(RunSpec(folder=str(tmp_path / "run"), **SPEC))
    text = (tmp_path / "run" / "run.json").read_text()
    config = json.loads(text)["config"]
    assert config["arm"] == "grpo" and config["task_params"]["length"] == 1
    settings = config["settings"]
    assert (settings["operator"], settings["num_generations"], settings["max_steps"]) == ("group_relative", 4, 1)
    # Settings that nobody named
    assert settings["loss_type"] == "dapo" and settings["adam_beta2"] == 0.999 and "epsilon" in settings
    assert "abc-secret" not in text
    assert result["accuracy_before"] is not None and result["time_s"] > 0


def test_a_model_of_the_user_is_left_alone(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(RunExistsError, match="already holds model"):
        execute(RunSpec(folder=str(tmp_path), **SPEC))
    assert (tmp_path / "model").read_text() == "mine"


def test_a_resumed_run_goes_on_from_what_was_written(tmp_path):
    first = RunRecorder(tmp_path)
    first.write_json("run.json", {})
    for row in ({"step": 0, "eval_accuracy": 0.25, "time_s": 0.0}, {"step": 2, "time_s": 30.0}, {"step": 4}):
        first.append_metrics(row)
    first.append_metrics({"step": 6, "time_s": 90.0, "eval_accuracy": 0.5})
    recorder = RunRecorder.resume(tmp_path, step=4)
    assert earlier_sessions(recorder) == (0.25, 30.0)
    assert earlier_sessions(None) == (None, 0.0)
    callback = RecordingCallback(recorder, None, every=0, earlier=30.0)
    callback.on_train_begin(None, None, None)
    assert 30.0 <= callback.training_time < 40.0


def test_saving_writes_down_the_time(tmp_path):
    class State:
        global_step = 3

    recorder = RunRecorder(tmp_path)
    RecordingCallback(recorder, None, every=0, earlier=5.0).on_save(None, State(), None)
    assert earlier_sessions(recorder)[1] >= 5.0
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 3


def test_held_out_prompts_with_images_are_refused():
    from datasets import Dataset

    class Task:
        eval_dataset = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})

    with pytest.raises(ConfigError, match="column 'image'"):
        held_out_evaluation(None, Task())
