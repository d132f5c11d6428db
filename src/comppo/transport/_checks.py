"""Checks at the boundary of the operators: each message names the argument, what was given and the remedy."""

import math

import torch
from torch import Tensor

from comppo.errors import ConfigError, EvidenceError
from comppo.types import Evidence


def require_shapes(mask: Tensor, *, rows: dict[str, Tensor | None] | None = None, **tokens: Tensor | None) -> None:
    """Raise EvidenceError unless `mask` is a boolean matrix, `tokens` have its shape and `rows` one entry per row."""
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise EvidenceError(
            f"mask must be boolean with shape (rows, tokens), got {mask.dtype} with shape {tuple(mask.shape)}: "
            "pass completion_mask.bool()."
        )
    for name, tensor in tokens.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise EvidenceError(
                f"{name} has shape {tuple(tensor.shape)}, but mask has {tuple(mask.shape)}: pass equal shapes."
            )
    for name, tensor in (rows or {}).items():
        if tensor is not None and tensor.shape != mask.shape[:1]:
            raise EvidenceError(
                f"{name} has shape {tuple(tensor.shape)}, but there are {mask.shape[0]} rows: pass one number per row."
            )


def require_finite(name: str, tensor: Tensor, where: Tensor | None = None) -> None:
    """Raise EvidenceError if `tensor` holds NaN or infinity (where `where` is true)."""
    bad = ~torch.isfinite(tensor)
    if where is not None:
        bad &= where
    if bool(bad.any()):
        raise EvidenceError(
            f"{name} holds {tensor[bad][0].item()} at index {bad.nonzero()[0].tolist()}, where it counts: "
            f"pass finite {name}, or mark it as masked or unscorable."
        )


def require_weights(name: str, weights: Tensor, mask: Tensor) -> None:
    """Raise EvidenceError if a weight on an unmasked token is negative or not finite."""
    require_finite(name, weights, mask)
    bad = (weights < 0) & mask
    if bool(bad.any()):
        raise EvidenceError(
            f"{name} holds {weights[bad][0].item()} at index {bad.nonzero()[0].tolist()}: weights are shares, pass "
            "numbers >= 0 (a statistic of either sign can be exponentiated or clamped)."
        )


def require_unit(name: str, number: float) -> None:
    """Raise ConfigError unless `number` lies in [0, 1]."""
    if not 0.0 <= number <= 1.0:
        raise ConfigError(
            f"{name} must lie in [0, 1], got {number!r}. "
            "A horizon of h tokens is exp(-1/h): 10 -> 0.905, 1000 -> 0.999."
        )


def require_positive(name: str, number: float) -> None:
    """Raise ConfigError unless `number` is finite and above 0."""
    if not (math.isfinite(number) and number > 0.0):
        raise ConfigError(f"{name} must be finite and above 0, got {number!r}.")


def require_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `choice` is one of `choices`."""
    if choice not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {choice!r}.")


def require_groups(rows: int, num_generations: int) -> None:
    """Raise EvidenceError unless `rows` consists of whole groups."""
    if num_generations < 1 or rows % num_generations:
        raise EvidenceError(
            f"num_generations={num_generations} does not divide the {rows} rows: pass whole groups of responses."
        )


def needed(evidence: Evidence, name: str, operator: str) -> Tensor:
    """The tensor of the optional field `name`, or EvidenceError if it is missing."""
    tensor: Tensor | None = getattr(evidence, name)
    if tensor is None:
        raise EvidenceError(f"{operator} needs Evidence.{name}, which is None: pass Evidence(..., {name}=...).")
    return tensor


def outcomes(evidence: Evidence) -> Tensor:
    """Outcome of each response, shape (rows,): `response_rewards`, or else the sum of `rewards` over the mask."""
    if evidence.response_rewards is not None:
        return evidence.response_rewards.detach()
    require_finite("rewards", evidence.rewards, trained(evidence))
    return torch.where(trained(evidence), evidence.rewards.detach(), 0).sum(1)


def trained(evidence: Evidence) -> Tensor:
    """The mask without the rows that no reward function could score: those get no credit."""
    return evidence.mask if evidence.scorable is None else evidence.mask & evidence.scorable[:, None]
