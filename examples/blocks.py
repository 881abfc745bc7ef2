"""Datasets of blocks for a causal language model, made of files of text and conversations.

Documents become pieces, and pieces are packed into blocks. With seq_len 4, documents a (6 tokens), b (2) and
c (3), and one token of padding:

    documents   a0 a1 a2 a3 a4 a5 | b0 b1 | c0 c1 c2
    pieces      a0 a1 a2 a3   a3 a4 a5   b0 b1   c0 c1 c2
    blocks      a0 a1 a2 a3 | a3 a4 a5 . | c0 c1 c2 . | b0 b1 . .

Pieces of a document overlap by one token, which is a label in the first of them only. So each token but the
first of a document is a label once, at any seq_len.

Tokens and blocks are in a folder of files, written once and then mapped into memory:

    <cache>/<key>.lock                    locked by the process that writes
    <cache>/<key>.<host>.<random>.partial what is being written
    <cache>/<key>/tokens.bin              uint32, all documents one after the other
    <cache>/<key>/train-pieces.npy        [num_pieces, 2], start and length, in the order of the blocks
    <cache>/<key>/train-firsts.npy        [num_blocks + 1], the first piece of each block
    <cache>/<key>/index.json              seq_len, padding, numbers of labels and documents, digest

The lock is the kernel's (flock), which ends with its process. So no rank needs a process group to wait for
another, and a killed writer holds up nobody. The folder gets its name when it is complete.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import shutil
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tokens import NO_LOSS, Chat, TextSection, TokenEncoder, find_files, read_documents

if TYPE_CHECKING:
    import numpy.typing as npt

IGNORED = -100
"""The label of a token that is not in the loss, as in torch and transformers."""
FORMAT = 1
"""The format of the folder and the rules that make it; a change of either makes other keys."""
PARTS = ("train", "held_out")
WINDOW = 1 << 16
"""Pieces that are packed together: bounds the memory of the search, and keeps padding as low as for all."""

Block = dict[str, Tensor]
Ints: TypeAlias = "npt.NDArray[np.int64]"
Progress = Callable[[int, int], None]


class Blocks(Dataset[Block]):
    """Blocks of `seq_len` tokens, mapped from the files of a cache.

    A sample is a dict of tensors [seq_len], int64: `input_ids`; `labels`, not shifted, -100 outside of the
    loss and for the first token of each piece of a document; `position_ids`, which begin at 0 in each piece
    and in the padding at the end. Each block has a label at least.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._folder, self._part = folder, part
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.seq_len: int = index["seq_len"]
        self.num_labels: int = index["num_labels"][part]
        """Tokens in the loss, of all blocks."""
        self.num_documents: int = index["num_documents"][part]
        self.digest: str = index["digest"]
        """A digest of the contents of the source and of the options, the same on all ranks."""
        self._pad: int = index["pad"]
        self._pieces, self._firsts = (self._mapped(f"{part}-{name}.npy") for name in ("pieces", "firsts"))
        self._tokens: npt.NDArray[np.uint32] = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r")

    def _mapped(self, name: str) -> npt.NDArray[np.int64]:
        values: npt.NDArray[np.int64] = np.load(
            self._folder / name, mmap_mode="r" if self.num_labels else None
        )
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self._folder, self._part)  # a worker maps the files, and gets no copy of the tokens

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(f"expected an index in [0, {len(self)}), got {index}")
        ids = np.full(self.seq_len, self._pad, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        positions = np.zeros(self.seq_len, dtype=np.int64)
        at = 0
        for start, length in self._pieces[self._firsts[index] : self._firsts[index + 1]].tolist():
            stored = self._tokens[start : start + length].astype(np.int64)
            ids[at : at + length] = stored & (NO_LOSS - 1)
            labels[at + 1 : at + length] = np.where(stored < NO_LOSS, stored, IGNORED)[1:]
            positions[at : at + length] = np.arange(length)
            at += length
        positions[at:] = np.arange(self.seq_len - at)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
        }


class TextDatasets(NamedTuple):
    """The result of `text_datasets`: unpacks as train, held_out."""

    train: Blocks
    held_out: Blocks


def text_datasets(
    source: str | os.PathLike[str],
    tokenizer: Any,
    *,
    seq_len: int,
    held_out: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
    pack: bool = True,
    progress: Progress | None = None,
) -> TextDatasets:
    """Tokenize text and conversations once, and return blocks to train on and blocks that are held out.

    One process on the machine tokenizes, and the others wait for it; no process group is needed. docs/data.md
    has the formats and rules.

    Args:
        source: a text file, a .jsonl file with a "text" or "messages" in each line, or a folder of these.
        tokenizer: a tokenizer of transformers, or an object with `encode(text) -> list of ids`.
        seq_len: tokens in a block, at least 2.
        held_out: the share of the tokens to hold out, in [0, 1); by whole documents.
        cache_dir: the folder of the files that are mapped; by default ~/.cache/zeroshard. They take 4 bytes
            for each token, and are written again if the source, the tokenizer or an option changes.
        pack: False gives each document its own blocks, for a model that cannot keep documents apart.
        progress: a function of the bytes that were read and of all bytes, called in the process that reads.

    Raises:
        ValueError: an argument, or a line of a file, is not as expected; on all ranks.
        OSError: a file cannot be read, or the cache cannot be written.
    """
    if type(seq_len) is not int or seq_len < 2:
        raise ValueError(f"seq_len: expected an integer of at least 2, got {seq_len!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out: expected a share in [0, 1), got {held_out!r}")
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zeroshard")
    recipe = Recipe(find_files(source), TokenEncoder(tokenizer), seq_len, float(held_out), pack)
    folder = open_cache(Path(cache_dir).absolute(), recipe, progress)
    return TextDatasets(Blocks(folder, "train"), Blocks(folder, "held_out"))


