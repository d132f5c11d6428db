"""What a run saved of its last generation, as an inspection: the credit as it was used, and other operators on it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comppo.errors import ConfigError
from comppo.inspect.operators import OperatorCredit, operator_credit
from comppo.inspect.tensors import inspect_tensors
from comppo.report.data import Response, Run, load_runs
from comppo.report.inspection import Inspection
from comppo.transport import GAE, CompGAE, constant, inverted, shuffled
from comppo.types import Evidence


def inspect_run(folder: Path) -> Inspection:
    """The responses that a run saved with their credit.

    "As trained" is what the update used, whitened where the run whitens. Where values and gates were saved, credit is
    computed again from them with the run's gamma and lambda, before whitening, so that the page can say where it comes
    from and what fixed and moved gates would have given.

    Args:
        folder: a run folder.

    Returns:
        For `comppo.inspect.write_page`.

    Raises:
        RecordError: the folder does not hold a valid run.
        ConfigError: the run saved no responses.
    """
    run = load_runs([folder])[0]
    saved = [response for response in run.responses if response.tokens]
    if not saved:
        raise ConfigError(
            f"{str(folder)!r} saved no responses (credit.json): a run writes them at its end. Look at a checkpoint "
            "with --step, or give a model and a --prompt-file."
        )
    order = list(dict.fromkeys(response.prompt for response in saved))
    saved.sort(key=lambda response: order.index(response.prompt))
    width = max(len(response.tokens) for response in saved)
    real = torch.zeros(len(saved), width, dtype=torch.bool)
    for row, response in enumerate(saved):
        real[row, : len(response.tokens)] = True
    trained = _padded([response.trained for response in saved], width).nan_to_num(0.0).bool()
    trained_credit = _padded([response.advantages for response in saved], width)
    about = "The advantages that the update used, after whitening where the run whitens."
    operators = {"As trained": OperatorCredit(advantages=trained_credit, gates=_of(saved, "gates", width), about=about)}
    operators |= _again(saved, trained, _settings(run), width)
    series = {"statistic": "statistic", "value": "values", "logp": "logps"}
    found = {key: (name, tensor) for key, name in series.items() if (tensor := _of(saved, name, width)) is not None}
    inspection = inspect_tensors(
        responses=[response.tokens for response in saved],
        operators=operators,
        tokenizer=None,
        completion_mask=real,
        mask=trained,
        prompts=[response.prompt for response in saved],
        rewards=[response.reward for response in saved],
        num_generations=1,
        series=found,
        quantities=[],
        top_keys=None,
        labels=[f"Response {index + 1}" for index in range(len(saved))],
        title=run.title,
        notes=[f"Responses that the run in {folder.name} saved of its last generation: the best and worst rewarded."],
    )
    return _grouped(inspection, [order.index(response.prompt) for response in saved])


def _again(
    saved: list[Response], trained: Tensor, settings: Mapping[str, Any], width: int
) -> dict[str, OperatorCredit]:
    """Credit from saved values and gates."""
    values, gates = _of(saved, "values", width), _of(saved, "gates", width)
    if values is None or any(response.reward is None for response in saved):
        return {}
    if bool((values.isnan() & trained).any()) or (gates is not None and bool((gates.isnan() & trained).any())):
        return {}
    last = trained & (trained.cumsum(1) == trained.sum(1, keepdim=True))
    outcome = torch.tensor([response.reward for response in saved], dtype=torch.float64)
    rewards = torch.where(last, outcome[:, None], 0.0)
    common: dict[str, Any] = {
        "gamma": float(settings.get("gamma", 1.0)),
        "lam": float(settings.get("lam", 1.0)),
        "length_alpha": settings.get("length_adaptive_alpha"),
    }
    plain = GAE(**common)
    evidence = Evidence(rewards=rewards, mask=trained, values=values.nan_to_num(0.0))
    shown = {"GAE": operator_credit(plain, evidence, about="No gate: the run's values, gamma and lambda.")}
    if gates is None:
        return shown
    gated = CompGAE(
        **common,
        gate_bootstrap=bool(settings.get("gate_bootstrap", False)),
        gate_trace=bool(settings.get("gate_trace", True)),
    )
    gates = torch.where(trained, gates, 1.0)

    def with_gates(moved: Tensor, about: str) -> OperatorCredit:
        values = evidence.values
        given = Evidence(rewards=rewards, mask=trained, values=values, gates=moved)
        return operator_credit(gated, given, about=about)

    order = torch.Generator().manual_seed(int(settings.get("seed") or 0))
    return {
        "Comp-GAE": with_gates(gates, "The run's own values and gates, before whitening."),
        "Fixed GAE": with_gates(constant(gates, trained), "One coefficient: the mean of the gates shown here."),
        **shown,
        "Shuffled gates": with_gates(
            shuffled(gates, trained, generator=order), "Control: each response's gates in random order."
        ),
        "Inverted gates": with_gates(
            inverted(gates, trained), "Control: the largest gate stands where the smallest was, and so on."
        ),
    }


def _settings(run: Run) -> Mapping[str, Any]:
    """The trainer's settings: a study keeps them one level deeper than `comppo train`."""
    deeper = run.config.get("settings")
    return deeper if isinstance(deeper, dict) else run.config


def _of(saved: list[Response], name: str, width: int) -> Tensor | None:
    found = [getattr(response, name) for response in saved]
    return None if any(series is None for series in found) else _padded(found, width)


def _padded(rows: list[Any], width: int) -> Tensor:
    """(rows, width), float64, NaN where there is no number."""
    padded = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
    for row, values in enumerate(rows):
        known = [float("nan") if value is None else float(value) for value in values]
        padded[row, : len(known)] = torch.tensor(known, dtype=torch.float64)
    return padded


def _grouped(inspection: Inspection, groups: list[int]) -> Inspection:
    """The same with responses to one prompt side by side."""
    import dataclasses

    samples = [
        dataclasses.replace(sample, group=group) for sample, group in zip(inspection.samples, groups, strict=True)
    ]
    return dataclasses.replace(inspection, samples=samples)
