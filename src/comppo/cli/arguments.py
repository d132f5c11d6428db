"""The arguments of `comppo train`: TRL's parser, with a configuration file whose every field is checked by name."""

import difflib
import enum
import os
import types
import typing
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from comppo.errors import ComppoError, ConfigError

BOOLEANS_TOO = ("scale_rewards", "fsdp")
"""Text fields that also take true and false."""


def parse(arguments: Sequence[str]) -> tuple[Any, Any, Any]:
    """Command line and YAML file as (script arguments, CompPOConfig, ModelConfig); the command line wins.

    Args:
        arguments: as on the command line, without the program's name; `--config` names the file.

    Returns:
        What to train on, how, and the model.

    Raises:
        ConfigError: a field is unknown, has the wrong type or contradicts another, or the file cannot be read.
        SystemExit: `--help` was asked for.
    """
    from trl import ModelConfig, ScriptArguments, TrlParser

    from comppo.trainers.trl.config import CompPOConfig

    @dataclass
    class TrainArguments(ScriptArguments):
        """What to train on."""

        task: str | None = field(
            default=None,
            metadata={"help": "chain, reasoning_gym:NAME, or a hub or local data set with a `prompt` column."},
        )
        task_params: dict[str, Any] | str | None = field(
            default=None,
            metadata={"help": "Parameters of the task: a mapping, on the command line in quotes, as YAML or JSON."},
        )
        # TRL's defaults are names of splits: None tells whether one was asked for
        dataset_train_split: str | None = field(
            default=None, metadata={"help": "Split to train on; the same as task_params' split."}
        )
        dataset_test_split: str | None = field(
            default=None, metadata={"help": "Held-out split; the same as task_params' eval_split."}
        )
        reward_funcs: list[str] | None = field(
            default=None, metadata={"help": "For data sets: math_verify, exact_match or module:function."}
        )
        heldout_every: int = field(
            default=0, metadata={"help": "Steps between greedy held-out evaluations; 0: before and after only."}
        )
        inspect_every: int = field(
            default=0,
            metadata={"help": "Steps between inspect pages of the same prompts, in output_dir/inspect; 0: none."},
        )
        resume: bool = field(default=False, metadata={"help": "Continue the run in output_dir."})

    class Parser(TrlParser):
        """TRL's, which says what is wrong without a page of usage before it."""

        def error(self, message: str) -> NoReturn:
            """Refuse the arguments."""
            raise ConfigError(f"{message}. comppo train --help says what each field takes.")

    kinds = (TrainArguments, CompPOConfig, ModelConfig)
    parser = Parser(kinds, prog="comppo train")
    rest, path = split_config(arguments)
    known = known_fields(parser)
    given = [word[2:].split("=")[0] for word in rest if word.startswith("--")]
    check_names([name for name in given if name != "help"], known, "command line")
    content = {} if path is None else read_config(path)
    environment = content.pop("env", None) or {}
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: env={environment!r} must be a mapping of environment variables.")
    settings = canonical(content, parser, str(path))
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    absent = {f.name for kind in kinds for f in fields(kind) if f.default is None}
    for name, value in settings.items():
        settings[name] = fitting(name, value, hints[name], none=name in absent, where=str(path))
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    parser.set_defaults_with_config(**settings)
    try:
        script, args, model_args = parser.parse_args_into_dataclasses(args=rest)
    except ComppoError:
        raise
    # Raised by checks of TRL and Transformers, which name the field
    except (ValueError, TypeError, AttributeError, OSError, ImportError) as error:
        raise ConfigError(f"these settings are refused: {error}") from error
    return script, args, model_args


