"""Operators by name, for configs and command lines."""

import dataclasses
from typing import Any

from comppo.errors import ConfigError
from comppo.transport.broadcast import GroupRelative
from comppo.transport.comp_gae import CompGAE
from comppo.transport.gae import GAE
from comppo.transport.prefix_tree import PrefixTree
from comppo.transport.redistribute import Redistribute
from comppo.types import TransportOperator

OPERATORS: dict[str, type[GroupRelative] | type[GAE] | type[CompGAE] | type[Redistribute] | type[PrefixTree]] = {
    "group_relative": GroupRelative,
    "gae": GAE,
    "comp_gae": CompGAE,
    "redistribute": Redistribute,
    "prefix_tree": PrefixTree,
}


def build_operator(operator: str | TransportOperator, **params: Any) -> TransportOperator:
    """The operator with that name and those settings, or `operator` itself if it is one already.

    Args:
        operator: a name in `OPERATORS`, or any object that fulfils `TransportOperator`.
        **params: settings of the named operator: the fields of its class.

    Returns:
        The operator.

    Raises:
        ConfigError: an unknown name or setting, a setting out of range, or settings for a finished operator.
    """
    if not isinstance(operator, str):
        if not isinstance(operator, TransportOperator):
            raise ConfigError(
                f"operator must be one of {', '.join(OPERATORS)} or have needs, __call__, deltas and kernel, "
                f"got {operator!r}."
            )
        if params:
            raise ConfigError(
                f"settings {', '.join(params)} were given with a finished operator {operator!r}: set them on it."
            )
        return operator
    if operator not in OPERATORS:
        raise ConfigError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}.")
    kind = OPERATORS[operator]
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ConfigError(f"{operator} has no setting {', '.join(map(repr, unknown))}: it has {', '.join(known)}.")
    return kind(**params)
