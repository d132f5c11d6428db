"""Checks that every command makes first: what is installed, and where it may write."""

import os
from importlib.util import find_spec
from pathlib import Path

from comppo.errors import ConfigError, MissingExtraError


def require_training() -> None:
    """Check that the packages of the `train` extra are there.

    Raises:
        MissingExtraError: names the missing ones and the command that installs them.
    """
    missing = [
        name
        for name in ("transformers", "trl", "accelerate", "datasets", "safetensors", "rich", "jinja2", "matplotlib")
        if find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(f"this command needs {', '.join(missing)}: pip install 'comppo[train]'.")


def check_writable(folder: Path, name: str) -> None:
    """Refuse a folder that cannot be made or written to.

    Args:
        folder: need not exist.
        name: of the argument, for messages.

    Raises:
        ConfigError: the folder or one above it is a file, or may not be written to.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ConfigError(f"{name}={str(folder)!r}: {str(nearest)!r} is a file: choose a folder. Nothing was written.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}={str(folder)!r}: {str(nearest)!r} may not be written to: choose another folder.")