def split_config(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--config FILE` or `--config=FILE`, and the file."""
    rest: list[str] = []
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            file = word[len("--config=") :] if "=" in word else next(words, "")
            if not file or file.startswith("--"):
                raise ConfigError("--config needs the path of a YAML file.")
            found.append(file)
        else:
            rest.append(word)
    if len(found) > 1:
        raise ConfigError(f"--config is given {len(found)} times ({', '.join(found)}): give one file.")
    return rest, Path(found[0]) if found else None


def read_config(path: Path) -> dict[Any, Any]:
    """The content of a configuration file.

    Args:
        path: a YAML file.

    Returns:
        Its fields and their values, neither of which is checked.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}. Give a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold a mapping of fields, got {type(content).__name__}.")
    return content


def known_fields(parser: ArgumentParser) -> dict[str, Any]:
    """The parser's actions by the names that they go by, without dashes before them; `help` is not among them."""
    return {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings
        if action.dest != "help" and option.startswith("--")
    }


def check_names(names: Sequence[str], known: Mapping[str, Any], where: str) -> None:
    """Refuse fields that do not exist, with the nearest ones that do."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "comppo train --help lists all fields."
            raise ConfigError(f"unknown field {name!r} in {where}: {hint}")


def canonical(content: Mapping[Any, Any], parser: ArgumentParser, where: str) -> dict[str, Any]:
    """The fields of a file under their own names: dashes become underscores, and `no_NAME: true` is `NAME: false`.

    Args:
        content: what the file holds, `env` aside.
        parser: knows the fields.
        where: the file, for messages.

    Returns:
        Value by field.

    Raises:
        ConfigError: a field does not exist or is given twice, or a `no_` one is neither true nor false.
    """
    known = known_fields(parser)
    check_names([str(name) for name in content], known, where)
    settings: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in content.items():
        action = known[name]
        if action.const is False and action.nargs == 0:  # the complement of a flag
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: {name}={value!r} must be true or false.")
            value = not value
        if action.dest in written:
            raise ConfigError(f"{where}: {written[action.dest]!r} and {name!r} set the same field: give one of them.")
        settings[action.dest], written[action.dest] = value, name
    return settings


def fitting(name: str, value: Any, hint: Any, *, none: bool, where: str) -> Any:
    """`value` as the field takes it: what a command line would make of it, where that is clear.

    Args:
        name: of the field.
        value: from YAML; text for a number is left for the parser to convert.
        hint: the field's type.
        none: whether the field may be null though its type does not say so.
        where: the file, for messages.

    Returns:
        `value`, a number as text where only text is taken, or a single value as a list.

    Raises:
        ConfigError: it does not fit.
    """
    kinds, item = _kinds(hint)
    if object in kinds or type(value) in kinds or (value is None and none):
        wrong = [v for v in value if type(v) not in item] if isinstance(value, list) and object not in item else []
        if not wrong:
            return value
        if item == {float} and all(type(v) is int for v in wrong):
            return [float(v) for v in value]
    elif isinstance(value, bool):
        if name in BOOLEANS_TOO:
            return value
    elif isinstance(value, int | float):
        if float in kinds:
            return float(value)
        if int in kinds and float(value).is_integer():
            return int(value)
        if bool in kinds and value in (0, 1):
            return bool(value)
        if str in kinds:
            return str(value)
    if isinstance(value, str) and kinds & {int, float, bool}:
        return value
    if list in kinds and type(value) in item:
        return [value]
    raise ConfigError(f"{where}: {name}={value!r} does not fit: {name} takes {_spoken(kinds, item)}.{_remedy(value)}")


def _kinds(hint: Any) -> tuple[set[Any], set[Any]]:
    """The plain types that a field takes (`object`: anything), and those of the items of its list.

    Other classes are left out: neither a file nor a command line can give an object of theirs.
    """
    kinds: set[Any] = set()
    item: set[Any] = set()
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for part in typing.get_args(hint) if union else (hint,):
        origin = typing.get_origin(part) or part
        if origin is typing.Literal:
            kinds |= {type(value) for value in typing.get_args(part)}
        elif origin is list:
            kinds.add(list)
            item |= _kinds(typing.get_args(part)[0])[0]
        elif isinstance(origin, type) and issubclass(origin, enum.Enum):
            kinds.add(str)
        elif origin in (str, int, float, bool, dict, type(None)):
            kinds.add(origin)
        elif origin is Any:
            kinds.add(object)
    return kinds, item


def _spoken(kinds: set[Any], item: set[Any]) -> str:
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
    items = {str: "texts", int: "whole numbers", float: "numbers"}
    words = [text for kind, text in names.items() if kind in kinds]
    words += [f"a list of {' or '.join(text for kind, text in items.items() if kind in item)}"] if list in kinds else []
    return " or ".join(words) or "an object, which only a program can give"


def _remedy(value: Any) -> str:
    if isinstance(value, bool):
        return " YAML reads no, off, yes and on as false and true: put the word in quotes."
    if value is None:
        return " Leave the line out for the default."
    return ""
