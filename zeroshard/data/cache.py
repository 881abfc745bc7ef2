"""Tokens and blocks of a source in a folder of files, written once and then mapped into memory.

    <cache>/<key>.lock                    locked by the process that writes; holds the error of the last one
    <cache>/<key>.<host>.<random>.partial what is being written
    <cache>/<key>/tokens.bin              uint32, all documents one after the other
    <cache>/<key>/train-pieces.npy        [num_pieces, 2], start and length, in the order of the blocks
    <cache>/<key>/train-firsts.npy        [num_blocks + 1], the first piece of each block
    <cache>/<key>/index.json              seq_len, padding, digest, sizes of the files

The lock is the kernel's (flock), which ends with its process. So no rank needs a process group to wait for
another, and a killed writer holds up nobody. The folder gets its name when it is complete.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from zeroshard.data.packing import Ints, best_fit, choose_held_out, cut, one_by_one
from zeroshard.data.sources import Chat, Section, read_documents
from zeroshard.data.tokens import NO_LOSS, Encoder

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT = 1
"""The format of the folder and the rules that make it; a change of either makes other keys."""

PARTS = ("train", "held_out")
Progress = Callable[[int, int], None]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Recipe(NamedTuple):
    """All that decides about the contents of a folder."""

    files: Sequence[Path]
    encoder: Encoder
    seq_len: int
    held_out: float
    pack: bool

    def key(self) -> str:
        """Return the name of the folder: a digest of paths, sizes, times of change, tokenizer and options."""
        stats = [(str(file.resolve()), file.stat()) for file in self.files]
        files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        facts = [FORMAT, files, self.encoder.fingerprint(), self.seq_len, self.held_out, self.pack]
        return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def open_cache(cache_dir: Path, recipe: Recipe, progress: Progress | None) -> Path:
    """Return the folder of a recipe; write it if there is none, in one process while others wait.

    Raises:
        ValueError: the source is not as expected; also in the processes that waited for the one that read it.
        OSError: a file cannot be read, or the cache cannot be written, because the disk is full for example.
    """
    key = recipe.key()
    folder = cache_dir / key
    if folder.is_dir():
        return _checked(folder)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{key}.lock").open("a+", encoding="utf-8") as lock:
        has_waited = _lock(lock.fileno(), cache_dir)
        if folder.is_dir():
            return _checked(folder)
        lock.seek(0)
        failure = lock.read()
        if has_waited and failure:
            kind, _, message = failure.partition(": ")
            raise (ValueError if kind == "ValueError" else OSError)(message)
        lock.truncate(0)
        try:
            _write_folder(folder, recipe, progress)
        except (ValueError, OSError) as error:
            lock.write(f"{'ValueError' if isinstance(error, ValueError) else 'OSError'}: {error}")
            raise
    return _checked(folder)


def _lock(descriptor: int, cache_dir: Path) -> bool:
    """Take the lock of an open file; return True if another process had it."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return True
    except OSError as error:
        raise OSError(error.errno, f"{cache_dir}: expected a folder with file locks: {error}") from None
    return False


