"""Time to save and load: zeroshard's stage 3 against torch.distributed.checkpoint with FSDP2.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --dim 128 --depth 4 --vocabulary 1024 --name quick_look

Both live in one process per rank, train the same model with AdamW, and take turns, in an order that changes
every round. Both sync all files. The slowest rank's seconds of the same round are compared. Each side loads
its last checkpoint into a model and optimizer with state, from the page cache. So the code is timed and not
the disk. zeroshard verifies checksums, which the other does not have.

Then zeroshard saves in the background, and trains: the call is compared with the blocking save of the same
round, each step with a step of the same round without a save.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import record
from before import run_on_ranks
from engines import Setting, Step, engine_step, fsdp2_parts, torch_step, zeroshard_engine
from launch import common_folder, rank_device, timed
from medians import Median, median_of, median_ratio
from model import add_shape_arguments, build_tokens, shape_from
from turns import command_line

OURS, PEER = "zeroshard-3", "fsdp2"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, ranks=2, batch=1, rounds=7)
    parser.add_argument("--steps", type=int, default=8, help="after a save in the background, and without")
    parser.add_argument("--folder", type=Path, help="to write in; default the system's temporary one")
    add_shape_arguments(parser)
    return parser.parse_args()


class Ours:
    """An engine of zeroshard, and the calls that are timed."""

    def __init__(self, setting: Setting) -> None:
        self._engine = zeroshard_engine(setting, stage=3)
        self.step: Step = engine_step(self._engine)

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder, "saved")

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(folder)

    def start(self, folder: Path) -> None:
        """Save in the background."""
        self._engine.save_checkpoint(folder, "saved", blocking=False)


class Peer:
    """FSDP2, saved and loaded as in the tutorial of torch.distributed.checkpoint."""

    def __init__(self, setting: Setting) -> None:
        self._model, self._optimizer = fsdp2_parts(setting, reshard=True)
        self.step: Step = torch_step(self._model, self._optimizer)

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


Times = dict[str, list[float]]
"""Seconds of the slowest rank in each round, by the name of the timed call."""


def run_round(
    number: int, folder: Path, engines: Mapping[str, Ours | Peer], tokens: torch.Tensor, num_steps: int
) -> tuple[dict[str, float], list[bool]]:
    """Let each side save and load; then train with a save in the background and without.

    Returns:
        Seconds by the name of the timed call; for each step after the save, True if the save was still
        running.
    """
    seconds: dict[str, float] = {}
    names = sorted(engines, reverse=bool(number % 2))
    for name in names:
        seconds[f"save {name}"] = timed(partial(engines[name].save, folder / name))
    for name in names:
        seconds[f"load {name}"] = timed(partial(engines[name].load, folder / name))
    remove(folder)
    ours, written = engines[OURS], []
    assert isinstance(ours, Ours)
    step = partial(ours.step, tokens)
    for saves in (True, False) if number % 2 else (False, True):
        if saves:
            seconds["background call"] = timed(partial(ours.start, folder / "background"))
        for index in range(num_steps):
            if saves:
                written.append(not (folder / "background" / "saved").exists())
            seconds[f"step {index} {'saving' if saves else 'alone'}"] = timed(step)
    while not (folder / "background" / "saved").exists():
        time.sleep(0.01)
    remove(folder)
    return seconds, written


def remove(folder: Path) -> None:
    """Empty the folder, between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)
    dist.barrier()


def summarize(times: Times, written: list[list[bool]], num_steps: int) -> dict[str, Median]:
    """Medians over the rounds: the promised ratios, and the price that the steps pay."""
    saving = [times[f"step {index} saving"] for index in range(num_steps)]
    alone = [times[f"step {index} alone"] for index in range(num_steps)]
    typical = [sum(values) / num_steps for values in zip(*alone, strict=True)]
    during, after = [], []
    for number, flags in enumerate(written):
        for index, is_written in enumerate(flags):
            (during if is_written else after).append(saving[index][number] / typical[number])
    if not after:
        raise RuntimeError(f"Expected a save in the background to end within {num_steps} steps: --steps")
    extra = [
        sum(values[number] for values in saving) - sum(values[number] for values in alone)
        for number in range(len(typical))
    ]
    return {
        "save, ratio to DCP": median_ratio(times[f"save {OURS}"], times[f"save {PEER}"]),
        "load, ratio to DCP": median_ratio(times[f"load {OURS}"], times[f"load {PEER}"]),
        "background call, ratio to blocking save": median_ratio(
            times["background call"], times[f"save {OURS}"]
        ),
        "step beside a save, ratio to a step alone": median_of(during),
        "step after a save, ratio to a step alone": median_of(after),
        "steps beside a save": median_of([float(sum(flags)) for flags in written]),
        "seconds added to all steps by a save": median_of(extra),
    }


def measure(args: argparse.Namespace) -> None:
    """Build, warm up, time and report; runs on every rank."""
    rank, device = dist.get_rank(), rank_device("cpu")
    setting = Setting(shape=shape_from(args), batch=args.batch, precision="fp32", device=device)
    engines: dict[str, Ours | Peer] = {PEER: Peer(setting), OURS: Ours(setting)}
    tokens = build_tokens(setting.shape, args.batch, rank, device)
    for engine in engines.values():
        engine.step(tokens)
    gc.collect()
    gc.freeze()  # so that no side pays for walking the objects of the other
    times: Times = defaultdict(list)
    written: list[list[bool]] = []
    for number in range(-1, args.rounds):
        with common_folder(args.folder) as folder:
            seconds, flags = run_round(number, folder, engines, tokens, args.steps)
        if number < 0:
            continue
        for key, value in seconds.items():
            times[key].append(value)
        written.append(flags)
    if rank != 0:
        return
    summary = summarize(times, written, args.steps)
    record.report(
        "checkpoint",
        args.name or f"checkpoint_{args.ranks}ranks",
        {
            "summary": {key: median._asdict() for key, median in summary.items()},
            "seconds": {key: [round(value, 6) for value in values] for key, values in times.items()},
            "written_during_step": written,
        },
        settings={key: value for key, value in vars(args).items() if key != "folder"},
        page_cache="warm: files are loaded right after they were written and synced",
        synced="all files, on both sides",
        verified="checksums of all files by zeroshard; none by torch.distributed.checkpoint",
    )


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), measure))
