"""The critic's part of a checkpoint: its own files beside Transformers', read back strictly."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from comppo.errors import ConfigError
from comppo.trainers.trl.critic import CriticRunner

WEIGHTS = "comppo_critic.safetensors"
STATE = "comppo_state.pt"


def save(folder: Path, critic: CriticRunner | None, counters: dict[str, int]) -> None:
    """Write critic weights, optimiser, schedule and counters into a checkpoint folder, each file in one piece.

    Args:
        folder: made where it does not exist.
        critic: None for runs without one.
        counters: the trainer's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"counters": counters, "critic": None}
    if critic is not None:
        from safetensors.torch import save_file

        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in critic.weights().items()}
        with _whole(folder / WEIGHTS) as path:
            save_file(weights, path)
        state["critic"] = critic.state_dict()
    with _whole(folder / STATE) as path:
        torch.save(state, path)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Write beside `path`, then rename: a reader never sees half a file."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)


def load(folder: Path, critic: CriticRunner | None) -> dict[str, int]:
    """Restore what `save` wrote, strictly.

    Args:
        folder: of the checkpoint.
        critic: restored in place.

    Returns:
        The counters that were saved.

    Raises:
        ConfigError: a file is missing, or the critic was built with other settings.
    """
    path = folder / STATE
    if not path.is_file():
        raise ConfigError(
            f"{str(folder)!r} has no {STATE}, so it was not written by CompPOTrainer: resume a comppo checkpoint, or "
            "pass the folder as `model` to start a new run from its weights."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if (state["critic"] is None) != (critic is None):
        had = "no critic" if state["critic"] is None else "a critic"
        raise ConfigError(f"{str(folder)!r} was written with {had}: resume with the same operator and critic.")
    if critic is not None:
        from safetensors.torch import load_file

        if not (folder / WEIGHTS).is_file():
            raise ConfigError(f"{str(folder)!r} has no {WEIGHTS}: the checkpoint is incomplete, resume an earlier one.")
        critic.restore(load_file(folder / WEIGHTS), state["critic"])
    counters: dict[str, int] = state["counters"]
    return counters
