"""Writing down what a run did, so that a report or a study needs nothing but its folder. Standard library only.

A run folder holds `run.json` (what was run), `metrics.jsonl` (one object a step), and, where the run has them,
`credit.json` (responses with their credit per token), `gates.json` (a histogram of the gates) and, last of all,
`result.json`: its presence says that the run came to its end.
"""

import dataclasses
import enum
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comppo.errors import ConfigError, RunExistsError
from comppo.report.runfiles import (
    CREDIT_FILE,
    GATES_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RUN_FILE,
    read_metrics,
    write_atomically,
)

__all__ = ["RunRecorder", "masked", "masked_command", "read_metrics", "versions"]

RECORDED_PACKAGES = ("torch", "transformers", "trl", "comppo")


RECORDS = (RUN_FILE, METRICS_FILE, RESULT_FILE, CREDIT_FILE, GATES_FILE)
"""Everything that a recorder writes."""
MASK = "***"
_SECRET_NAME = re.compile(r"(^|[_-])(tokens?|password|passwd|secret|credentials?|(api|access|secret)[_-]?key)$", re.I)
_SECRET_TEXT = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=://)[^/@\s]+(?=@)")
"""Tokens of the Hugging Face hub, and what stands before the host of an address."""


def masked(value: Any, name: str = "") -> Any:
    """A copy of `value` without secrets.

    Args:
        value: a setting; text, numbers, and mappings and lists of settings.
        name: of the setting; where it speaks of a token, password, secret or key, its text is masked as a whole.

    Returns:
        `value` with `MASK` in the place of each secret, in nested settings and in JSON within text too.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if not value or not isinstance(value, str) or isinstance(value, enum.Enum):
        return value
    if _SECRET_NAME.search(name):
        return MASK
    if value.lstrip().startswith(("{", "[")):
        try:
            content = json.loads(value)
        except ValueError:
            content = None
        if content is not None and masked(content) != content:
            return json.dumps(masked(content))
    return _SECRET_TEXT.sub(MASK, value)


def masked_command(words: Sequence[str]) -> str:
    """A command line as a shell takes it, without secrets.

    Args:
        words: program and arguments, `--name value` and `--name=value` alike.

    Returns:
        One line, quoted for a POSIX shell, with `MASK` in the place of secrets (see `masked`).
    """
    shown: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            shown.append(name + equals + masked(value, name.lstrip("-")))
        else:
            shown.append(masked(word, name.lstrip("-")))
    return shlex.join(shown)


def versions(packages: Sequence[str] = RECORDED_PACKAGES) -> dict[str, str | None]:
    """Version of Python and of each installed package, without importing any; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def plain(value: Any, *, infinity: str | None = None) -> Any:
    """Turn `value` into what JSON can hold.

    Args:
        value: numbers, text, lists, sets, mappings, dataclasses, enums, paths, tensors, arrays, and any nesting.
        infinity: what infinity becomes, with a "-" before it where it is negative; None for None.

    Returns:
        None, booleans, integers, finite floats, text, lists, and dictionaries with text as keys: NaN becomes None,
        tensors and arrays become numbers or lists, sets become lists in the order of their items' repr.

    Raises:
        ConfigError: there is no plain form for a value's type.
    """
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, enum.Enum) else plain(value.value, infinity=infinity)
    if isinstance(value, enum.Enum):
        return plain(value.value, infinity=infinity)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isinf(value) and infinity is not None:
            return infinity if value > 0 else f"-{infinity}"
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, infinity=infinity) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, infinity=infinity) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item, infinity=infinity) for item in sorted(value, key=repr)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), infinity=infinity) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):  # torch tensors, numpy arrays and scalars, none of them imported here
        return plain(value.tolist(), infinity=infinity)
    raise ConfigError(
        f"{value!r} of type {type(value).__name__} cannot be recorded: pass numbers, text, lists or dicts."
    )


class RunRecorder:
    """Writes one run folder. Nothing that another run wrote is ever overwritten.

    Args:
        folder: created with its parents where it does not exist.

    Raises:
        RunExistsError: the folder already holds the records of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in RECORDS:
            if os.path.lexists(self.folder / name):
                raise RunExistsError(
                    f"{self.folder} already holds {name} of an earlier run: choose another folder, or move it away."
                )

    @classmethod
    def resume(cls, folder: Path, *, step: int) -> "RunRecorder":
        """Go on with a run that was stopped, after its checkpoint at `step`.

        Metrics of later steps are dropped, since those steps are taken again, and so is a last line that was cut off.

        Args:
            folder: run folder of the stopped run.
            step: last training step whose metrics are kept.

        Returns:
            A recorder that appends to the records in `folder`.

        Raises:
            ConfigError: the folder holds no run.
            RunExistsError: the run is finished.
        """
        folder = Path(folder)
        if not (folder / RUN_FILE).exists():
            raise ConfigError(f"{folder} holds no {RUN_FILE}: there is no run to resume; start one with RunRecorder.")
        if (folder / RESULT_FILE).exists():
            raise RunExistsError(f"{folder} holds {RESULT_FILE}: that run is finished. Record a new one elsewhere.")
        kept = [row for row in read_metrics(folder / METRICS_FILE) if row.get("step", 0) <= step]
        write_atomically(folder / METRICS_FILE, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept))
        recorder = cls.__new__(cls)
        recorder.folder = folder
        return recorder

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one line to `metrics.jsonl` and hand it to the operating system at once.

        Args:
            row: `step` (int) and any numbers; NaN and infinities are written as null.

        Raises:
            ConfigError: `step` is missing or not an integer, or a value has no plain form.
        """
        record = plain(row)
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ConfigError(f"metrics need an integer 'step', got {step!r}: pass {{'step': trainer.step, ...}}.")
        line = json.dumps(record, allow_nan=False) + "\n"
        with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(line)

    def write_json(self, name: str, content: Any) -> Path:
        """Write a JSON file into the folder, atomically; a file of this run may be written again.

        Args:
            name: such as "run.json", without a path.
            content: anything `plain` accepts; secrets among the settings in "run.json" are masked.

        Returns:
            Path of the file that was written.

        Raises:
            ConfigError: the name is a path or does not end in .json, or a value has no plain form.
        """
        if Path(name).name != name or not name.endswith(".json") or name.startswith("."):
            raise ConfigError(f"name={name!r}: pass a file name that ends in .json, without a path.")
        path = self.folder / name
        # A setting may well be infinite, such as a horizon; anywhere else infinity is a failed measurement.
        content = masked(plain(content, infinity="inf")) if name == RUN_FILE else plain(content)
        # Escaped to ASCII: a token may be half a character, which UTF-8 cannot hold.
        write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return path

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, the last file of a run, with `status` set to "finished".

        Args:
            result: outcome of the run, anything `plain` accepts; a `status` in it is replaced.

        Raises:
            RunExistsError: the run was finished before.
            ConfigError: a value has no plain form.
        """
        if (self.folder / RESULT_FILE).exists():
            raise RunExistsError(
                f"{self.folder / RESULT_FILE} exists: a run is finished once. Record a new run elsewhere."
            )
        self.write_json(RESULT_FILE, {**result, "status": "finished"})
