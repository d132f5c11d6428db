"""The quickstart from end to end, in two steps an arm: models load, the page stands alone, the table is printed."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("COMPPO_UNHOOKED", None)
    done = subprocess.run(
        [sys.executable, "-c", "from comppo.cli import main; main()", "quickstart", "--steps", "2"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return folder / "runs" / "quickstart", done.stdout


def test_it_says_what_it_will_do_and_prints_both_arms(finished):
    _, printed = finished
    assert printed.index("minutes on 2 cores") < printed.index("Held-out greedy accuracy")
    table = printed[printed.rindex("Held-out greedy accuracy") :]
    assert "comppo" in table
    assert "grpo" in table
    assert table.count("256") >= 4, "held-out prompts and sampled responses of both arms"


def test_both_arms_started_alike_and_sampled_alike(finished):
    folder, _ = finished
    results = [json.loads((folder / arm / "result.json").read_text()) for arm in ("comppo", "grpo")]
    for key in ("accuracy_before", "responses", "eval_count"):
        assert results[0][key] == results[1][key], key
    assert results[0]["responses"] == 256
    assert 0.2 < results[0]["accuracy_before"] < 0.4


def test_both_models_load_without_comppo_and_differ(finished):
    folder, _ = finished
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "models = [AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:]]\n"
        "[AutoTokenizer.from_pretrained(path) for path in sys.argv[1:]]\n"
        "first, second = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)\n"
        "assert not torch.equal(first, second)\nassert 'comppo' not in sys.modules"
    )
    paths = [str(folder / arm / "model") for arm in ("comppo", "grpo")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_report_stands_alone_and_shows_credit(finished):
    folder, _ = finished
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "<script" not in page
    for shown in ("Held-out", "CompPO", "GRPO", "gate", "advantage"):
        assert shown in page, shown


def test_a_failed_arm_is_named_with_the_end_of_its_log(tmp_path, monkeypatch):
    from comppo.cli import quickstart
    from comppo.errors import ComppoError

    specs = quickstart.write_specs(tmp_path, steps=1, seed=0)
    broken = json.loads(specs["grpo"].read_text()) | {"task": "no_such_task"}
    specs["grpo"].write_text(json.dumps(broken))
    with pytest.raises(ComppoError, match=r"grpo run failed[\s\S]*no_such_task"), quickstart.running(specs) as workers:
        quickstart.watch(workers, specs, 1)
    assert all(worker.poll() is not None for worker in workers.values()), "no arm outlives the command"
