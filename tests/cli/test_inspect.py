"""`comppo inspect`: from a model, a run or a checkpoint to a page; and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from comppo.cli.inspect import command
from comppo.cli.train import train
from comppo.errors import ComppoError, ConfigError
from comppo.tasks.base_models import resolve_model

PROMPT = "a7 b3 ca@1 db+5 ec+4 fd@9 ge@9 hf+6 ?g>"


def inspect(*arguments) -> Path:
    """The page that the command wrote."""
    done = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Path(done.stdout.strip())


def refused(error: type[ComppoError], *arguments) -> str:
    with pytest.raises(error) as caught:
        CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)
    return str(caught.value)


def data_of(path: Path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def trained(folder: Path, **more) -> Path:
    settings = {
        "model_name_or_path": "bundled",
        "task": "chain",
        "task_params": {"length": 1, "distractors": 0, "prompts": 16, "eval_prompts": 4},
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 14,
        "max_steps": 2,
        "critic_hidden_size": 8,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "output_dir": str(folder / "run"),
    }
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings | more))
    train(["--config", str(folder / "run.yaml")])
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of training, with checkpoints."""
    return trained(tmp_path_factory.mktemp("run"))


def test_a_model_with_a_task(tmp_path):
    page = inspect("bundled", "--task", "chain", "--prompts", 1, "--responses", 3, "--output", tmp_path / "a.html")
    data = data_of(page)
    assert page == tmp_path / "a.html" and len(data["samples"]) == 3
    assert {"GRPO", "Comp-GAE", "Shuffled gates"} <= {operator["label"] for operator in data["operators"]}
    assert all(sample["reward"] in (0.0, 1.0) and sample["keys"] for sample in data["samples"])


def test_a_prompt_file_of_one_prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    page = inspect("bundled", "--prompt-file", file, "--responses", 2, "--max-new-tokens", 9, "--output", tmp_path)
    data = data_of(page)
    assert page.parent == tmp_path and page.name.startswith("inspect-")
    assert [len(sample["tokens"]) for sample in data["samples"]] == [9, 9]
    shown = "".join(data["vocabulary"][token][0] for token in data["samples"][0]["prompt"])
    assert shown == PROMPT
    assert data["samples"][0]["reward"] is None


def test_a_prompt_file_with_answers(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT, "answer": "5"}, {"prompt": PROMPT, "answer": "6"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    reward = "comppo.tasks.chain:chain_reward"
    page = inspect(
        "bundled", "--prompt-file", file, "--reward", reward, "--max-new-tokens", 60, "--keys", 0, "--output", tmp_path
    )
    samples = data_of(page)["samples"]
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0} and samples[0]["keys"] is None


def test_what_a_run_saved(run, tmp_path):
    data = data_of(inspect("--run", run, "--output", tmp_path))
    assert data["operators"][0]["label"] == "As trained" and data["operators"][1]["label"] == "Comp-GAE"
    used, again = ([c for s in data["samples"] for c in s["credit"][i]["advantages"]] for i in (0, 1))
    mean = sum(again) / len(again)
    slope = sum((a - mean) * u for a, u in zip(again, used, strict=True)) / sum((a - mean) ** 2 for a in again)
    shift = sum(used) / len(used) - slope * mean
    assert [slope * a + shift for a in again] == pytest.approx(used, abs=1e-3)  # whitening is a scale and a shift


def test_a_checkpoint_brings_its_critic(run, tmp_path):
    data = data_of(inspect("--run", run, "--step", 2, "--responses", 2, "--output", tmp_path))
    values = data["samples"][0]["series"]["value"]
    assert len(set(values)) > 1  # the mean of the others would be the same at every token
    assert all(0.0 <= value <= 1.0 for value in values)
    assert len(data["samples"]) == 4 and all(len(sample["tokens"]) <= 14 for sample in data["samples"])


def test_the_last_model_of_a_run(run, tmp_path):
    data = data_of(inspect(run, "--prompts", 1, "--responses", 2, "--output", tmp_path))
    assert len(data["samples"]) == 2 and data["samples"][0]["reward"] is not None


def test_nothing_is_overwritten(run, tmp_path):
    page = tmp_path / "mine.html"
    page.write_text("mine")
    assert "not overwritten" in refused(ConfigError, "--run", run, "--output", page)
    assert page.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either MODEL_OR_RUN"),
        (["bundled", "--run", "RUN"], "give either MODEL_OR_RUN"),
        (["bundled"], "there are no prompts for 'bundled': give --prompt-file FILE or --task NAME"),
        (["bundled", "--task", "chain", "--step", "2"], "--step 2 is a step of a run"),
        (["--run", "RUN", "--task", "chain"], "add --step to sample"),
        (["bundled", "--task", "chain", "--prompt-file", "x"], "both give prompts"),
        (["--run", "RUN", "--step", "7"], r"no checkpoint of that step; there are 1, 2\. Without --step"),
        (["--run", "nowhere"], "nowhere is not a folder"),
        (["bundled", "--prompt-file", "nowhere.txt"], r"--prompt-file 'nowhere\.txt' cannot be read"),
        (["nowhere/at/all", "--task", "chain"], "no such file or folder"),
        (["bundled", "--task", "chains"], "Did you mean 'chain'"),
        (["bundled", "--task", "chain", "--reward", "none_such"], "reward 'none_such' is unknown"),
        (["bundled", "--task", "chain", "--device", "tpu"], "pass cpu, cuda"),
    ],
)
def test_what_is_refused(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    message = refused(ComppoError, *[str(run) if argument == "RUN" else argument for argument in arguments])
    assert re.search(said, message)
    assert not list(tmp_path.iterdir())


def test_rewards_without_their_columns_are_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(PROMPT)
    message = refused(ConfigError, "bundled", "--prompt-file", file, "--reward", "exact_match")
    assert "reward 'exact_match' needs answer, which the prompts do not have" in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "is empty"),
        ("a.jsonl", "\n", "holds no line"),
        ("a.jsonl", "{", "line 1, is not JSON"),
        ("a.jsonl", '{"answer": 1}', 'line 1: it must be an object with a "prompt"'),
        ("a.jsonl", '{"prompt": "a"}\n[]', "line 2: it must be"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "a", "x": 1}', "line 2 has other columns"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}', "mixes texts and messages"),
        ("a.txt", b"\xff", "cannot be read"),
    ],
)
def test_prompt_files_are_checked(tmp_path, name, content, said):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refused(ConfigError, "bundled", "--prompt-file", file, "--output", tmp_path / "out")


def test_folders_without_weights_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    config = Path(resolve_model("bundled")) / "config.json"
    (tmp_path / "model" / "config.json").write_bytes(config.read_bytes())
    assert "holds no weights" in refused(ConfigError, tmp_path / "model", "--task", "chain", "--output", tmp_path)


def test_pages_during_training_change_nothing(run, tmp_path):
    watched = trained(tmp_path, inspect_every=1)
    pages = sorted((watched / "inspect").iterdir())
    assert [page.name for page in pages] == ["step-000001.html", "step-000002.html"]
    first, second = map(data_of, pages)
    assert [s["prompt"] for s in first["samples"]] == [s["prompt"] for s in second["samples"]]
    assert len(set(second["samples"][0]["series"]["value"])) > 1  # from the critic
    assert (watched / "model" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()


def test_pages_during_training_refuse_what_they_cannot_show(tmp_path):
    with pytest.raises(ConfigError, match="inspect_every=-1 must be at least 0"):
        trained(tmp_path, inspect_every=-1)
