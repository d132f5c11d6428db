"""Saved runs: credit as it was used, and computed again from what was saved."""

import pytest
import torch

from comppo.errors import ConfigError
from comppo.inspect.records import inspect_run
from comppo.report.inspect_page import render
from comppo.study.record import RunRecorder
from comppo.transport import comp_gae


def write_run(folder, *, gates=True, values=True, rewards=(1.0, 0.0, 1.0), settings=None, saved=True):
    draw = torch.Generator().manual_seed(0)
    tokens, rows = 9, len(rewards)
    made = {
        name: torch.rand(rows, tokens, generator=draw, dtype=torch.float64) for name in ("values", "gates", "logps")
    }
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[0, 4] = False
    earned = torch.zeros(rows, tokens, dtype=torch.float64)
    earned[:, -1] = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64)
    credit = comp_gae(
        earned, made["values"], made["gates"], mask, gamma=0.98, lam=0.9, gate_bootstrap=False, gate_trace=True
    ).advantages
    white = torch.where(mask, 3.0 * credit - 0.5, 0.0)
    records = [
        {
            "prompt": "two" if row == 1 else "one",
            "completion": "abcdefghi",
            "reward": rewards[row],
            "tokens": list("abcdefghi"),
            "trained": mask[row].tolist(),
            "advantages": white[row].tolist(),
            "gates": made["gates"][row].tolist() if gates else None,
            "values": made["values"][row].tolist() if values else None,
            "logps": (-made["logps"][row]).tolist(),
            "statistic": None,
        }
        for row in range(rows)
    ]
    run = RunRecorder(folder)
    config = {"gamma": 0.98, "lam": 0.9, "gate_bootstrap": False, "gate_trace": True}
    run.write_json("run.json", {"name": "n", "title": "A run", "config": config if settings is None else settings})
    if saved:
        run.write_json("credit.json", records)
    return folder, credit, white


@pytest.mark.parametrize("deeper", [False, True])
def test_credit_is_computed_again(tmp_path, deeper):
    own = {"gamma": 0.98, "lam": 0.9, "gate_bootstrap": False, "gate_trace": True}
    folder, credit, white = write_run(tmp_path / "run", settings={"settings": own} if deeper else own)
    found = inspect_run(folder)
    labels = [operator.label for operator in found.operators]
    assert labels == ["As trained", "Comp-GAE", "Fixed GAE", "GAE", "Shuffled gates", "Inverted gates"]
    assert [sample.group for sample in found.samples] == [0, 0, 1]  # responses to one prompt side by side
    for sample, row in zip(found.samples, (0, 2, 1), strict=True):
        assert sample.credit[0].advantages == pytest.approx(white[row].tolist())
        assert sample.credit[1].advantages == pytest.approx(credit[row].tolist())
        assert sample.reward == (1.0, 0.0, 1.0)[row]
    assert found.samples[0].trained[4] is False and "A run" in render(found)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({"gates": False}, ["As trained", "GAE"]),
        ({"values": False}, ["As trained"]),
        ({"rewards": (1.0, None)}, ["As trained"]),
    ],
)
def test_what_was_not_saved_is_not_made_up(tmp_path, given, labels):
    found = inspect_run(write_run(tmp_path / "run", **given)[0])
    assert [operator.label for operator in found.operators] == labels
    assert render(found)


def test_runs_without_responses_are_refused(tmp_path):
    folder = write_run(tmp_path / "run", saved=False)[0]
    with pytest.raises(ConfigError, match=r"saved no responses \(credit\.json\).*--step"):
        inspect_run(folder)