# ------------------------------------------------------------------------------------------------ the cache


class Recipe(NamedTuple):
    """All that decides about the contents of a folder."""

    files: Sequence[Path]
    encoder: TokenEncoder
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
        ValueError: the source is not as expected. Processes that waited for one that failed read it again.
        OSError: a file cannot be read, or the cache cannot be written, because the disk is full for example.
    """
    folder = cache_dir / recipe.key()
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(error.errno, f"{cache_dir}: expected a folder with file locks: {error}") from None
        if not folder.is_dir():
            _write_folder(folder, recipe, progress)
    return folder


def _write_folder(folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    """Write all files into a partial folder, which then gets the name `folder`."""
    host = f"{folder.name}.{platform.node()}"
    for left in folder.parent.glob(f"{host}.*.partial"):  # of a writer that was killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    partial = folder.parent / f"{host}.{uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        _write_files(partial, recipe, progress)
        for file in partial.iterdir():  # before the folder has its name
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if recipe.key() != folder.name:
            raise ValueError("a file of the source was changed while it was read: start again")
        if not folder.is_dir():  # as a host could have made it that does not see this lock
            partial.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.add_note(
                f"{folder.parent}: no space is left for the cache of the data, which takes 4 bytes for each "
                "token: expected cache_dir= on a disk with more"
            )
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        np.save(folder / f"{name}-pieces.npy", pieces[packed.order])
        np.save(folder / f"{name}-firsts.npy", packed.firsts)
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
    }
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


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
    found = np.array(lengths, dtype=np.int64)
    return _Documents(np.cumsum(found) - found, found, np.array(digests, dtype=np.uint64), has_prompts)


def _read_all(files: Sequence[Path], progress: Progress | None) -> Iterator[TextSection | Chat]:
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


def _named(recipe: Recipe) -> str:
    return str(recipe.files[0] if len(recipe.files) == 1 else recipe.files[0].parent)


# -------------------------------------------------------------------------------------------- the arithmetic


class Packed(NamedTuple):
    """The pieces of each block."""

    order: Ints
    """[num_pieces], indices of pieces."""
    firsts: Ints
    """[num_blocks + 1]: block b has the pieces order[firsts[b]:firsts[b + 1]]."""


def choose_held_out(lengths: Ints, digests: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Choose documents to hold out: in the order of their digests, up to a share of their tokens.

    At least one document is held out, and at least one is not. Equal documents go together if that leaves
    any to train on. A document longer than the whole share is held out only if there is no shorter one.

    Args:
        lengths: [num_documents], tokens; at least 2 documents.
        digests: [num_documents], of the contents.
        share: above 0, below 1.

    Returns:
        [num_documents], True for those that are held out.
    """
    fits = np.flatnonzero(lengths <= max(share * lengths.sum(), lengths.min()))
    order = fits[np.argsort(digests[fits], kind="stable")]
    left = share * lengths[order].sum()
    chosen: list[int] = []
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if length <= left or not chosen:  # one that is too long leaves room for shorter ones
            chosen.append(document)
            left -= length
    taken = np.array(chosen)
    held: npt.NDArray[np.bool_] = np.isin(digests, digests[taken])
    if held.all():
        held[:] = False
        held[taken] = True
    return held


def cut(starts: Ints, lengths: Ints, seq_len: int) -> Ints:
    """Cut documents into pieces of at most `seq_len` tokens; a document below 2 tokens has nothing to learn.

    Returns:
        [num_pieces, 2], start and length of each.
    """
    step = seq_len - 1
    nums = -(-np.maximum(lengths - 1, 0) // step)
    document = np.repeat(np.arange(len(lengths)), nums)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(nums) - nums, nums)) * step
    return np.stack([starts[document] + offset, np.minimum(seq_len, lengths[document] - offset)], axis=1)


def best_fit(lengths: Ints, seq_len: int) -> Packed:
    """Pack pieces, the longest first, each into the fullest block that has room for it.

    Best-fit decreasing cuts no document that fits into a block, unlike filling blocks in order (Ding et al.,
    Fewer Truncations Improve Language Modeling, 2024). `WINDOW` pieces are packed at a time.
    """
    order, sizes = array("q"), array("q")
    for begin in range(0, len(lengths), WINDOW):
        for pieces in _best_fit(lengths[begin : begin + WINDOW], seq_len):
            order.extend(begin + piece for piece in pieces)
            sizes.append(len(pieces))
    return Packed(np.array(order, dtype=np.int64), np.append(0, np.cumsum(sizes, dtype=np.int64)))


