"""Two asynchronous methods on ranks of their own, beside the same runs in one process.

    python benchmarks/asynchronous_ranks.py --ranks 2

The engine trains over CPU ranks with the weights, the lists and the samples of the executor that
benchmarks/asynchronous.py uses. Each list fills
the pipeline and drains it, and the next one goes on. The losses of both should be the same in all digits that
are shown, as the same operations of float32 run in the same order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import record
import zeroshard
from asynchronous_executor import Executor
from asynchronous_methods import METHODS, delays_of
from asynchronous_report import on_ranks
from asynchronous_tasks import BLOCKS, TASKS
from before import run_on_ranks
from documents import read
from turns import command_line


class Case(NamedTuple):
    """A method with a task."""

    method: str
    task: str
    lr: float


CASES = (Case("pipedream", "digits", 0.004), Case("pipemare", "text", 0.03))
MOMENTUM = 0.9


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return command_line(__doc__, ranks=2, lists=4, microbatches=96).parse_args(arguments)


def sgd(lr: float) -> Any:
    """A maker of the optimizer."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)


def over_ranks(case: Case, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train over the ranks; return the losses and the parameters; collective."""
    task, size = TASKS[case.task], BLOCKS // args.ranks
    config = {
        "mesh": {"pp": args.ranks},
        "pipeline": {
            "schedule": case.method,
            "num_microbatches": args.microbatches,
            "split": [str(block) for block in range(size, BLOCKS, size)],
        },
    }
    model = nn.Sequential(*task.blocks(0))
    engine = zeroshard.initialize(model, sgd(case.lr), config, loss_fn=task.loss).engine
    inputs, targets = task.microbatches(0, args.lists * args.microbatches)
    losses = [
        engine.train_batch(own.flatten(0, 1), its.flatten(0, 1)).item()
        for own, its in zip(inputs.chunk(args.lists), targets.chunk(args.lists), strict=True)
    ]
    with engine.unsharded():
        own = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    engine.close(restore=False)
    state = {name: value for one in everyone for name, value in one.items()}
    trained = nn.Sequential(*task.blocks(0))
    trained.load_state_dict(state)
    return {"losses": losses, "held_out": task.evaluate([trained])[0]}, state


def in_one_process(case: Case, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train the same in this process."""
    task, size = TASKS[case.task], BLOCKS // args.ranks
    model = nn.Sequential(*task.blocks(0))
    modules = [model[start : start + size] for start in range(0, BLOCKS, size)]
    executor = Executor(modules, sgd(case.lr), METHODS[case.method].rule, task.loss)
    delays = delays_of(case.method, args.ranks, args.microbatches)
    inputs, targets = task.microbatches(0, args.lists * args.microbatches)
    losses = []
    for own, its in zip(inputs.chunk(args.lists), targets.chunk(args.lists), strict=True):
        batch = list(zip(own, its, strict=True))
        losses.append(statistics.fmean(executor.run(delays, batch.__getitem__).losses))
    state = {name: value.detach() for name, value in model.named_parameters()}
    return {"losses": losses, "held_out": task.evaluate([model])[0]}, state


def report(args: argparse.Namespace) -> None:
    """Train both ways; print and write the rows on rank 0."""
    rows = []
    for case in CASES:
        real, state = over_ranks(case, args)
        one, expected = in_one_process(case, args)
        if state.keys() != expected.keys():
            raise RuntimeError(
                f"{case.method}: expected the same parameters, got {len(state)} of {len(expected)}"
            )
        apart = max((value - expected[name]).abs().max().item() for name, value in state.items())
        rows.append(
            {
                **case._asdict(),
                "ranks": args.ranks,
                "over ranks": real,
                "in one process": one,
                "parameters apart": apart,
            }
        )
    if dist.get_rank() == 0:
        settings = {**vars(args), "momentum": MOMENTUM}
        path = record.write(args.name or f"asynchronous_{args.ranks}ranks", rows, settings=settings)
        print(on_ranks(read(path)).markdown())


if __name__ == "__main__":
    sys.exit(run_on_ranks(__file__, parse(), report))
