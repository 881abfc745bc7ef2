"""`zeroshard doctor`: the facts of this machine, and those between the ranks that torchrun has started."""

from __future__ import annotations

import json
import os
from argparse import Namespace

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.device import use_device
from zeroshard.comm.lifecycle import close_at_exit, watch
from zeroshard.comm.mesh import open_world, start_process_group
from zeroshard.doctor.bandwidth import measure_bandwidth
from zeroshard.doctor.disk import DiskSpeed, measure_disk
from zeroshard.doctor.report import (
    describe,
    describe_bandwidth,
    describe_disks,
    differences,
    read_facts,
)
from zeroshard.tiers.swapfile import check_folder

_TIMEOUT_S = 120.0
"""Seconds that a rank waits for the others; ranks that import slowly come seconds apart."""


def examine(options: Namespace) -> None:
    """Run `zeroshard doctor`. Rank 0 prints, its own facts before it waits for the other ranks."""
    if options.disk is not None:
        check_folder(options.disk)
    facts, is_first = read_facts(), os.environ.get("RANK", "0") == "0"
    speaks = is_first and not options.json
    if speaks:
        print(describe(facts), flush=True)
    world = _open(options.device)
    everyone = [facts] if world is None else world.all_gather_object(facts, "facts of the ranks")
    differing = differences(everyone)
    if speaks and differing:
        print("\nversions that differ", *(f"  {line}" for line in differing), sep="\n", flush=True)
    disks: list[DiskSpeed] = []
    if options.disk is not None:
        own = measure_disk(options.disk, 0 if world is None else world.rank)
        disks = [own] if world is None else world.all_gather_object(own, "speeds of the disks")
        if speaks:
            print(f"\n{describe_disks(disks)}", flush=True)
    found = [] if world is None else measure_bandwidth(world)
    if speaks and world is not None:
        print(f"\n{describe_bandwidth(found, world.size, str(world.device))}")
    if is_first and options.json:
        size = 1 if world is None else world.size
        result = {
            "ranks": [facts.to_json() for facts in everyone],
            "differences": differing,
            "disks": [disk._asdict() for disk in disks],
            "bandwidth": [speed._asdict() | {"bytes_per_s": speed.rate(size)} for speed in found],
        }
        print(json.dumps(result, indent=2))


def _open(device: str | None) -> Axis | None:
    """Return the axis of all ranks; None for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    chosen = use_device(device)
    started = start_process_group(chosen, _TIMEOUT_S)
    world = open_world(chosen, Counter(), _TIMEOUT_S)
    close_at_exit(world, owns_process_group=started)
    watch(world)
    return world
