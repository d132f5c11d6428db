"""Two gloo processes train as one does, with a group that is spread over both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "distributed_run.py"


def launch(folder, processes, changes):
    folder.mkdir()
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=0", "--standalone"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), str(processes), *changes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]


# Random weights attend nearly evenly: effective keys are then a line in the position, and what is left is rounding.
@pytest.mark.parametrize(
    "changes",
    [
        ["gate_statistic=collision"],
        ["operator=prefix_tree", "whiten_advantages=1"],
        ["operator=gae", "critic=standard"],
    ],
    ids=["comp_gae", "prefix_tree", "standard_critic"],
)
def test_two_processes_train_as_one(changes, tmp_path):
    (one,) = launch(tmp_path / "one", 1, changes)
    first, second = launch(tmp_path / "two", 2, changes)
    torch.testing.assert_close(first["model"], one["model"], rtol=0, atol=1e-5)
    assert torch.equal(first["model"], second["model"])
    assert first["tokens"] == one["tokens"]
    assert first["responses"] == one["responses"] == 24
    if "critic" in one:
        assert torch.equal(first["critic"], second["critic"])
        torch.testing.assert_close(first["critic"], one["critic"], rtol=0, atol=1e-5)
