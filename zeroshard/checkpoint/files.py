"""The folder of checkpoints, and the steps by which one appears all at once.

    DIR/latest              the tag of the newest checkpoint
    DIR/<tag>               the name of its directory
    DIR/<tag>.<generation>/ a checkpoint: renamed to this when it is complete
    DIR/.<tag>.<generation>.tmp/  one that is being written, or whose writer died

`latest` and `<tag>` are replaced by os.replace: at every moment they name a complete checkpoint. The first
checkpoint of the tag `v1` lies in the directory `v1.0`, so os.replace refuses a tag `v1.0` after it. Where
`v1.0` is the file of a tag, the tag `v1` takes the next number.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zeroshard.codec import Damage

LATEST, MANIFEST = "latest", "zeroshard.json"
VALUES, TENSORS = "values.json", "values.safetensors"
_TAKEN = (LATEST, MANIFEST, VALUES, TENSORS)
"""No tag: with a file of one of these names, a folder would be taken for a checkpoint, or one be spoilt."""
_NOT_IN_TAGS = frozenset('/\\:*?"<>|')
"""Characters that some file system gives a meaning. Characters that are not printed are refused, too."""
_MAX_TAG_BYTES = 200
"""File systems take 255, of which names of generations need some more."""
_GENERATION = re.compile(r"(?P<tag>.+)\.(?P<number>\d+)")


def as_folder(path: object) -> Path:
    """The folder that a user gave.

    Raises:
        ValueError: it is no path; "" would be the working directory.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ValueError(f"dir: expected a path as a string or os.PathLike, on every rank; got {path!r:.200}")
    return Path(name).absolute()  # what a thread writes to, wherever the process goes meanwhile


def make_folder(folder: Path) -> Path:
    """Make a folder, see that a file can be written to it, and return it.

    Raises:
        OSError: it cannot be made, or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise OSError(f"'{folder}': expected a folder that can be made and written to: {error}") from error


def check_tag(tag: object) -> str:
    """A name that a file may have, and that is not taken for the directory of another tag.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(tag, str) or not _is_tag(tag) or tag in _TAKEN:
        raise ValueError(
            f"tag: expected a name of up to {_MAX_TAG_BYTES} bytes without {' '.join(sorted(_NOT_IN_TAGS))}, "
            f"without a dot or a space at an end, and not {', '.join(map(repr, _TAKEN))}; got "
            f"{tag!r:.300}"
        )
    return tag


def _is_tag(tag: str) -> bool:
    """True for what file systems take as a name, and people too."""
    is_safe = tag.isprintable() and _NOT_IN_TAGS.isdisjoint(tag)
    is_trimmed = tag.strip() == tag and not tag.startswith(".") and not tag.endswith(".")
    return bool(tag) and is_safe and is_trimmed and len(tag.encode()) <= _MAX_TAG_BYTES


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """The directory that one checkpoint is written to, and its name when it is complete."""

    folder: Path
    tag: str
    generation: int

    @property
    def final(self) -> Path:
        """The path of the directory once the checkpoint is complete."""
        return self.folder / f"{self.tag}.{self.generation}"

    @property
    def temporary(self) -> Path:
        """The path of the directory while the checkpoint is written."""
        return self.folder / f".{self.tag}.{self.generation}.tmp"


def make_free(folder: Path, tag: str) -> None:
    """As `make_folder`; raise ValueError if the name of a tag is a directory in the folder."""
    if (make_folder(folder) / tag).is_dir():
        raise ValueError(f"tag: '{folder / tag}' is a directory: expected another tag")


def open_place(folder: Path, tag: str) -> CheckpointPlace:
    """Make the directory for a new generation of `tag`; what an earlier writer left of it is removed.

    Raises:
        OSError: the folder can't be written to.
        ValueError: the name of the tag is a directory.
    """
    make_free(folder, tag)
    current = _read_pointer(folder, tag)
    is_named = current is not None and (folder / current / MANIFEST).is_file()
    known = dict(_generations(folder, tag))
    for path in known:
        # Where `<tag>` is damaged, a complete directory may be all that there is.
        if path.name != current and (is_named or _is_hidden(path)):
            _drop(path)
    number = max(known.values(), default=-1) + 1
    while os.path.lexists(folder / f"{tag}.{number}"):  # such as the file of the tag v1.0, where this is v1
        number += 1
    place = CheckpointPlace(folder, tag, number)
    place.temporary.mkdir()
    return place


