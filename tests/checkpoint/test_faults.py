"""Disks that fail and files that are damaged: one error, and an engine that goes on as before."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.checkpoint.damage import Damage, damaged, full_after, message_of
from tests.checkpoint.runs import differences, square_loss, start, state, train
from tests.ranks import on_ranks
from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import LATEST, MANIFEST, VALUES


def wait_for_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "zeroshard-checkpoint":
            thread.join()


# ------------------------------------------------------------------------------------ a disk that fails


@contextlib.contextmanager
def failing_sync(name: str) -> Iterator[None]:
    """The disk fails when a file of that name is to be synced."""
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        yield


FAULTS: dict[str, tuple[int, Callable[[], contextlib.AbstractContextManager[None]], str]] = {
    "full in the middle": (1, lambda: full_after(40_000), "__1_0.distcp"),
    "full on the first rank": (0, lambda: full_after(40_000), "__0_0.distcp"),
    "tensors": (1, lambda: failing_sync("__1_0.distcp"), "__1_0.distcp"),
    "index": (0, lambda: failing_sync(".metadata"), ".metadata"),
    "values": (0, lambda: failing_sync(VALUES), VALUES),
    "manifest": (0, lambda: failing_sync(MANIFEST), MANIFEST),
    "directory": (0, lambda: failing_sync(".new.0.tmp"), ".new.0.tmp"),
    "name": (0, lambda: failing_sync(".new.name.tmp"), ".new.name.tmp"),
    "not shared": (1, lambda: mock.patch.object(Path, "is_dir", return_value=False), ".new.0.tmp"),
}
"""By name: the rank that it befalls, the fault, and the file that the error must name."""


def begin(config: Any = 3, seed: int = 0) -> zeroshard.Engine:
    torch.manual_seed(seed)
    return start(config, model=nn.Sequential(*(nn.Linear(100, 100) for _ in range(3))))


loss = square_loss(100)


def fail_to_save(folder: str, faults: list[str], next_call: str | None) -> None:
    engine = begin()
    train(engine, [0], loss)
    engine.save_checkpoint(folder, "old", {"number": 1})
    train(engine, [1], loss)
    before = state(engine)
    for name in faults:
        rank, fault, file = FAULTS[name]
        with fault() if dist.get_rank() == rank else contextlib.nullcontext():
            text = fail_once(engine, folder, next_call)
        assert f"{folder}/" in text, text
        assert file in text, text
        assert re.search(rf"rank {rank}\b", text), text
        assert not differences(state(engine), before)
        assert sorted(os.listdir(folder)) == [LATEST, "old", "old.0"]
    engine.save_checkpoint(folder, "new", blocking=next_call is None)
    other = begin(seed=1)
    assert other.load_checkpoint(folder, "old") == {"number": 1}
    assert other.global_step == 1
    wait_for_background()
    other.load_checkpoint(folder)
    assert not differences(state(other), before)
    assert train(other, [2], loss) == train(engine, [2], loss)


def fail_once(engine: zeroshard.Engine, folder: str, next_call: str | None) -> str:
    """The error of a save: of the call, or in the background of the next one."""
    if next_call is None:
        return message_of(lambda: engine.save_checkpoint(folder, "new"))
    value = loss(engine, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder, "new", blocking=False)
        wait_for_background()
    assert [str(one.message) for one in caught if "saved in the background failed" in str(one.message)]
    if next_call == "step":
        engine.backward(value)
        text = message_of(engine.step)
    else:
        text = message_of(lambda: engine.save_checkpoint(folder, "other"))
    engine.zero_grad()
    return text


def test_a_disk_that_fails_while_saving_is_one_error_and_harms_nothing(ranks, tmp_path):
    ranks(2, fail_to_save, str(tmp_path), list(FAULTS), None, timeout=120)


@pytest.mark.parametrize("next_call", [pytest.param("step", marks=pytest.mark.long), "save_checkpoint"])
def test_a_disk_that_fails_in_the_background_is_told_by_the_next_call(ranks, tmp_path, next_call):
    ranks(2, fail_to_save, str(tmp_path), ["full in the middle"], next_call, timeout=120)


@on_ranks(2)
def test_a_folder_that_cannot_be_one_is_one_error(tmp_path):
    folder = str(tmp_path)
    engine, file = begin(), Path(folder) / "file"
    file.touch()
    if dist.get_rank() == 0:
        (Path(folder) / "link").symlink_to("nowhere")
    for place in (file, file / "below", Path(folder, "link"), Path("/proc"), Path("/proc/below")):
        for save in (
            engine.save_checkpoint,
            partial(engine.save_checkpoint, blocking=False),  # at the call, not in a later step
            engine.save_pretrained,
        ):
            wanted = f"'{place}': expected a folder that can be made and written to"
            assert wanted in message_of(lambda save=save, place=place: save(place))
    (Path(folder) / "taken").mkdir(exist_ok=True)
    assert "taken" in message_of(lambda: engine.save_checkpoint(folder, "taken"))
    assert sorted(os.listdir(folder)) == ["file", "link", "taken"]
    engine.save_checkpoint(Path(folder) / "new" / "folder", blocking=False)


# -------------------------------------------------------------------------------------- damaged files


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Another value for one byte."""
    pick, data = random.Random(path.name), bytearray(path.read_bytes())
    data[pick.randrange(len(data))] ^= pick.randrange(1, 256)
    path.write_bytes(data)


