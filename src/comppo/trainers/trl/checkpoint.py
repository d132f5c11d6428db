"""The critic's part of a checkpoint: its own files beside Transformers', read back strictly."""

from pathlib import Path
from typing import Any

import torch

from comppo.errors import ConfigError
from comppo.trainers.trl.critic import CriticRunner

WEIGHTS = "comppo_critic.safetensors"
STATE = "comppo_state.pt"


def save(folder: Path, critic: CriticRunner | None, counters: dict[str, int]) -> None:
    """Write critic weights, optimiser, schedule and counters into a checkpoint folder."""
    state: dict[str, Any] = {"counters": counters, "critic": None}
    if critic is not None:
        from safetensors.torch import save_file

        weights = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in critic.module.state_dict().items()
        }
        save_file(weights, folder / WEIGHTS)
        state["critic"] = critic.state_dict()
    torch.save(state, folder / STATE)


def load(folder: Path, critic: CriticRunner | None) -> dict[str, int]:
    """Restore what `save` wrote, strictly.

    Args:
        folder: a checkpoint folder.
        critic: changed in place: weights, optimiser and schedule; None for an operator without a critic.

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

        try:
            critic.module.load_state_dict(load_file(folder / WEIGHTS), strict=True)
        except (RuntimeError, FileNotFoundError) as error:
            raise ConfigError(
                f"the critic in {str(folder)!r} does not fit these settings: resume with the critic_* fields that "
                f"the run was started with. {error}"
            ) from error
        critic.load_state_dict(state["critic"])
    counters: dict[str, int] = state["counters"]
    return counters
