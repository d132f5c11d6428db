"""A made-up pair of runs that looks like a real one: both arms, noisy rewards, gates, and credit per token."""

import math
import random
import re
import shutil
from pathlib import Path

import pytest

from comppo.study.record import RunRecorder, versions

PROMPT = (
    "<|im_start|>user\nA farmer has 17 sheep. All but 9 run away, and then 4 come back.\n"
    "How many sheep does the farmer have? Answer in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
)
SUCCESS = (
    "All but 9 run away, so 9 sheep stay.\nThen 4 of them come back, which makes 9 + 4 = 13.\n\n"
    "Check: 17 - 9 = 8 ran away, and 8 - 4 = 4 are still gone. 13 + 4 = 17, as it should be.\n"
    "The answer is \\boxed{13}.<|im_end|>"
)
FAILURE = (
    "The farmer starts with 17 sheep and 9 of them run away.\nThat leaves 17 - 9 = 8 sheep.\n"
    "Then 4 come back: 8 + 4 = 12.\n\nSo the answer is \\boxed{12}.<|im_end|>"
)


def tokenise(text: str) -> list[str]:
    """Words with their leading space, numbers, punctuation, line breaks."""
    return re.findall(r"<\|\w+\|>|\n+| ?[A-Za-z]+| ?\d|[^\w\s]| ", text)


def response(text: str, reward: float, *, gated: bool, seed: int) -> dict:
    """Credit as Comp-GAE would give it (or one number for the whole response), from a made-up critic and statistic."""
    draw = random.Random(seed)
    tokens = tokenise(text)
    size = len(tokens)
    record = {"prompt": PROMPT, "completion": text, "reward": reward, "tokens": tokens}
    record |= {"logps": [-abs(draw.gauss(0, 0.7)) for _ in tokens], "trained": [True] * size}
    if not gated:
        level = 0.87 if reward else -0.61
        return record | {"advantages": [level] * size, "gates": None, "values": None, "statistic": None}
    statistic = [draw.gauss(0, 1) for _ in tokens]
    gates = [0.9 + 0.1 / (1 + math.exp(-z - 0.4)) for z in statistic]
    values = [min(1.0, max(0.0, 0.45 + (reward - 0.45) * (t / size) ** 2 + draw.gauss(0, 0.05))) for t in range(size)]
    advantages, carried, following = [0.0] * size, 0.0, 0.0
    for t in reversed(range(size)):
        earned = reward if t == size - 1 else 0.0
        carried = earned + gates[t] * following - values[t] + 0.95 * gates[t] * carried
        advantages[t], following = carried, values[t]
    return record | {"advantages": advantages, "gates": gates, "values": values, "statistic": statistic}


def whiten(responses: list[dict]) -> None:
    """Advantages with mean 0 and standard deviation 1 over all tokens, as trainers use them."""
    everything = [value for record in responses for value in record["advantages"]]
    mean = sum(everything) / len(everything)
    std = math.sqrt(sum((value - mean) ** 2 for value in everything) / len(everything))
    for record in responses:
        record["advantages"] = [(value - mean) / std for value in record["advantages"]]


def write_run(folder: Path, name: str, title: str, *, seed: int = 0, steps: int = 120) -> Path:
    """Record one made-up run; `name` "comppo" has gates and a critic."""
    draw = random.Random(f"{name}{seed}")
    gated = name == "comppo"
    run = RunRecorder(folder)
    config = {"learning_rate": 1e-5, "num_generations": 8, "max_completion_length": 256, "beta": 0.0}
    if gated:
        config |= {"gate": {"g_min": 0.9, "g_max": 1.0, "sharpness": 1.0}, "gae_lambda": 0.95}
    about = {"name": name, "title": title, "config": config, "versions": versions(), "seed": seed}
    run.write_json("run.json", about | {"started": "2026-11-30T09:12:44Z", "command": f"comppo demo --arm {name}"})
    top = 0.62 if gated else 0.55
    for step in range(1, steps + 1):
        level = 0.18 + (top - 0.18) * (1 - math.exp(-step / 40))
        row = {"step": step, "reward": min(1, max(0, draw.gauss(level, 0.07))), "time_s": 4.1 * step}
        if step % 20 == 0:
            row["eval_accuracy"] = round(200 * min(1, max(0, draw.gauss(level - 0.02, 0.02)))) / 200
        if gated:
            row |= {"comppo/gate_mean": 0.96 + draw.gauss(0, 0.001), "comppo/gate_std": 0.02 + draw.gauss(0, 0.002)}
            row["comppo/explained_variance"] = 0.55 * (1 - math.exp(-step / 25)) - 0.2 * math.exp(-step / 4)
            row["comppo/retention"] = 0.05 + draw.gauss(0, 0.004)
            row["comppo/critic_loss"] = (
                math.nan if step == 1 else 0.05 + 0.2 * math.exp(-step / 15) * draw.uniform(0.8, 1.2)
            )
        run.append_metrics(row)
    both = [response(SUCCESS, 1.0, gated=gated, seed=1), response(FAILURE, 0.0, gated=gated, seed=2)]
    if gated:
        whiten(both)
    run.write_json("credit.json", both)
    if gated:
        edges = [0.9 + 0.0025 * i for i in range(41)]
        counts = [round(4000 * math.exp(-(((i - 25) / 8) ** 2) / 2)) for i in range(40)]
        run.write_json(
            "gates.json",
            {"edges": edges, "counts": counts, "minimum": 0.9003, "maximum": 0.9991, "mean": 0.9601}
            | {"lower_bound": 0.9, "upper_bound": 1.0, "reference": 0.96},
        )
    after = row["eval_accuracy"]
    result = {"accuracy_before": 0.185, "accuracy_after": after, "eval_count": 200, "responses": 7680}
    run.finish(
        result | {"tokens": 812_344, "time_s": 512.3 if gated else 441.8, "peak_memory_mb": 2310.4, "model": "model"}
    )
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> list[Path]:
    """The pair, for tests that only read it."""
    folder = tmp_path_factory.mktemp("recorded")
    return [write_run(folder / "comppo", "comppo", "CompPO"), write_run(folder / "grpo", "grpo", "GRPO")]


@pytest.fixture
def pair(recorded, tmp_path: Path) -> list[Path]:
    """A copy of the pair, to be changed."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in recorded]


@pytest.fixture
def make_run():
    """`write_run`, for tests that need other runs than the pair."""
    return write_run
