"""Disks that fail and files that are damaged: one error, and an engine that goes on as before."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.damage import Damage, Run, bits, damaged, message_of
from tests.distributed.training import build, start, token_loss
from tests.ranks import on_ranks
from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import LATEST, MANIFEST, VALUES
from zeroshard.checkpoint.save import _CheckedFile


def wait_for_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "zeroshard-checkpoint":
            thread.join()


# ------------------------------------------------------------------------------------ a disk that fails


@contextlib.contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Tensor files take so many bytes: then what is written goes to a device that is full."""
    write = _CheckedFile.write

    def redirected(self: _CheckedFile, data: Any) -> int:
        if self.num_bytes >= num_bytes:
            device = os.open("/dev/full", os.O_WRONLY)
            os.dup2(device, io.FileIO.fileno(self))
            os.close(device)
        return write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_CheckedFile, "write", redirected)
        yield


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
    "name": (0, lambda: failing_sync(".new.tmp"), ".new.tmp"),
    "not shared": (1, lambda: mock.patch.object(Path, "is_dir", return_value=False), ".new.0.tmp"),
}
"""By name: the rank that it befalls, the fault, and the file that the error must name."""


def fail_to_save(folder: str, faults: list[str], next_call: str | None) -> None:
    run = Run()
    run.train()
    run.engine.save_checkpoint(folder, "old", {"number": 1})
    run.train()
    for name in faults:
        rank, fault, file = FAULTS[name]
        with fault() if dist.get_rank() == rank else contextlib.nullcontext():
            text = fail_once(run, folder, next_call)
        assert f"{folder}/" in text, text
        assert file in text, text
        assert re.search(rf"rank {rank}\b", text), text
        run.check()
        assert sorted(os.listdir(folder)) == [LATEST, "old", "old.0"]
    run.train()
    run.engine.save_checkpoint(folder, "new", blocking=next_call is None)
    other, optimizer = start(build("tied GPT"), stage=3)
    assert other.load_checkpoint(folder, "old") == {"number": 1}
    assert other.global_step == 1
    run.train()
    wait_for_background()
    other.load_checkpoint(folder)
    other.backward(token_loss(other, 3))
    other.step()
    run.engine.zero_grad()
    got, want = bits(other, optimizer), bits(run.engine, run.optimizer)
    assert all(torch.equal(got[key], want[key]) for key in want)


def fail_once(run: Run, folder: str, next_call: str | None) -> str:
    """The error of a save: of the call, or in the background of the next one."""
    engine = run.engine
    if next_call is None:
        return message_of(lambda: engine.save_checkpoint(folder, "new"))
    loss = token_loss(engine, 9)
    engine.save_checkpoint(folder, "new", blocking=False)
    wait_for_background()
    if next_call == "step":
        engine.backward(loss)
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
    run, file = Run(), Path(folder) / "file"
    file.touch()
    run.train()
    if dist.get_rank() == 0:
        (Path(folder) / "link").symlink_to("nowhere")
    for place in (file, file / "below", Path(folder, "link"), Path("/proc"), Path("/proc/below")):
        for save in (
            run.engine.save_checkpoint,
            partial(run.engine.save_checkpoint, blocking=False),  # at the call, not in a later step
            run.engine.save_pretrained,
        ):
            wanted = f"'{place}': expected a folder that can be made and written to"
            assert wanted in message_of(lambda save=save, place=place: save(place))
    (Path(folder) / "taken").mkdir(exist_ok=True)
    assert "taken" in message_of(lambda: run.engine.save_checkpoint(folder, "taken"))
    assert sorted(os.listdir(folder)) == ["file", "link", "taken"]
    run.train()
    run.engine.save_checkpoint(Path(folder) / "new" / "folder", blocking=False)


# -------------------------------------------------------------------------------------- damaged files


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(seed: int) -> Damage:
    """Another value for one byte."""

    def damage(path: Path) -> None:
        pick, data = random.Random(f"{seed} {path.name}"), bytearray(path.read_bytes())
        data[pick.randrange(len(data))] ^= pick.randrange(1, 256)
        path.write_bytes(data)

    return damage


TENSORS = (".metadata", "__0_0.distcp", "__1_0.distcp")
"""The files whose checksums are left out with verify=False."""
FILES = (*TENSORS, VALUES, files.TENSORS, MANIFEST)


def truncate_name(path: Path) -> None:
    path.write_text(path.read_text()[:2])


@pytest.mark.long_where(verify=[False])
@pytest.mark.parametrize("verify", [True, False])
@on_ranks(2, timeout=120)
def test_a_damaged_checkpoint_is_one_error_that_names_the_file(tmp_path, verify):
    """Damage one file after the other, and see that nothing comes of it but an error; what did not."""
    run, good = Run(checkpoint={"verify": verify}), Path(str(tmp_path)) / "good"
    run.train()
    run.engine.save_checkpoint(good, "tag")
    run.train()
    found = []
    damages: list[tuple[Damage, str]] = [
        (damage, f"tag.0/{name}") for damage in (truncate, Path.unlink) for name in FILES
    ]
    checked = FILES if verify else set(FILES) - set(TENSORS)
    damages += [(flip(seed), f"tag.0/{name}") for seed in range(1) for name in sorted(checked)]
    damages += [(damage, LATEST) for damage in (empty, Path.unlink, truncate_name)]
    damages += [(damage, "tag") for damage in (empty, Path.unlink, truncate_name)]
    for damage, name in damages:
        bad = damaged(good, damage, name)
        text = message_of(lambda bad=bad: run.engine.load_checkpoint(bad))
        expected = {
            (Path.unlink, f"tag.0/{MANIFEST}"): f"bad/tag.0': expected a checkpoint, found no {MANIFEST}",
            (Path.unlink, LATEST): "bad': expected a checkpoint, found none (there is no file 'latest')",
            (Path.unlink, "tag"): "bad/latest': expected a checkpoint with tag 'tag'",
        }.get((damage, name), f"bad/{name}")
        found += [] if expected in text else [f"{damage} {name}: {text}"]
        run.check()
    run.train()
    run.engine.load_checkpoint(good)
    assert run.engine.global_step == 1
    return found
