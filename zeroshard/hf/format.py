"""The options of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zeroshard.config.rules import parse_dtype
from zeroshard.hf.weights import MAX_SHARD_BYTES


class Format:
    """Checked options of an export.

    Args:
        dtype: dtype of floating-point parameters, or its name; None: the main dtype.
        max_shard_bytes: the largest size of a file of weights.
        tokenizer: an object with `save_pretrained(folder)`, which is called after the model is written.

    Raises:
        ValueError: an option has another type or value.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype | str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        tokenizer: Any = None,
    ) -> None:
        if type(max_shard_bytes) is not int or max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected an integer >= 1, got {max_shard_bytes!r}")
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise ValueError(f"tokenizer: expected an object with save_pretrained(), got {tokenizer!r:.80}")
        self.dtype = None if dtype is None else parse_dtype(dtype)
        self.max_shard_bytes = max_shard_bytes
        self._tokenizer = tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, if there is one.

        Raises:
            RuntimeError: the tokenizer has failed to save itself.
        """
        if self._tokenizer is None:
            return
        try:
            self._tokenizer.save_pretrained(str(folder))
        except Exception as error:  # whatever it is: it must reach all ranks
            raise RuntimeError(f"{folder}: the tokenizer could not be saved: {error}") from error