def one_by_one(lengths: Ints) -> Packed:
    """Give each piece a block of its own."""
    return Packed(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _best_fit(lengths: Ints, seq_len: int) -> list[list[int]]:
    blocks: list[list[int]] = []
    rooms: list[int] = []  # the different numbers of free tokens, sorted
    with_room: dict[int, list[int]] = {}
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, block = seq_len, len(blocks)
            blocks.append([])
        else:
            room = rooms[at]
            block = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        blocks[block].append(piece)
        left = with_room.setdefault(room - length, [])
        if not left and room > length:
            insort(rooms, room - length)
        left.append(block)
    return blocks


# ----------------------------------------------------------------------------------------------- batches


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """A function that makes a batch of blocks for a causal language model of transformers.

    A batch has `use_cache=False`: with a cache, transformers lets packed documents attend to each other.
    """

    is_flat: bool = False
    """True for one row [1, batch * seq_len] of all blocks, which flash attention needs to keep documents
    apart; False for [batch, seq_len]."""
    labels_per_block: float | None = None
    """The sum of the losses of a batch is divided by this number times its blocks; None for the mean over the
    labels of the batch."""

    def __call__(self, samples: Sequence[Block]) -> dict[str, Any]:
        batch: dict[str, Any] = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        if self.is_flat:
            batch = {key: value.flatten()[None] for key, value in batch.items()}
        if self.labels_per_block is not None:
            batch["num_items_in_batch"] = self.labels_per_block * len(samples)
        return batch | {"use_cache": False}


def collator(model: Any, blocks: Blocks | None = None) -> Collator:
    """Return the collator for a model: flat if its attention is a flash attention of transformers.

    Args:
        model: a model of transformers, or an engine over one.
        blocks: the dataset, so that each label has the same weight in training: the loss of a batch is its
            sum divided by the mean number of labels of as many blocks. None for the mean over the labels of
            each batch, in which a label weighs more in a batch that has fewer.
    """
    owners = (model, getattr(model, "module", None))  # the config of an engine is zeroshard's
    configs = (getattr(owner, "config", None) for owner in owners)
    attention = " ".join(str(getattr(config, "_attn_implementation", "")) for config in configs)
    per_block = None if blocks is None else blocks.num_labels / len(blocks)
    return Collator(is_flat="flash" in attention, labels_per_block=per_block)


def evaluation_batches(
    blocks: Blocks,
    batch_size: int,
    *,
    rank: int,
    num_ranks: int,
    collate_fn: Callable[[Sequence[Block]], dict[str, Any]],
    device: torch.device | str = _CPU,
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield this rank's batches and their numbers of labels, equally many batches on each rank.

    A rank that has no block left gets the first one again, with 0 as its number. So the mean loss over all
    labels is, with both sums taken over all batches of all ranks, sum(loss * number) / sum(number). The
    collator must be one for means.
    """
    most = math.ceil(len(blocks) / num_ranks)  # blocks of rank 0
    own = range(rank, len(blocks), num_ranks)
    for start in range(0, most, batch_size):
        indices = own[start : start + batch_size]
        batch = collate_fn([blocks[index] for index in indices or (0,)])
        num_labels = int((batch["labels"] != IGNORED).sum()) if indices else 0
        yield _moved(batch, device), num_labels


def _moved(batch: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


@torch.no_grad()
def check_separation(model: Any, collate_fn: Callable[[Sequence[Block]], Mapping[str, Any]]) -> None:
    """Prove on a tiny batch that a model keeps packed documents apart; all ranks of an engine call it.

    Two documents share a row. The first one is changed in one of three rows, and the logits of the second
    must not change. Takes one forward of 3 rows with 8 tokens with the ids 0, 1 and 2.

    Args:
        model: a model of transformers, or an engine over one. It comes back in the mode it was in.
        collate_fn: the collator that training uses.

    Raises:
        ValueError: the model lets documents attend to each other: use `text_datasets(..., pack=False)`.
    """
    positions = torch.arange(4).repeat(2)
    rows = [torch.tensor([*first, 2, 0, 1, 2]) for first in ([0, 1, 2, 0], [0, 1, 2, 0], [1, 2, 0, 1])]
    samples = [{"input_ids": row, "labels": row, "position_ids": positions} for row in rows]
    # An engine has a `device` of its own: its parameters may lie on another device.
    device = getattr(model, "device", None) or next(iter(model.parameters())).device
    mode = model.training
    model.eval()
    try:
        logits = model(**_moved(collate_fn(samples), device)).logits.detach().float().view(3, 8, -1)
    finally:
        model.train(mode)
    second = logits[:, 4:]
    noise, leak = ((second[0] - second[other]).abs().max().item() for other in (1, 2))
    if leak > 10 * noise + 1e-6 * second.abs().max().item():
        name = type(getattr(model, "module", model)).__name__
        raise ValueError(
            f"the attention of {name} crosses packed documents: logits changed by {leak:.3g} "
            "with the document before; expected text_datasets(..., pack=False) with this model"
        )
