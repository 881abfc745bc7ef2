"""Checkpoints with damaged or crafted files."""

from __future__ import annotations

import json
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroshard.checkpoint.files import MANIFEST
from zeroshard.checkpoint.values import read_values, to_files


def message_of(call: Callable[[], Any]) -> str:
    """What it raises, which must be the same on all ranks, and of the kinds that users are told of."""
    try:
        call()
        text = "nothing was raised"
    except (RuntimeError, ValueError) as error:
        text = str(error)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """No file of this rank can grow beyond that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


Damage = Callable[[Path], None]


def damaged(good: Path, damage: Damage, name: str) -> Path:
    """A copy of a folder with one damaged file; collective."""
    bad = good.parent / "bad"
    if dist.get_rank() == 0:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        damage(bad / name)
    dist.barrier()
    return bad


PART = "__0_0.distcp"


Edit = Callable[[Any], Any]


def refit(directory: Path, edit: Edit = lambda content: content) -> None:
    """Write the manifest again: sizes and checksums of the files as they are now, changed by `edit`."""
    content = json.loads((directory / MANIFEST).read_bytes())["content"]
    for name in content["files"]:
        data = (directory / name).read_bytes()
        content["files"][name] = {"num_bytes": len(data), "crc32": zlib.crc32(data)}
    content = edit(content) or content
    outer = {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode()), "content": content}
    (directory / MANIFEST).write_text(json.dumps(outer))


def edit_manifest(change: Edit) -> Callable[[Path], None]:
    return lambda directory: refit(directory, change)


def edit_values(change: Edit) -> Callable[[Path], None]:
    """Other values, written as a save does."""

    def craft(directory: Path) -> None:
        values = read_values(directory)
        change(values)
        for name, data in to_files(values).items():
            (directory / name).write_bytes(data)
        refit(directory)

    return craft
