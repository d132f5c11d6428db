"""Objects of the user's own code, named as `module:attribute`. Standard library only."""

import importlib
import os
import sys
from typing import Any

from comppo.errors import ComppoError


def names_object(spec: str) -> bool:
    """Whether `spec` has the form `module:attribute`."""
    module, colon, attribute = spec.partition(":")
    return bool(colon and module and attribute)


def load_object(spec: str, *, called: str, error: type[ComppoError]) -> Any:
    """The object that `module:attribute` names; the module is imported, modules of the current folder included.

    The current folder, as it is now, is put at the end of `sys.path` once and stays there, so that the object can
    import modules beside its own when it is used; installed modules of the same name go first then. The named module
    itself is looked for in the current folder first.

    Args:
        spec: a text for which `names_object` holds.
        called: what the object is, and its spec, for messages: "reward 'module:function'".
        error: what is raised.

    Returns:
        The object as it is.

    Raises:
        ComppoError: (an `error`) the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = spec.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as failure:  # the user's code: it may raise anything
        raise error(
            f"{called}: importing module {module_name!r} failed: {type(failure).__name__}: {failure}. "
            "Run from the folder that holds it, or install it."
        ) from failure
    finally:
        sys.path.remove(folder)  # the first one: that at the end stays
    if not hasattr(module, attribute):
        raise error(f"{called}: module {module_name!r} has no {attribute!r}.")
    return getattr(module, attribute)
