"""Hooks that a copy of a model does not take over from it."""

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A forward hook that is never compiled; copied or pickled with its module, it becomes one that does nothing.

    Copies are made for references and moving averages while somebody reads the original.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        """Wrap what is to be called."""
        self._call: Callable[..., None] = torch.compiler.disable(call)  # here: the decorator loads the compiler

    def __call__(self, *args: Any) -> None:
        """Called by the module."""
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """In the copy."""
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """In the file."""
        return _of_file, ()


def _of_file() -> Callable[..., None]:
    return nothing


def nothing(*args: Any) -> None:
    """The hook of a copy."""
