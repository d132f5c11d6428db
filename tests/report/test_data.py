import json
from pathlib import Path

import pytest

from comppo.report import credit
from comppo.report.data import load_runs, wilson_interval
from comppo.report.fields import Fields
from comppo.report.runfiles import RecordError


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_pair_is_read(pair):
    comppo, grpo = load_runs(pair)
    assert (comppo.label, grpo.label) == ("CompPO", "GRPO")
    assert comppo.result.eval_count == 200
    assert comppo.gates.span == (0.9, 1.0)
    assert grpo.gates is None
    assert len(comppo.responses[0].gates) == len(comppo.responses[0].tokens)
    assert len(comppo.series("reward")) == 120
    assert len(comppo.series("critic_loss")) == 119  # the first is NaN
    assert grpo.series("gate_mean") == []


def test_a_run_in_progress_is_read(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "comppo"}')
    (run,) = load_runs([tmp_path])
    assert (run.title, run.metrics, run.responses, run.gates, run.result) == ("comppo", (), (), None, None)


@pytest.mark.parametrize(
    ("accuracy", "count", "low", "high"),
    # Roots p of (x - p)^2 = z^2 p (1 - p) / n. At x = 0 they are 0 and z^2 / (n + z^2); x = 1/2 is symmetric about 1/2:
    # p = 1/2 -+ z / (2 sqrt(n + z^2)).
    [
        (0.0, 10, 0.0, 3.841458820694124 / 13.841458820694124),
        (1.0, 10, 10 / 13.841458820694124, 1.0),
        (
            0.5,
            100,
            0.5 - 1.959963984540054 / (2 * 103.841458820694124**0.5),
            0.5 + 1.959963984540054 / (2 * 103.841458820694124**0.5),
        ),
    ],
)
def test_wilson_interval_solves_its_quadratic(accuracy, count, low, high):
    assert wilson_interval(accuracy, count) == pytest.approx((low, high), abs=1e-12)


def test_runs_of_one_name_get_labels_that_differ(tmp_path, make_run):
    folders = [make_run(tmp_path / str(i), "comppo", "CompPO", seed=seed, steps=20) for i, seed in enumerate((0, 1, 1))]
    labels = [run.label for run in load_runs(folders)]
    assert labels == ["CompPO, seed 0", "CompPO, seed 1, run 2", "CompPO, seed 1, run 3"]


def test_a_long_title_gives_way_to_the_name(tmp_path, make_run):
    folder = make_run(tmp_path / "run", "comppo", "CompPO with a transport-aligned critic", steps=20)
    (run,) = load_runs([folder])
    assert (run.label, run.title) == ("comppo", "CompPO with a transport-aligned critic")


def test_folders_are_checked(tmp_path, pair):
    with pytest.raises(RecordError, match="folders is empty"):
        load_runs([])
    with pytest.raises(RecordError, match="same folder"):
        load_runs([pair[0], pair[0] / ".." / pair[0].name])
    with pytest.raises(RecordError, match="is not a folder"):
        load_runs([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=r"run\.json does not exist: pass a folder"):
        load_runs([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("run.json", lambda c: c.pop("name"), r"run\.json: 'name' is missing; it must be a text"),
        ("run.json", lambda c: c.update(config=[1]), r"run\.json: 'config' is \[1\]; it must be a JSON object"),
        ("run.json", lambda c: c.update(seed=0.5), r"'seed' is 0.5; it must be a whole number"),
        ("result.json", lambda c: c.update(accuracy_after="61"), r"'accuracy_after' is '61'; it must be a number"),
        ("result.json", lambda c: c.update(eval_count=-1), r"'eval_count' is -1"),
        ("credit.json", lambda c: c[1].pop("tokens"), r"credit\.json, response 1: 'tokens' is missing"),
        ("credit.json", lambda c: c[0]["advantages"].pop(), r"response 0: 'advantages' is .*list of 84 numbers"),
        ("credit.json", lambda c: c[0].update(advantages=None), r"'advantages' is None; it must be a list"),
        ("credit.json", lambda c: c[0]["gates"].__setitem__(0, "1"), r"'gates' is .*a list of numbers"),
        ("credit.json", lambda c: c[0]["trained"].__setitem__(0, 1), r"'trained' is .*true or false"),
        ("gates.json", lambda c: c["edges"].pop(), r"gates\.json: 'edges' is .*41 numbers \(it has 40\)"),
        ("gates.json", lambda c: c["edges"].reverse(), r"'edges' is .*41 increasing numbers"),
        ("gates.json", lambda c: c.update(counts=[]), r"'counts' is \[\]"),
        ("gates.json", lambda c: c["counts"].__setitem__(0, -1), r"'counts' is .*non-negative"),
        ("gates.json", lambda c: c.update(minimum=2), r"'minimum' is 2; .*at most 'maximum'"),
    ],
)
def test_an_error_names_file_key_and_remedy(pair, file, edit, message):
    change(pair[0] / file, edit)
    with pytest.raises(RecordError, match=message) as caught:
        load_runs(pair)
    assert "again" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": "1"}', "'step' is '1'"),
        ('{"reward": 1}', "'step' is missing"),
        ('{"step": 1, "reward": "x"}', "'reward'"),
    ],
)
def test_a_wrong_metric_is_named_with_its_line(pair, line, message):
    with (pair[0] / "metrics.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RecordError, match=rf"metrics\.jsonl, line 121: {message}"):
        load_runs(pair)


@pytest.mark.parametrize("huge", ["1e999", "-1e999", "9" * 400, "9" * 5000, "NaN", "-Infinity"])
def test_numbers_that_no_float_holds_count_as_missing(pair, huge):
    """A report is written all the same, and no bare OverflowError or ValueError comes up."""
    path = pair[0] / "credit.json"
    content = json.loads(path.read_text())
    content[0]["advantages"][0] = content[0]["logps"][1] = content[1]["reward"] = "HUGE"
    path.write_text(json.dumps(content).replace('"HUGE"', huge))
    with (pair[0] / "metrics.jsonl").open("a") as stream:
        stream.write(f'{{"step": 121, "reward": {huge}}}\n')
    runs = load_runs(pair)
    first, second, *_ = runs[0].responses
    assert (first.advantages[0], first.logps[1], second.reward) == (None, None, None)
    assert len(runs[0].series("reward")) == 120
    credit.build(runs)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -(10**400)], ids=["inf", "nan", "huge"])
def test_fields_give_none_for_what_is_not_finite(value):
    record = Fields(Path("x.json"), {"a": value, "b": [value, 1]})
    assert record.number("a") is record.integer("a") is None
    assert record.numbers("b", 2) == (None, 1.0)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeffnot json", "[" * 100_000])
def test_files_that_are_no_record(pair, text):
    (pair[0] / "result.json").write_text(text)
    with pytest.raises(RecordError, match=r"result\.json (is not JSON|holds list)"):
        load_runs(pair)