TENSORS = (".metadata", "__0_0.distcp", "__1_0.distcp")
"""The files whose checksums are left out with verify=False."""
FILES = (*TENSORS, VALUES, files.TENSORS, MANIFEST)


TEXTS = {
    truncate: ": expected ",
    Path.unlink: ": expected a file, found none",
    flip: ": expected the checksum",
}
"""The text of each kind of damage."""


def truncate_name(path: Path) -> None:
    path.write_text(path.read_text()[:2])


@pytest.mark.long_where(verify=[False])
@pytest.mark.parametrize("verify", [True, False])
@on_ranks(2, timeout=120)
def test_a_damaged_checkpoint_is_one_error_that_names_the_file(tmp_path, verify):
    """Damage one file after the other, and see that nothing comes of it but an error; what did not."""
    engine, good, found = begin({"stage": 3, "checkpoint": {"verify": verify}}), tmp_path / "good", []
    train(engine, [0], loss)
    engine.save_checkpoint(good, "tag")
    train(engine, [1], loss)
    before = state(engine)
    damages: list[tuple[Damage, str]] = [
        (damage, f"tag.0/{name}") for damage in (truncate, Path.unlink) for name in FILES
    ]
    checked = FILES if verify else set(FILES) - set(TENSORS)
    damages += [(flip, f"tag.0/{name}") for name in sorted(checked)]
    damages += [(damage, LATEST) for damage in (empty, Path.unlink, truncate_name)]
    damages += [(damage, "tag") for damage in (empty, Path.unlink, truncate_name)]
    for damage, name in damages:
        bad = damaged(good, damage, name)
        text = message_of(lambda bad=bad: engine.load_checkpoint(bad))
        expected = {
            (Path.unlink, f"tag.0/{MANIFEST}"): f"bad/tag.0': expected a checkpoint, found no {MANIFEST}",
            (Path.unlink, LATEST): "bad': expected a checkpoint, found none (there is no file 'latest')",
            (Path.unlink, "tag"): "bad/latest': expected a checkpoint with tag 'tag'",
        }.get(
            (damage, name), f"bad/{name}" + (TEXTS.get(damage, "") if MANIFEST not in name else ": expected ")
        )
        found += [] if expected in text else [f"{damage} {name}: {text}"]
        found += differences(state(engine), before)
    engine.load_checkpoint(good)
    assert engine.global_step == 1
    return found
