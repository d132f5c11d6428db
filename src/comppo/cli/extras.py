"""A clear word when an optional part is not installed."""

from importlib.util import find_spec

from comppo.errors import MissingExtraError


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
