"""Errors that a user of comppo can meet. Standard library only, so that every layer may import them.

Each message names the argument, the value that was given and the remedy.
"""


class ComppoError(Exception):
    """Base of every error that comppo raises on purpose."""


class ConfigError(ComppoError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class EvidenceError(ComppoError, ValueError):
    """Tensors that describe a rollout disagree in shape, dtype or content."""


class UnreadableModelError(ComppoError, ValueError):
    """The computation of a model cannot be read; the message names the layers and the reason."""


class RewardError(ComppoError, ValueError):
    """A reward function returned something that is not one number (or None) per completion."""


class TaskError(ComppoError, ValueError):
    """A task or data set is unknown, or lacks what training needs."""


class RunExistsError(ComppoError, FileExistsError):
    """The output folder already holds a run; nothing is overwritten."""


class MissingExtraError(ComppoError, ImportError):
    """A feature needs packages that are not installed; the message gives the command that installs them."""
