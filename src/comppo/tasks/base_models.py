"""Base models that come with the package."""

from pathlib import Path

from comppo.errors import TaskError

BUNDLED = {"chain": Path(__file__).parent / "bundled" / "chain"}
"""Folders of the bundled base models, by task. Each holds a `card.json` with its measured accuracies: the chain model
keeps to the format at its default size and below, and loses it on longer problems."""


def resolve_model(name: str) -> str:
    """The folder of a bundled base model for "bundled" or "bundled:chain"; any other name as it is.

    Args:
        name: "bundled" (the chain model), "bundled:" and a key of `BUNDLED`, a folder or a hub name.

    Returns:
        A folder or hub name for `from_pretrained`.

    Raises:
        TaskError: "bundled:" with an unknown name.
    """
    if name == "bundled":
        name = "bundled:chain"
    if not name.startswith("bundled:"):
        return name
    folder = BUNDLED.get(name.removeprefix("bundled:"))
    if folder is None:
        raise TaskError(
            f"model {name!r} is unknown: bundled models are {', '.join(f'bundled:{key}' for key in BUNDLED)}."
        )
    return str(folder)
