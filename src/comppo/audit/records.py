"""Continuations on disk as they come: one JSON object a line. A run that was stopped goes on from its file."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comppo.errors import ConfigError

KIND = "comppo-continuations"


class ContinuationRecords:
    """Rewards of the continuations of each prefix, by its number in the plan; kept in a file where one is given.

    The first line says what was asked for; a file of something else is refused and left as it is. A last line that was
    cut off, as a killed process leaves it, is dropped.

    Args:
        path: the file, which need not exist; None keeps everything in memory.
        settings: what decides the continuations; JSON types.

    Raises:
        ConfigError: the file holds other continuations, or is no such file.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rewards: dict[int, list[float]] = {}
        self.sampled_tokens = 0
        if path is None:
            return
        header = {"kind": KIND, **settings}
        if path.exists() and path.stat().st_size:
            self._read(path, header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, [json.dumps(header)])

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
        except ValueError as error:
            raise ConfigError(f"{path} is not a file of continuations: {error}. Choose another file.") from error
        first = lines[0] if lines else {}
        if not isinstance(first, dict) or first.get("kind") != KIND:
            raise ConfigError(f"{path} is not a file of continuations: choose another file.")
        differing = [name for name in header if first.get(name) != header[name]]
        if differing:
            listed = ", ".join(f"{name} ({first.get(name)!r} there, {header[name]!r} here)" for name in differing)
            raise ConfigError(f"{path} holds continuations of another audit: {listed:.400}. Choose another file.")
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in lines[1:]:
            self.rewards[line["prefix"]] = [math.nan if r is None else r for r in line["rewards"]]
            self.sampled_tokens += line["tokens"]

    def add(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Take the rewards of some prefixes and write them to the disk; those that are there already are left out.

        Args:
            entries: with `prefix`, `response`, `position`, `rewards` (None: unscorable) and `tokens`.
        """
        new = [entry for entry in entries if entry["prefix"] not in self.rewards]
        for entry in new:
            self.rewards[entry["prefix"]] = [math.nan if r is None else float(r) for r in entry["rewards"]]
            self.sampled_tokens += entry["tokens"]
        if self.path is not None and new:
            _append(self.path, [json.dumps(entry) for entry in new])


def _append(path: Path, lines: Sequence[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
