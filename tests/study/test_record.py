import enum
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from comppo.errors import ConfigError, RunExistsError
from comppo.report.runfiles import RecordError
from comppo.study.record import RunRecorder, masked_command, plain, read_metrics, versions


def test_a_run_is_written_and_read_back(tmp_path):
    run = RunRecorder(tmp_path / "new" / "run")
    run.write_json("run.json", {"name": "comppo", "seed": 0})
    run.append_metrics({"step": 1, "reward": 0.5, "loss": math.nan, "worse": -math.inf})
    run.append_metrics({"step": 2, "reward": torch.tensor(0.25)})
    run.finish({"accuracy_after": 0.5})
    assert read_metrics(run.folder / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5, "loss": None, "worse": None},
        {"step": 2, "reward": 0.25},
    ]
    assert json.loads((run.folder / "result.json").read_text()) == {"accuracy_after": 0.5, "status": "finished"}
    assert {path.name for path in run.folder.iterdir()} == {"run.json", "metrics.jsonl", "result.json"}


def test_each_line_is_on_disk_at_once(tmp_path):
    run = RunRecorder(tmp_path)
    for step in range(3):
        run.append_metrics({"step": step})
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step + 1


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "result.json", "credit.json", "gates.json"])
def test_an_earlier_run_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("kept")
    with pytest.raises(RunExistsError, match=rf"already holds {name}.*choose another folder"):
        RunRecorder(tmp_path)
    assert (tmp_path / name).read_text() == "kept"


def test_a_run_is_finished_once(tmp_path):
    run = RunRecorder(tmp_path)
    run.finish({"responses": 1})
    with pytest.raises(RunExistsError, match="finished once"):
        run.finish({"responses": 2})
    assert json.loads((tmp_path / "result.json").read_text())["responses"] == 1


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    run = RunRecorder(tmp_path)
    run.write_json("gates.json", {"counts": [1]})

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        run.write_json("gates.json", {"counts": [2]})
    assert json.loads((tmp_path / "gates.json").read_text()) == {"counts": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["gates.json"]


def test_written_files_follow_the_umask(tmp_path):
    run = RunRecorder(tmp_path)
    run.append_metrics({"step": 1})
    assert run.write_json("run.json", {}).stat().st_mode == (tmp_path / "metrics.jsonl").stat().st_mode


@pytest.mark.parametrize("name", ["../run.json", "a/b.json", "run.txt", ".json", ""])
def test_file_names_stay_in_the_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="without a path"):
        RunRecorder(tmp_path / "run").write_json(name, {})
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("row", [{}, {"step": 1.5}, {"step": None}, {"step": True}])
def test_metrics_need_a_step(tmp_path, row):
    with pytest.raises(ConfigError, match="integer 'step'"):
        RunRecorder(tmp_path).append_metrics(row)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step": 3, "note": "\u00e4'.encode()[:-1], "3"])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "x": NaN}\n' + (torn if isinstance(torn, bytes) else torn.encode()))
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "x": None}]


@pytest.mark.parametrize("line", ['{"step": 1', "[1]", "1"])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_no_metrics_are_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resuming_drops_the_steps_that_are_taken_again(tmp_path):
    first = RunRecorder(tmp_path)
    first.write_json("run.json", {"name": "comppo"})
    for step in range(1, 6):
        first.append_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "rew')
    second = RunRecorder.resume(tmp_path, step=3)
    second.append_metrics({"step": 4, "again": 1})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    second.finish({})
    with pytest.raises(RunExistsError, match="finished"):
        RunRecorder.resume(tmp_path, step=3)


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        RunRecorder.resume(tmp_path, step=1)


class Colour(enum.StrEnum):
    RED = "red"


@dataclass
class Config:
    rate: float
    where: Path


def test_plain_forms():
    given = {
        1: Config(rate=1e-5, where=Path("a/b")),
        "tensor": torch.tensor([[1.0, math.nan]]),
        "flag": torch.tensor(True),
        "enum": Colour.RED,
        "set": {3},
        "tuple": (None, True),
    }
    assert plain(given) == {
        "1": {"rate": 1e-5, "where": "a/b"},
        "tensor": [[1.0, None]],
        "flag": True,
        "enum": "red",
        "set": [3],
        "tuple": [None, True],
    }
    assert type(plain(given)["enum"]) is str
    with pytest.raises(ConfigError, match="type function cannot be recorded"):
        plain({"function": plain})


def test_settings_keep_infinity_and_measurements_do_not(tmp_path):
    run = RunRecorder(tmp_path)
    run.write_json("run.json", {"config": {"gate": {"maximum": math.inf, "least": -math.inf}}})
    run.write_json("credit.json", [{"advantages": [math.inf]}])
    assert json.loads((tmp_path / "run.json").read_text())["config"]["gate"] == {"maximum": "inf", "least": "-inf"}
    assert json.loads((tmp_path / "credit.json").read_text()) == [{"advantages": [None]}]


def test_half_a_character_can_be_recorded(tmp_path):
    run = RunRecorder(tmp_path)
    run.write_json("credit.json", [{"tokens": ["\udce2", "é"]}])
    assert json.loads((tmp_path / "credit.json").read_text()) == [{"tokens": ["\udce2", "é"]}]


def test_versions_do_not_need_the_package():
    found = versions(["torch", "surely-not-installed"])
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert found["surely-not-installed"] is None
    assert set(versions()) == {"python", "torch", "transformers", "trl", "comppo"}


def test_secrets_are_masked_wherever_they_stand(tmp_path):
    run = RunRecorder(tmp_path)
    settings = {
        "hub_token": "abc1",
        "model_init_kwargs": {"token": "abc2", "revision": "main"},
        "nested": [{"api_key": "abc3"}],
        "as_json": '{"password": "abc4", "a": 1}',
        "url": "https://user:abc5@host/path",
        "free_text": "uses hf_abc6abcdefghijklmnop here",
        "client_secret": "abc7",
        "gate_sink_tokens": 1,
        "push_to_hub_token": None,
        "gate_unit": "tokens",
    }
    run.write_json("run.json", {"config": settings})
    text = (tmp_path / "run.json").read_text()
    assert not [f"abc{i}" for i in range(1, 8) if f"abc{i}" in text]
    config = json.loads(text)["config"]
    assert config["model_init_kwargs"] == {"token": "***", "revision": "main"}
    assert (config["gate_sink_tokens"], config["push_to_hub_token"], config["gate_unit"]) == (1, None, "tokens")
    assert config["url"] == "https://***@host/path"


def test_commands_are_quoted_and_masked():
    words = ["comppo", "train", "--hub_token", "abc", "--push-to-hub-token=abc", "--run_name", "two words", "--lam=1"]
    words += ["--model_init_kwargs", '{"token": "abc", "a": 1}', "--task_params", '{"length": 2}']
    shown = masked_command(words)
    assert "abc" not in shown
    assert shlex.split(shown) == [
        *("comppo", "train", "--hub_token", "***", "--push-to-hub-token=***", "--run_name", "two words", "--lam=1"),
        *("--model_init_kwargs", '{"token": "***", "a": 1}', "--task_params", '{"length": 2}'),
    ]