def commit(place: CheckpointPlace, keep_last: int | None) -> None:
    """Let a complete checkpoint appear; older ones go after that.

    Raises:
        OSError: a file can't be written; the checkpoints from before are as they were.
    """
    sync(place.temporary)
    os.rename(place.temporary, place.final)
    sync(place.folder)
    _replace(place.folder / place.tag, place.final.name)
    _replace(place.folder / LATEST, place.tag)
    for path, _ in _generations(place.folder, place.tag):
        if path != place.final:
            _drop(path)
    if keep_last is not None:
        for tag in _tags_by_age(place.folder)[:-keep_last]:
            if tag != place.tag:
                (place.folder / tag).unlink(missing_ok=True)  # first its name
                sync(place.folder)
                for path, _ in _generations(place.folder, tag):
                    _drop(path)


def discard(place: CheckpointPlace) -> None:
    """Remove what was written of a checkpoint that could not appear."""
    _drop(place.temporary)
    if _read_pointer(place.folder, place.tag) != place.final.name:
        _drop(place.final)


def find(path: Path, tag: str | None = None) -> Path:
    """The directory of a checkpoint.

    Args:
        path: a folder of checkpoints, one `<tag>` or `latest` in it, or the directory itself.
        tag: which one of the folder; None: the latest.

    Raises:
        ValueError: there is none.
        DamageError: the file `<tag>` names none.
    """
    if tag is None and (path / MANIFEST).is_file():
        return path
    if tag is None and path.is_file():
        path, tag = path.parent, None if path.name == LATEST else path.name
    if not path.is_dir():
        raise ValueError(f"'{path}': expected a folder with checkpoints, found none")
    pointer = path / (LATEST if tag is None else tag)
    if tag is None:
        if not pointer.is_file():
            raise ValueError(f"'{path}': expected a checkpoint, found none (there is no file '{LATEST}')")
        tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
    name = _read_pointer(path, tag)
    if name is None and tag != LATEST and _is_tag(tag) and (path / tag).is_file():
        raise Damage.CONTENT.of(path / tag, f"no name of a directory '{tag}.<number>'")
    if name is None:
        tags = ", ".join(_tags_by_age(path)) or "none"
        raise ValueError(f"'{pointer}': expected a checkpoint with tag '{tag}'; the tags there are: {tags}")
    if not (path / name / MANIFEST).is_file():
        raise ValueError(f"'{path / name}': expected a checkpoint, found no {MANIFEST} in it")
    return path / name


def sync(path: Path) -> None:
    """Let a file or directory outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that outlives a power failure."""
    with naming(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise each OSError inside with the name of the file, if it names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(path: Path, text: str) -> None:
    # No generation of another tag is written there, as of v1 to `.v1.0.tmp`.
    temporary = path.with_name(f".{path.name}.name.tmp")
    try:
        write_synced(temporary, f"{text}\n".encode())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _read_pointer(folder: Path, tag: str) -> str | None:
    """The name that the file `<tag>` holds, if there is one and it names a generation of that tag."""
    if not _is_tag(tag) or not (folder / tag).is_file():
        return None
    name = (folder / tag).read_text(encoding="utf-8", errors="replace").strip()
    match = _GENERATION.fullmatch(name)
    return name if match is not None and match["tag"] == tag else None


def _generations(folder: Path, tag: str) -> Iterator[tuple[Path, int]]:
    """Directories of a tag, complete or hidden, with their numbers: others of such a name are not ours."""
    for path in sorted(folder.iterdir()):
        name = path.name[1:-4] if _is_hidden(path) else path.name
        match = _GENERATION.fullmatch(name)
        is_ours = match is not None and match["tag"] == tag and path.is_dir()
        if match is not None and is_ours and (_is_hidden(path) or (path / MANIFEST).is_file()):
            yield path, int(match["number"])


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _drop(path: Path) -> None:
    """Remove a directory as far as possible: first its name, so that no half is taken for a checkpoint."""
    if not path.is_dir():
        return  # the file of another tag: v1.1, where this is the place of v1
    hidden = path if _is_hidden(path) else path.with_name(f".{path.name}.tmp")
    with suppress(OSError):
        os.rename(path, hidden)
        hidden.unlink() if hidden.is_symlink() else shutil.rmtree(hidden, ignore_errors=True)


def _tags_by_age(folder: Path) -> list[str]:
    """The tags of all checkpoints, the newest one last."""
    files = [path for path in folder.iterdir() if path.is_file() and _read_pointer(folder, path.name)]
    return [path.name for path in sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))]
