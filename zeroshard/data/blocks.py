"""Datasets of blocks for a causal language model, made of files of text and conversations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zeroshard.data.cache import Progress, Recipe, open_cache
from zeroshard.data.sources import find_files
from zeroshard.data.tokens import NO_LOSS, Encoder

if TYPE_CHECKING:
    import numpy.typing as npt

IGNORED = -100
"""The label of a token that is not in the loss, as in torch and transformers."""
Block = dict[str, Tensor]


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
    recipe = Recipe(find_files(source), Encoder(tokenizer), seq_len, float(held_out), pack)
    folder = open_cache(Path(cache_dir).absolute(), recipe, progress)
    return TextDatasets(Blocks(folder, "train"), Blocks(folder, "held_out"))
