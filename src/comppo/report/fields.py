"""Typed access to the keys of one recorded JSON object, with errors that say which file, which key and what to do."""

import math
from pathlib import Path
from typing import Any

from comppo.report.runfiles import RecordError

_REQUIRED = object()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    """None for what no finite float holds, as the reader of the files has it."""
    try:
        number = float(value)
    except OverflowError:  # a huge int
        return None
    return number if math.isfinite(number) else None


class Fields:
    """One JSON object of a record.

    Args:
        path: the file it came from, for messages.
        content: what the file, or one entry of it, holds.
        where: place within the file, for messages, such as ", line 3".

    Raises:
        RecordError: the content is not an object.
    """

    def __init__(self, path: Path, content: Any, *, where: str = "") -> None:
        self._place = f"{path}{where}"
        if not isinstance(content, dict):
            raise RecordError(f"{self._place} holds {type(content).__name__}: it must be a JSON object.")
        self._content = content

    def wrong(self, key: str, wanted: str) -> RecordError:
        """The error for a key that is missing or holds something other than `wanted`."""
        if key not in self._content:
            return RecordError(
                f"{self._place}: {key!r} is missing; it must be {wanted}. Add it, or record the run again."
            )
        given = repr(self._content[key])
        given = given if len(given) <= 60 else f"{given[:57]}..."
        return RecordError(f"{self._place}: {key!r} is {given}; it must be {wanted}. Mend it, or record the run again.")

    def value(self, key: str, default: Any = None) -> Any:
        """Whatever stands there; null and missing both give the default."""
        found = self._content.get(key)
        return default if found is None else found

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A text; without a default it must be there."""
        found = self.value(key, default)
        if not isinstance(found, str):
            raise self.wrong(key, "a text")
        return found

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where it is missing."""
        found = self.value(key, {})
        if not isinstance(found, dict):
            raise self.wrong(key, "a JSON object")
        return found

    def number(self, key: str) -> float | None:
        """A number, or None where it is null, missing, not finite or too large for a float."""
        found = self.value(key)
        if found is not None and not _is_number(found):
            raise self.wrong(key, "a number or null")
        return found if found is None else _finite(found)

    def integer(self, key: str) -> int | None:
        """A whole number, also when written as 3.0, or None where `number` gives None."""
        found = self.number(key)
        if found is None:
            return None
        if not found.is_integer():
            raise self.wrong(key, "a whole number")
        return int(found)

    def numbers(self, key: str, size: int) -> tuple[float | None, ...] | None:
        """`size` numbers, each None where `number` gives None; None where the list is null or missing."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, list) or not all(item is None or _is_number(item) for item in found):
            raise self.wrong(key, "a list of numbers")
        if len(found) != size:
            raise self.wrong(key, f"a list of {size} numbers (it has {len(found)})")
        return tuple(None if item is None else _finite(item) for item in found)
