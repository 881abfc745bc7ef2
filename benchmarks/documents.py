"""The JSON documents that benchmarks write, read again: each field by its name, and the facts of the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medians import Median, median_of

_FOLDER = "--folder"


def without_folders(words: Sequence[str]) -> list[str]:
    """The words of a command line without --folder, whose value is a path of one machine."""
    return [
        word
        for word, last in zip(words, ["", *words], strict=False)
        if _FOLDER not in (word, last) and not word.startswith(f"{_FOLDER}=")
    ]


@dataclass(frozen=True, kw_only=True)
class Document:
    """What `record.write` has written to a file."""

    path: Path
    """The file; messages name it."""
    content: Mapping[str, Any]
    """Its JSON."""

    def field(self, *keys: str | int) -> Any:
        """The value at a path of keys and indices.

        Raises:
            ValueError: the document has no such field; the message has the file and the path.
        """
        found: Any = self.content
        for depth, key in enumerate(keys):
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                path = "/".join(map(str, keys[: depth + 1]))
                raise ValueError(
                    f"Expected the field {path} in {self.path.name}, got {_keys(found)}: "
                    f"the benchmark that wrote it is older or newer than this page; run it again"
                ) from None
        return found

    def median(self, *keys: str | int) -> Median:
        """A median with its interval, which lies in the document as value, low and high.

        Raises:
            ValueError: the document has no such field.
        """
        return Median(*(float(self.field(*keys, part)) for part in Median._fields))

    def median_of(self, *keys: str | int) -> Median:
        """The median of a list of values in the document."""
        return median_of(self.field(*keys))

    def each(self, *keys: str | int) -> list[Document]:
        """The entries of a list in the document."""
        return [replace(self, content=entry) for entry in self.field(*keys)]

    def fields(self, *names: str) -> list[Any]:
        """Several fields."""
        return [self.field(name) for name in names]

    @property
    def skipped(self) -> dict[str, str]:
        """The reasons why engines were left out, by engine."""
        return dict(self.content.get("skipped", {}))

    @property
    def absent(self) -> list[str]:
        """The compared libraries that were not installed."""
        return [name for name, version in self.field("versions").items() if version is None]

    def command(self) -> str:
        """The command, without the folders of the machine that it ran on."""
        return shlex.join(without_folders(shlex.split(self.field("command"))))

    def machine(self) -> str:
        """The processor, cores and memory, and the GPUs."""
        cpu, cores = self.field("machine", "cpu"), self.field("machine", "cores")
        parts = [f"{cpu}, {cores} cores, {self.field('machine', 'memory_gb')} GB"]
        return ", ".join(parts + list(dict.fromkeys(self.field("machine", "gpus"))))

    def versions(self) -> str:
        """The libraries that were installed, with their versions."""
        versions = self.field("versions")
        return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)

    def commit(self) -> str:
        """The commit of the code, in short, and if it was changed."""
        commit = self.field("commit")
        changed = " with changes" if self.field("uncommitted_changes") else ""
        return "no commit" if commit is None else f"{commit[:7]}{changed}"

    def day(self) -> str:
        """The day of the run, in UTC."""
        return str(self.field("date")).partition("T")[0]


def _keys(found: Any) -> str:
    """The fields that are there, for a message."""
    if isinstance(found, Mapping):
        return ", ".join(map(str, found)) or "an empty object"
    return f"{len(found)} entries" if isinstance(found, Sequence) else repr(found)


def read(path: Path) -> Document:
    """Read a document.

    Raises:
        ValueError: the file is not JSON, or does not hold an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"Expected JSON in {path.name}, got an error: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"Expected an object in {path.name}, got {type(content).__name__}")
    return Document(path=path, content=content)
