"""Save on read-only and on different file systems: a script for where mounting is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.checkpoint.damage import Run, message_of
from tests.checkpoint.forked import Group


def mount(folder: Path, num_bytes: int) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", folder], check=True)


def remount(folder: Path, option: str) -> None:
    """Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)
    dist.barrier()


def save_read_only(folder: Path) -> None:
    run = Run()
    run.train()
    run.engine.save_checkpoint(folder, "old")
    run.train()
    remount(folder, "ro")
    text = message_of(lambda: run.engine.save_checkpoint(folder, "new"))
    assert "Read-only file system" in text, text
    assert str(folder) in text, text
    run.check()
    run.train()
    run.engine.load_checkpoint(folder)
    assert run.engine.global_step == 1
    remount(folder, "rw")
    run.engine.save_checkpoint(folder, "new")


def save_where_ranks_share_nothing(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        os.unshare(os.CLONE_NEWNS) if hasattr(os, "unshare") else _unshare_mounts()
        mount(folder, 8 << 20)
    run = Run()
    run.train()
    text = message_of(lambda: run.engine.save_checkpoint(folder, "new"))
    assert str(folder) in text, text
    assert "share" in text, text
    assert os.listdir(folder) == []
    run.train()
    text = message_of(lambda: run.engine.load_checkpoint(folder))
    assert str(folder) in text, text
    run.train()


def _unshare_mounts() -> None:
    import ctypes

    clone_newns = 0x20000
    assert ctypes.CDLL(None, use_errno=True).unshare(clone_newns) == 0, os.strerror(ctypes.get_errno())


TRIALS = (save_read_only, save_where_ranks_share_nothing)


def main(folder: Path) -> int:
    groups, disks = [], []
    for trial in TRIALS:
        place, disk = folder / trial.__name__, folder / f"{trial.__name__}-disk"
        place.mkdir()
        mount(disk, 9 << 20)
        disks.append(disk)
        groups.append(Group(2, place, trial, disk))
    failed = [rank for group in groups for rank in group.ranks if not rank.wait(100) or rank.code]
    for group in groups:
        group.stop()
    for disk in disks:
        subprocess.run(["umount", disk], check=True)
    for rank in failed:
        print(f"{rank.output}: {rank.code}\n{rank.printed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