def _checked(folder: Path) -> Path:
    """Return a folder whose files have the sizes that they were written with."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for name, size in index["sizes"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise OSError(f"{folder / name}: expected {size} bytes, got {found}: delete this folder")
    return folder


def _write_folder(folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    """Write all files beside the folder, and then give them its name."""
    host = f"{folder.name}.{platform.node()}"
    for left in folder.parent.glob(f"{host}.*.partial"):  # of a writer that was killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    partial = folder.parent / f"{host}.{uuid4().hex[:8]}.partial"
    try:
        with _telling_full_disks(folder.parent):
            partial.mkdir()
            _write_files(partial, recipe, progress)
            if recipe.key() != folder.name:
                raise ValueError("a file of the source was changed while it was read: start again")
            if not folder.is_dir():  # as a host could have made it that does not see this lock
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _telling_full_disks(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            error.errno,
            f"{cache_dir}: no space is left for the cache of the data, which takes 4 bytes for each token: "
            f"expected cache_dir= on a disk with more ({error.strerror})",
        ) from error


class _Documents(NamedTuple):
    starts: Ints
    lengths: Ints
    digests: npt.NDArray[np.uint64]
    has_prompts: bool
    """True if some token is not in the loss."""


def _write_files(folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    documents = _write_tokens(folder / "tokens.bin", recipe, progress)
    parts = _split(documents, recipe.held_out)
    if not documents.lengths.size:
        raise ValueError(f"{_named(recipe)}: expected documents with text, got none")
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r")
    num_labels = {}
    for name, (starts, lengths) in parts.items():
        pieces = cut(starts, lengths, recipe.seq_len)
        labels = _count_labels(pieces, tokens) if documents.has_prompts else pieces[:, 1] - 1
        pieces = pieces[labels > 0]
        packed = best_fit(pieces[:, 1], recipe.seq_len) if recipe.pack else one_by_one(pieces[:, 1])
        num_labels[name] = int(labels.sum())
        _save(folder / f"{name}-pieces.npy", pieces[packed.order])
        _save(folder / f"{name}-firsts.npy", packed.firsts)
        if not num_labels[name] and not (name == "held_out" and not recipe.held_out):
            raise ValueError(
                f"{_named(recipe)}: the text is too small: expected at least 2 tokens to train on and 2 to "
                f"hold out, got none for {name} of {len(documents.lengths)} documents with "
                f"{int(documents.lengths.sum())} tokens"
            )
    options = f"{recipe.seq_len} {recipe.held_out} {recipe.pack}"
    index = {
        "seq_len": recipe.seq_len,
        "pad": recipe.encoder.pad,
        "num_labels": num_labels,
        "num_documents": {name: len(starts) for name, (starts, _) in parts.items()},
        "digest": blake2b(documents.digests.tobytes() + options.encode(), digest_size=8).hexdigest(),
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    with (folder / "index.json").open("w", encoding="utf-8") as stream:
        json.dump(index, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _write_tokens(path: Path, recipe: Recipe, progress: Progress | None) -> _Documents:
    """Write the tokens of all files; return where the documents are."""
    lengths, digests = array("q"), array("Q")
    length, digest, has_prompts = 0, blake2b(digest_size=8), False
    with path.open("wb") as stream:
        for tokens in recipe.encoder.encode(_read_all(recipe.files, progress)):
            stream.write(tokens.stored.data)
            digest.update(tokens.stored.data)
            length += len(tokens.stored)
            has_prompts = has_prompts or bool((tokens.stored >= NO_LOSS).any())
            if tokens.is_last:
                lengths.append(length)
                digests.append(int.from_bytes(digest.digest(), "little"))
                length, digest = 0, blake2b(digest_size=8)
        stream.flush()
        os.fsync(stream.fileno())
    found = np.array(lengths, dtype=np.int64)
    return _Documents(np.cumsum(found) - found, found, np.array(digests, dtype=np.uint64), has_prompts)


def _read_all(files: Sequence[Path], progress: Progress | None) -> Iterator[Section | Chat]:
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as stream:
            for document in read_documents(file, stream):
                yield document
                if progress is not None:
                    progress(before + stream.tell(), total)
            before += stream.tell()


def _split(documents: _Documents, share: float) -> dict[str, tuple[Ints, Ints]]:
    """Return starts and lengths of the documents of both parts; the end of a lonely document is held out."""
    starts, lengths, digests, _ = documents
    learnable = lengths >= 2  # a lonely token predicts nothing
    starts, lengths, digests = starts[learnable], lengths[learnable], digests[learnable]
    held = np.zeros(len(starts), dtype=bool)
    if share and len(starts) == 1:
        num_held = max(2, round(share * int(lengths[0])))
        starts = np.append(starts, starts + lengths - num_held)
        lengths = np.array([lengths[0] - num_held, num_held])
        held = np.array([False, True])
    elif share and len(starts):
        held = choose_held_out(lengths, digests, share)
    chosen = {"train": ~held, "held_out": held}
    return {name: (starts[chosen[name]], lengths[chosen[name]]) for name in PARTS}


def _count_labels(pieces: Ints, tokens: npt.NDArray[np.uint32]) -> Ints:
    """Return the number of labels of each piece."""
    counts = (np.count_nonzero(tokens[start + 1 : start + length] < NO_LOSS) for start, length in pieces)
    return np.fromiter(counts, dtype=np.int64, count=len(pieces))


def _save(path: Path, values: npt.NDArray[Any]) -> None:
    with path.open("wb") as stream:
        np.save(stream, values)
        stream.flush()
        os.fsync(stream.fileno())


def _named(recipe: Recipe) -> str:
    return str(recipe.files[0] if len(recipe.files) == 1 else recipe.files[0].parent)
