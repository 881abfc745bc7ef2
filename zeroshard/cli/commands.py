"""The commands."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.reader import open_checkpoint
from zeroshard.cli.contents import describe
from zeroshard.cli.convert import convert as rewrite
from zeroshard.config.sections import Config
from zeroshard.hf.export import export_checkpoint
from zeroshard.hf.format import Format
from zeroshard.memory import estimate as memory

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 1000, 500MB or 2GiB. Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"expected a size such as 5GB, got {text!r}")
    unit = (match["unit"] or "B").upper()
    return int(float(match["number"]) * (1024 if "I" in unit else 1000) ** "BKMGT".index(unit[0]))


def export(options: Namespace) -> None:
    """Run `zeroshard export`."""
    directory = find(options.checkpoint)
    tokenizer = None if options.tokenizer is None else _load_tokenizer(options.tokenizer)
    how = Format(dtype=options.dtype, max_shard_bytes=options.max_shard_size, tokenizer=tokenizer)
    export_checkpoint(directory, options.directory, how, verify=not options.no_verify)


def convert(options: Namespace) -> None:
    """`zeroshard convert`."""
    print(rewrite(find(options.checkpoint), options.directory))


def inspect(options: Namespace) -> None:
    """Run `zeroshard inspect`."""
    directory = find(options.checkpoint)
    stored = open_checkpoint(directory)
    print(describe(stored))
    if options.no_verify:
        print("all files are there; checksums were not compared")
        return
    check_sums(directory, stored.manifest, stored.manifest.files)
    print("intact: all files are there and as they were written")


def estimate(options: Namespace) -> None:
    """Run `zeroshard estimate`."""
    config = {"stage": options.stage} if options.config is None else Config.from_file(options.config)
    answer = memory.estimate(
        options.num_params, options.world_size, config, optimizer_bits=options.optimizer_bits
    )
    print(answer)
    if answer.peak_unsharded:
        print(
            "peak_unsharded: as if the whole model were gathered at once. zeroshard.estimate(model, ...) "
            "finds the units of a model, which are gathered one after another."
        )


def _load_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("--tokenizer needs transformers: pip install zeroshard[hf]") from None
    if not folder.is_dir():
        raise ValueError(f"--tokenizer: expected a folder, got '{folder}'")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the files make it raise
        raise ValueError(f"--tokenizer: '{folder}' has none that transformers loads: {error}") from None
