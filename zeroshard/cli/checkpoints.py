"""The commands that read checkpoints: `zeroshard export`, `convert` and `inspect`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.reader import open_checkpoint
from zeroshard.cli.contents import describe, to_json
from zeroshard.cli.convert import convert as rewrite
from zeroshard.hf.export import MAX_SHARD_BYTES, Format, export_checkpoint


def export(options: Namespace) -> None:
    """Run `zeroshard export`."""
    directory = find(options.checkpoint)
    tokenizer = None if options.tokenizer is None else _load_tokenizer(options.tokenizer)
    max_bytes = MAX_SHARD_BYTES if options.max_shard_size is None else options.max_shard_size
    how = Format(dtype=options.dtype, max_shard_bytes=max_bytes, tokenizer=tokenizer)
    export_checkpoint(directory, options.directory, how, verify=not options.no_verify)


def convert(options: Namespace) -> None:
    """Run `zeroshard convert`."""
    print(rewrite(find(options.checkpoint), options.directory))


def inspect(options: Namespace) -> None:
    """Run `zeroshard inspect`."""
    directory = find(options.checkpoint)
    stored = open_checkpoint(directory)
    if not options.json:
        print(describe(stored), flush=True)  # before the checksums, which take long for large files
    if not options.no_verify:
        check_sums(directory, stored.manifest, stored.manifest.files)
    if options.json:
        print(json.dumps(to_json(stored) | {"verified": not options.no_verify}, indent=2))
    elif options.no_verify:
        print("not verified: all files are there; checksums were not compared")
    else:
        print("intact: all files are there and as they were written")


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
