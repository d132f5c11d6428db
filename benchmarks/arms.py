"""Arms side by side on the bundled task: held-out greedy accuracy by development seed, at the quickstart's settings.

    python benchmarks/arms.py --seeds 0 1 2 --output runs/arms --json arms.json

Every arm of a seed starts from the same weights and sees the same prompts. Development seeds are 0 to 99: what is
chosen with them says nothing about others. A run that is already in the output folder is not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from comppo.cli.quickstart import CONFIG, PROMPTS, STEPS
from comppo.study.arms import ARMS
from comppo.study.record import read_metrics
from comppo.study.run import RunSpec


def run(folder: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Result of one run, made in a process of its own with one thread."""
    result = folder / "result.json"
    if not result.exists():
        spec = RunSpec(
            arm=arm,
            folder=str(folder),
            task_params={"prompts": PROMPTS * steps, "eval_prompts": 256},
            config={**CONFIG, "max_steps": steps},
            seed=seed,
            eval_every=10,
        )
        path = folder.parent / f"{folder.name}.json"
        path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        with path.with_suffix(".log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "comppo.study.run", str(path)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
    rewards = [row["reward"] for row in read_metrics(folder / "metrics.jsonl") if row.get("reward") is not None]
    final = json.loads(result.read_text(encoding="utf-8"))
    return {
        "arm": arm,
        "seed": seed,
        "accuracy_before": final["accuracy_before"],
        "accuracy_after": final["accuracy_after"],
        "mean_reward": mean(rewards),
        "time_s": final["time_s"],
        "peak_memory_mb": final["peak_memory_mb"],
    }


def main() -> None:
    """Run what is missing and print one row per arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not all(0 <= seed < 100 for seed in options.seeds):
        parser.error("development seeds are 0 to 99")
    options.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.workers) as pool:
        waiting = [
            pool.submit(run, options.output / f"{arm}-{seed}", arm, seed, options.steps)
            for seed in options.seeds
            for arm in options.arms
        ]
        records = [future.result() for future in waiting]
    seeds = " ".join(f"| seed {seed} " for seed in options.seeds)
    print(f"| arm {seeds}| mean | mean reward while training | time s |")
    print("|---" * (len(options.seeds) + 4) + "|")
    for arm in options.arms:
        rows = [record for record in records if record["arm"] == arm]
        cells = " ".join(f"| {row['accuracy_after']:.3f} " for row in rows)
        averages = [mean(row[key] for row in rows) for key in ("accuracy_after", "mean_reward", "time_s")]
        print(f"| {arm} {cells}| {averages[0]:.3f} | {averages[1]:.3f} | {averages[2]:.0f} |")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
