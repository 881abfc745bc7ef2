"""Run a case sharded and in plain PyTorch, on the rank that this is, and tell what differs."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.fuzz.cases import Blocks, Case, Step, build_case
from tests.fuzz.habits import halve
from tests.fuzz.models import prediction_of, random_inputs
from tests.fuzz.reference import MAX_NORM, Reference, edit, mean_loss


class Sharded:
    """zeroshard's face, as `Reference` has it."""

    def __init__(self, case: Case) -> None:
        self.case, self.module = case, copy.deepcopy(case.model)
        if dist.get_rank():  # rank 0's values count
            with torch.no_grad():
                for value in (*self.module.parameters(), *self.module.buffers()):
                    value.zero_()
        self._begin()

    def _begin(self) -> None:
        case, model, config = self.case, self.module, dict(self.case.config)
        if case.unit_names is not None:
            chosen = {id(model.get_submodule(name)) for name in case.unit_names}
            config["units"] = lambda module: id(module) in chosen

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return case.make_optimizer(parameters, [p.dim() for p in parameters])

        self.engine, self.optimizer, _, self.scheduler = zeroshard.initialize(
            model,
            make if case.is_factory else make(list(model.parameters())),
            config,
            lr_scheduler=case.make_scheduler,
            loss_fn=lambda output, target: mean_loss(prediction_of(output), target),
        )
        for parameter in self.engine.parameters() if case.habits.hooks else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(halve)

    def restart(self) -> None:
        self.engine.close()
        self._begin()

    @property
    def grad_norm(self) -> Tensor | None:
        return self.engine.grad_norm

    def forward(self, inputs: Tensor, blocks: Blocks) -> Tensor:
        return prediction_of(self.engine(inputs, **blocks))

    def backward(self, loss: Tensor, *, unsynced: bool) -> None:
        with self.engine.no_sync() if unsynced else nullcontext():
            if self.case.loop == "plain":
                trained = [p for p in self.engine.parameters() if p.requires_grad]
                loss.backward(inputs=trained if self.case.habits.targets else None)
            elif self.case.habits.scales:
                self.engine.scale(loss).backward()
            else:
                self.engine.backward(loss)

    def step(self) -> None:
        habits = self.case.habits
        if self.case.loop == "plain":
            if habits.norm_type is not None:
                self.engine.clip_grad_norm_(MAX_NORM, habits.norm_type)
            self.optimizer.step()
            self.scheduler.step()
            (self.module if habits.zeroes_model else self.optimizer).zero_grad(self.case.sets_to_none)
        else:
            self.engine.step()

    def train_batch(self, inputs: Tensor, targets: Tensor, blocks: Blocks) -> Tensor:
        return self.engine.train_batch({"inputs": inputs, **blocks}, targets)

    def forget(self) -> None:
        (self.module if self.case.habits.zeroes_model else self.engine).zero_grad()

    def edit(self, number: int) -> None:
        with self.engine.unsharded(write_back=True):
            edit(dict(self.module.named_parameters()), number)

    def names_with_gradient(self) -> list[str]:
        return [name for name, p in self.engine.named_parameters() if p.grad is not None]

    def state(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()


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
        if step.evaluates:
            _evaluate(case, trainer, step, number, trace)
        if step.fails is not None:
            _fail(case, trainer, step, number)
        if case.loop == "train_batch":
            inputs, targets = _batch(case, number, 0, 0)
            _seed(case, number, 0)
            trace.note(f"step {number}: mean loss", trainer.train_batch(inputs, targets, step.blocks))
        else:
            _train(case, trainer, step, number, trace)
        trace.note(f"step {number}: norm", trainer.grad_norm)
        if step.edits:
            trainer.edit(number)
        for name, buffer in trainer.module.named_buffers():
            trace.note(f"step {number}: buffer {name}", buffer)
        if number in case.habits.restarts:
            trainer.restart()
        for name, value in trainer.state().items() if number + 1 == len(case.steps) else ():
            trace.note(f"at the end: {name}", value)
    return trace


def _train(case: Case, trainer: Reference | Sharded, step: Step, number: int, trace: Trace) -> None:
    for micro, unsynced in enumerate(step.unsynced):
        what = f"step {number}, micro-batch {micro}"
        losses = []
        for forward in range(step.num_forwards):
            inputs, targets = _batch(case, number, micro, forward)
            inputs.requires_grad_(case.wants_input_gradients)
            _seed(case, number, micro)
            losses.append((mean_loss(trainer.forward(inputs, step.blocks), targets), inputs))
        pieces = [loss for loss, _ in losses]
        for position, loss in enumerate(pieces if step.is_split else [sum(pieces)]):
            trace.note(f"{what}: loss {position}", loss)
            trainer.backward(loss, unsynced=unsynced)
        for position, (_, inputs) in enumerate(losses if case.wants_input_gradients else ()):
            trace.note(f"{what}: gradient of inputs {position}", inputs.grad)
        if not any(step.unsynced):
            trace.note(f"{what}: parameters with a gradient", trainer.names_with_gradient())
        if case.loop == "engine":
            trainer.step()
    if case.loop == "plain":
        trainer.step()


@torch.no_grad()
def _evaluate(case: Case, trainer: Reference | Sharded, step: Step, number: int, trace: Trace) -> None:
    module = trainer.engine if isinstance(trainer, Sharded) else trainer.module
    module.eval()
    trace.note(
        f"evaluation before step {number}", trainer.forward(_batch(case, number, 8, 0)[0], step.blocks)
    )
    module.train()


def _fail(case: Case, trainer: Reference | Sharded, step: Step, number: int) -> None:
    """A step that ends in an exception; then its gradients are forgotten."""
    assert step.fails is not None
    where, block = step.fails
    inputs, targets = _batch(case, number, 9, 0)
    _seed(case, number, 9)
    is_plain = isinstance(trainer, Reference)  # which has nothing to exchange for a step that failed
    with suppress(BurnedError), _others_fail(), _burning(trainer.module.blocks[block], where):
        trainer.backward(mean_loss(trainer.forward(inputs, step.blocks), targets), unsynced=is_plain)
    trainer.forget()


def _batch(case: Case, step: int, micro: int, forward: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, other ones for each rank and time."""
    seed = hash((case.seed, dist.get_rank(), step, micro, forward))
    generator = torch.Generator().manual_seed(seed)
    inputs = random_inputs(case.model.kind, case.batch_size, generator)
    shape = (case.batch_size, 9, case.model.head.out_features)
    return inputs, torch.randn(shape, generator=generator)


def _seed(case: Case, *place: int) -> None:
    """Dropout draws the same in both runs."""
    torch.manual_seed(hash((case.seed, dist.get_rank(), *place)))


def differences(got: Trace, want: Trace) -> list[str]:
    """Where two runs differ by a single bit, the first places."""
    wanted = dict(want.events)
    found = [f"only in plain PyTorch: {what}" for what in wanted.keys() - dict(got.events).keys()]
    for what, value in got.events:
        other = wanted.get(what)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            if value.dtype != other.dtype or value.shape != other.shape:
                found.append(
                    f"{what}: {value.dtype} {list(value.shape)}, not {other.dtype} {list(other.shape)}"
                )
            elif not torch.equal(value, other):
                far = (value.double() - other.double()).norm() / other.double().norm()
                found.append(f"{what}: off by {far.item():.2g} of its norm")
        elif value != other:
            found.append(f"{what}: {value}, not {other}")
    return found


def run_case(seed: int) -> list[str]:
    """What differs on this rank."""
    case = build_case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = follow(case, Reference(case))
        got = follow(case, Sharded(case))
    if dist.get_rank():  # only rank 0 has the state
        want.events = [event for event in want.events if not event[0].startswith("at the end")]
    return differences(got, want)


def run_cases(seeds: list[int]) -> dict[int, list[str]]:
    """By seed, what differs on this rank; ends with the first case in which a rank raises."""
    found = {}
    for seed in seeds:
        print(f"seed {seed}", flush=True)  # the last one is that of a hang
        raised = False
        try:
            found[seed] = run_case(seed)
        except Exception:
            found[seed], raised = [traceback.format_exc()], True
            print(found[seed][0], flush=True)  # what others do meanwhile may end this process
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
