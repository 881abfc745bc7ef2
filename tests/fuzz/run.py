"""Run a case sharded and in plain PyTorch, on the rank that this is, and tell what differs."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fuzz import place
from tests.fuzz.acts import END
from tests.fuzz.cases import Case, Step, build_case
from tests.fuzz.models import random_inputs
from tests.fuzz.penalties import penalty
from tests.fuzz.reference import Reference, mean_loss
from tests.fuzz.sharded import Sharded
from tests.fuzz.tensor import APART, divided_case


@dataclass
class Trace:
    """What came of a run, in the order in which it came."""

    events: list[tuple[str, Any]] = field(default_factory=list)

    def note(self, what: str, value: Any) -> None:
        self.events.append((what, value.detach().clone() if isinstance(value, Tensor) else value))


class BurnedError(Exception):
    """What a failing step raises."""


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise BurnedError


@contextmanager
def _burning(block: nn.Module, where: str) -> Iterator[None]:
    """Inside, the block's forward or its backward fails."""

    def burn(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if where == "forward":
            raise BurnedError
        return tuple(map(_Burn.apply, args)), {key: _Burn.apply(value) for key, value in kwargs.items()}

    handle = block.register_forward_pre_hook(burn, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _others_fail() -> Iterator[None]:
    """Where this rank's loss does not depend on what fails, its backward may be told of others'."""
    try:
        yield
    except RuntimeError as error:
        if "backward of another rank has ended in an exception" not in str(error):
            raise


def follow(case: Case, trainer: Reference | Sharded) -> Trace:
    """Make the case's steps."""
    trace = Trace()
    for number, step in enumerate(case.steps):
        trainer.set_num_micro_batches(len(step.unsynced))
        if step.evaluates:
            _evaluate(case, trainer, step, number, trace)
        if step.fails is not None:
            _fail(case, trainer, step, number)
        if case.loop == "train_batch":
            inputs, targets = _batch(case, number, 0, 0, size=case.batch_size * len(step.unsynced))
            _seed(case, number, 0)
            trace.note(f"step {number}: mean loss", trainer.train_batch(inputs, targets, step.blocks))
        else:
            _train(case, trainer, step, number, trace)
        trace.note(f"step {number}: norm", trainer.grad_norm)
        if step.edits:
            trainer.edit(number)
        for name, buffer in trainer.module.named_buffers():
            trace.note(f"step {number}: buffer {name}", buffer)
        trace.note(f"step {number}: loss scale", trainer.loss_scale)
        _act(case, trainer, number, END, trace)
        for name, value in trainer.own().items():
            trace.note(f"step {number}: this rank's {name}", value)
        for name, value in trainer.state().items() if number + 1 == len(case.steps) else ():
            trace.note(f"at the end: {name}", value)
    trainer.end()
    return trace


def _act(case: Case, trainer: Reference | Sharded, number: int, micro: int, trace: Trace) -> None:
    """What the user does at a place."""
    for position, act in enumerate(case.habits.acts):
        if (act.step, act.micro) == (number, micro):
            where = f"step {number}, act {position} ({type(act).__name__})"
            act.perform(trainer, lambda what, value, where=where: trace.note(f"{where}: {what}", value))


def _train(case: Case, trainer: Reference | Sharded, step: Step, number: int, trace: Trace) -> None:
    for micro, unsynced in enumerate(step.unsynced):
        what = f"step {number}, micro-batch {micro}"
        losses = []
        trainer.train(not case.habits.penalty)
        for forward in range(step.num_forwards):
            inputs, targets = _batch(case, number, micro, forward)
            inputs.requires_grad_(case.wants_input_gradients)
            _seed(case, number, micro)
            losses.append((_loss(case, trainer, inputs, targets, step), inputs))
        pieces = [loss for loss, _ in losses]
        for position, loss in enumerate(pieces if step.is_split else [sum(pieces)]):
            trace.note(f"{what}: loss {position}", loss)
            trainer.backward(loss, unsynced=unsynced)
        for position, (_, inputs) in enumerate(losses if case.wants_input_gradients else ()):
            trace.note(f"{what}: gradient of inputs {position}", inputs.grad)
        if not case.steps_early:
            trace.note(f"{what}: parameters with a gradient", trainer.names_with_gradient())
        _act(case, trainer, number, micro, trace)
        if case.loop == "engine":
            trainer.step()
    if case.loop == "plain":
        trainer.step()
    trainer.train(True)


def _loss(case: Case, trainer: Reference | Sharded, inputs: Tensor, targets: Tensor, step: Step) -> Tensor:
    """Of the prediction, and before it of derivatives of the model where the case has a penalty."""
    more: Tensor | float = 0.0
    if case.habits.penalty:
        more = penalty(lambda x: trainer.forward(x, {"called": step.called}), inputs)
    return mean_loss(trainer.forward(inputs, step.blocks), targets) + more


@torch.no_grad()
def _evaluate(case: Case, trainer: Reference | Sharded, step: Step, number: int, trace: Trace) -> None:
    trainer.train(False)
    trace.note(
        f"evaluation before step {number}", trainer.forward(_batch(case, number, 8, 0)[0], step.blocks)
    )
    trainer.train(True)


def _fail(case: Case, trainer: Reference | Sharded, step: Step, number: int) -> None:
    """A step that ends in an exception; then its gradients are forgotten."""
    assert step.fails is not None
    where, block = step.fails
    inputs, targets = _batch(case, number, 9, 0)
    _seed(case, number, 9)
    is_plain = isinstance(trainer, Reference)  # which has nothing to exchange for a step that failed
    with suppress(BurnedError), _others_fail(), _burning(trainer.module.blocks[block], where):
        trainer.backward(mean_loss(trainer.forward(inputs, step.blocks), targets), unsynced=is_plain)
    trainer.drop_gradients()


def _batch(case: Case, step: int, micro: int, forward: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets, other ones for each rank and time; `size` of them, or a micro-batch."""
    size = case.batch_size if size is None else size
    seed = hash((case.seed, case.data_rank, step, micro, forward))
    generator = torch.Generator().manual_seed(seed)
    inputs = random_inputs(case.model.kind, size, generator)
    shape = (size, 9, case.model.head.out_features)
    return inputs.to(place.device()), torch.randn(shape, generator=generator).to(place.device())


def _seed(case: Case, *where: int) -> None:
    """Dropout draws the same in both runs."""
    torch.manual_seed(hash((case.seed, case.data_rank, *where)))


def differences(got: Trace, want: Trace, apart: float = 0.0) -> list[str]:
    """Where two runs differ by a single bit, or by a part of the norm of a value; the first places."""
    wanted = dict(want.events)
    found = [f"only in plain PyTorch: {what}" for what in wanted.keys() - dict(got.events).keys()]
    for what, value in got.events:
        other = wanted.get(what)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            if value.dtype != other.dtype or value.shape != other.shape:
                found.append(
                    f"{what}: {value.dtype} {list(value.shape)}, not {other.dtype} {list(other.shape)}"
                )
                continue
            value, other = value.cpu().nan_to_num(nan=-1.5), other.cpu().nan_to_num(nan=-1.5)
            if not torch.equal(value, other):
                off, norm = (value.double() - other.double()).norm(), other.double().norm()
                if not apart or not off <= apart * (norm + _SMALL):
                    found.append(f"{what}: off by {(off / norm).item():.2g} of its norm")
        elif value != other:
            found.append(f"{what}: {value}, not {other}")
    return found


_SMALL = 1e-3
"""Added to the norms of values that may be off by a part of them: some are zero but for rounding."""


def run_case(seed: int, tp: int = 1) -> list[str]:
    """What differs on this rank."""
    case = build_case(seed) if tp == 1 else divided_case(seed, tp)
    if case is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if place.has_streams():
            return _run_on_streams(case)
        want = follow(case, Reference(case))
        got = follow(case, Sharded(case))
    if dist.get_rank():  # only rank 0 has the state
        want.events = [event for event in want.events if not event[0].startswith("at the end")]
    return differences(got, want, 0.0 if tp == 1 else APART)


def _run_on_streams(case: Case) -> list[str]:
    """What differs between side streams and one stream, and from the losses and norms of plain PyTorch."""
    try:
        want = follow(case, Reference(case))
    except (NotImplementedError, RuntimeError) as error:
        print(f"plain PyTorch cannot do it on this device: {error}", flush=True)
        return []
    with place.one_stream():
        ordered = follow(case, Sharded(case))
    with place.late_streams():
        got = follow(case, Sharded(case))
    found = [f"unlike one stream: {line}" for line in differences(got, ordered)]
    return found + differences(_curves(ordered), _curves(want), 5e-2 if _is_coarse(case) else 5e-3)


def _curves(trace: Trace) -> Trace:
    """The losses and norms; optimizers make large steps of gradients that are nothing but rounding."""
    return Trace([event for event in trace.events if event[0].endswith(("loss", "norm", "loss 0"))])


def _is_coarse(case: Case) -> bool:
    """True if some values have the precision of half a float."""
    dtypes = [p.dtype for p in case.model.parameters()]
    return any(
        dtype in (torch.bfloat16, torch.float16) for dtype in (*dtypes, *case.config["precision"].values())
    )


def run_cases(seeds: list[int], run: Callable[[int], list[str]] = run_case) -> dict[int, list[str]]:
    """By seed, what differs on this rank; ends with the first case in which a rank raises."""
    found = {}
    place.open_group()
    for seed in seeds:
        print(f"seed {seed}", flush=True)  # the last one is that of a hang
        raised = False
        try:
            found[seed] = run(seed)
        except Exception:
            found[seed], raised = [traceback.format_exc()], True
            print(found[seed][0], flush=True)  # what others do meanwhile may end this process
            if place.has_streams():
                raise
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, raised)
        if any(everyone):
            break
    return found


def failures(results: list[dict[int, list[str]]]) -> dict[int, list[str]]:
    """By seed, the first differences of each rank, from what `run_cases` returned on each."""
    failed: dict[int, list[str]] = {}
    for rank, result in enumerate(results):
        for seed, found in result.items():
            failed.setdefault(seed, []).extend(f"rank {rank}: {line}" for line in found[:4])
    return {seed: lines for seed, lines in failed.items() if lines}
