"""The names of the files in a run folder, and how files are read and replaced. Standard library only.

`comppo.study.record` writes these files and `comppo.report` reads them; both take names and reader from here, so that a
report never needs the code that trained.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comppo.errors import ComppoError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CREDIT_FILE = "credit.json"
GATES_FILE = "gates.json"
RESULT_FILE = "result.json"


class RecordError(ComppoError, ValueError):
    """A saved run lacks a file or a key, or holds something else there; the message names both and the remedy."""


def _parsed(text: str) -> Any:
    """JSON with None for every number that no finite float holds: NaN, Infinity, 1e999, an integer of 400 digits."""

    def fraction(digits: str) -> float | None:
        return value if math.isfinite(value := float(digits)) else None

    def whole(digits: str) -> int | None:
        return int(digits) if math.isfinite(float(digits)) else None

    return json.loads(text, parse_constant=lambda _: None, parse_float=fraction, parse_int=whole)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
        path: a UTF-8 file.

    Returns:
        Its content, with None for NaN, infinities and numbers too large for a float.

    Raises:
        RecordError: the file is missing, unreadable or not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: pass a folder that a comppo run has written.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read ({error}): restore it from a copy, or run again.") from error
    try:
        return _parsed(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON ({error}): restore it from a copy, or run again.") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`.

    A last line that was cut off in the middle (the run was killed while writing) is left out.

    Args:
        path: one JSON object a line; a file that does not exist holds no rows.

    Returns:
        The rows in the order they were written, with None for NaN, infinities and numbers too large for a float.

    Raises:
        RecordError: another line is not a JSON object.
    """
    return [row for _, row in numbered_metrics(path)]


def numbered_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of `read_metrics`, each behind the number of its line in the file, counted from 1.

    RecordError where a line other than a torn last one is not a JSON object.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    last = len(lines) - 1
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = _parsed(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            if index == last:  # no newline behind it: the write was cut off
                return
            raise RecordError(f"{path}, line {index + 1}, is not JSON ({error}): remove or mend that line.") from error
        if not isinstance(row, dict):
            if index == last:  # "12" may be what is left of no object at all
                return
            raise RecordError(f"{path}, line {index + 1}, is {row!r}: every line must be one JSON object.")
        yield index + 1, row


def write_atomically(path: Path, text: str) -> None:
    """Write `path` as a whole or not at all: readers see the old file or the new one, never a part of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
