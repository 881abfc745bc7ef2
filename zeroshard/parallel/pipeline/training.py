"""Batches of a pipeline: the runner calls the sharded chunks of this rank.

The ranks of a pipeline compare their batches: shapes always, values now and then.

A list without unshard and reshard leaves it to the hooks of the sharding to gather and free unit by unit,
around each forward and backward. Else the units of a chunk are gathered together and stay until its reshard.

The gradients of all micro-batches but the last are added up here, and reduced once:

    units of one chunk         in the last backward of the chunk, unit by unit while it runs; later actions go
                               on during the exchanges
    the root, and units that   in the last backward of the rank
    several chunks use

A reduce of a list has nothing left to do.

The last backward of the rank waits for all of them, and hands the gradients to the parameters. Data-parallel
ranks run the same list, so they reduce in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import open_pairs
from zeroshard.comm.messages import Messages
from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.data.microbatch import LossFunction, check_loss, loss_of, micro_batches
from zeroshard.internals import pytree
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.nested import find_tensors
from zeroshard.parallel.pipeline.actions import END_BACKWARD, STEP, Action, Kind
from zeroshard.parallel.pipeline.asynchronous.method import AsynchronousMethod
from zeroshard.parallel.pipeline.chunked import surroundings_of, tell_hooked
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parallel.pipeline.runner import Runner
from zeroshard.parallel.pipeline.schedules import count_synchronous
from zeroshard.parallel.pipeline.shared import Shared
from zeroshard.parallel.pipeline.weights import Products, Waiting
from zeroshard.parallel.random import own_numbers
from zeroshard.parameters.state import Moment
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit


@contextmanager
def running_batch(runtime: Runtime, *, by_autograd: bool = False) -> Iterator[None]:
    """Run the micro-batches of a batch; no other forward runs between them.

    Args:
        runtime: the runtime of the chunks of this rank.
        by_autograd: True where `adds_as_autograd`. Then the batch is one forward of the root, and nothing
            notices the backwards inside: autograd adds up their gradients in the unsharded parameters.
    """
    passes, units = runtime.passes, runtime.units if by_autograd else runtime.passes.quiet
    runtime.state.moments.add(Moment.BATCH)
    try:
        if by_autograd:
            passes.listen(False)
            passes.before_forward(runtime.root)
        passes.passive = units
        for unit in units:
            unit.slots.install()
        yield
        runtime.check_edits()
    except BaseException:
        runtime.reducer.taint()
        if by_autograd:  # ranks that have come less far have no sums: a save asks for them before all meet
            runtime.reducer.drop()
        raise
    finally:
        passes.passive = ()
        if by_autograd:
            passes.exit_forward(runtime.root)
            passes.listen()
        runtime.state.moments.remove(Moment.BATCH)
        passes.calls.named.clear()
        passes.calls.name, runtime.reducer.order.scope = None, runtime.units
        for unit in units:
            unit.slots.uninstall()
        runtime.reshard()


def adds_as_autograd(runtime: Runtime) -> bool:
    """True if nothing is gathered, exchanged, scaled or cast in a batch: autograd's sums have the same bits.

    Hooks of the user on a parameter may look at its `grad`, which such sums reach after the batch. Ranks that
    agree at the end of each backward may differ in hooks.
    """
    return not (
        runtime.context.axes.everyone.size > 1
        or runtime.reducer.is_half
        or runtime.context.output_dtype is not None
        or any(unit.buffers and unit.plan.needs_turns for unit in runtime.units)
        or any(buffer.plan.compute_dtype != buffer.plan.wide_dtype for buffer in runtime.buffers)
        or any(parameter._backward_hooks for buffer in runtime.buffers for parameter in buffer.unsharded)
    )


class BatchPiece(NamedTuple):
    """A micro-batch."""

    arguments: Mapping[str, Any]
    """The arguments of the model, by name."""
    target: Any


def next_batch(batches: Iterator[Any], number: int, num_batches: int) -> tuple[Any, Any]:
    """Return the inputs and the targets of the next batch.

    Args:
        batches: tuples of inputs and targets, or inputs alone.
        number: the number of the batch, from 0.
        num_batches: the batches that there must be.

    Raises:
        ValueError: there is no such batch, or it is a tuple of another length.
    """
    try:
        batch = next(batches)
    except StopIteration:
        raise ValueError(f"expected {num_batches} batches, got {number}") from None
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) not in (1, 2):
        raise ValueError(
            f"batch {number}: expected (inputs, targets) or the inputs alone, got a {type(batch).__name__} "
            f"of {len(batch)}; put several inputs into a tuple or a mapping of their own"
        )
    return batch[0], batch[1] if len(batch) == 2 else None


TakeStep = Callable[[AbstractContextManager[None]], object]
"""Takes a step of the optimizer inside a context."""
_NUM_BITS = 32
"""Bits of the checksum that pipeline ranks compare."""


class BatchComparison:
    """Compares the batches of the ranks of one pipeline.

    Args:
        axis: these ranks.
        parameters: the parameters of this rank.
        containers: modules that must not get hooks from now on, with their names.
    """

    def __init__(
        self, axis: Axis, parameters: Iterable[nn.Parameter], containers: Iterable[tuple[str, nn.Module]]
    ) -> None:
        self._axis, self._parameters = axis, tuple(parameters)
        self._containers = [(name, one, surroundings_of(one)) for name, one in containers]
        """Each with the hooks that it had at the start: the engine's."""
        self._num_batches = self._num_changes = 0
        self._trained: list[bool] | None = None
        """The parameters and inputs that need a gradient."""
        self._noted = 0
        """The checksum of batches that are to be compared later."""

    def begin(self, batch: Any, shapes: Any) -> Callable[[], Any]:
        """Begin to compare a batch, with its `shapes_of`; collective.

        Returns:
            A function that waits for the answer. It returns a value that all ranks have alike: where they
            had it before, the tensors between chunks have the forms that they had then. It raises a
            RuntimeError if the batches differ, or if a container was given hooks.
        """
        value = self._added(batch, crc32(repr(shapes).encode()))
        with past_guards():
            trained = [value.requires_grad for value in (*self._parameters, *find_tensors(batch)[0])]
        has_changed, self._trained = self._trained not in (None, trained), trained
        hooked = [name for name, one, known in self._containers if surroundings_of(one) != known]
        # Not `require_same`, which waits: the answer to these flags comes while the batch is computed.
        flags = *_flags(value), has_changed, bool(hooked)
        answer = self._axis.any(flags, "comparison of the batches of a pipeline")

        def agree() -> Any:
            *found, any_has_changed, any_is_hooked = answer()
            if any_is_hooked:
                raise RuntimeError(tell_hooked(*hooked[:1]))
            self._num_changes += any_has_changed  # then activations may need gradients that did not before
            self._refuse_others(found)
            return self._num_changes, shapes

        return agree

    def note(self, batch: Any) -> None:
        """Note a batch that is used while other ranks are at other ones; `check_noted` compares it."""
        self._noted = self._added(batch, self._noted)

    def check_noted(self) -> None:
        """Compare the batches that were noted; collective.

        Raises:
            RuntimeError: they differ.
        """
        value, self._noted = self._noted, 0
        self._refuse_others(self._axis.any(_flags(value), "comparison of the batches of a list")())

    def _added(self, batch: Any, value: int) -> int:
        """Count a batch; return the checksum with its values if these are compared, as in 1, 2, 4, 8, ..."""
        self._num_batches += 1
        return value if self._num_batches & (self._num_batches - 1) else _checksum(batch, value)

    def _refuse_others(self, found: list[bool]) -> None:
        if any(one and other for one, other in zip(found[:_NUM_BITS], found[_NUM_BITS:], strict=True)):
            raise RuntimeError(
                f"pipeline ranks {list(self._axis.global_ranks)} have different batches: expected "
                "the same inputs and targets on all of them. Choose samples by engine.dp_rank and "
                "engine.dp_world_size, not by the global rank"
            )


def _flags(value: int) -> list[bool]:
    """The bits of a number, and their inverses: ranks have different ones if a bit is set in both."""
    bits = [bool(value >> bit & 1) for bit in range(_NUM_BITS)]
    return [*bits, *(not bit for bit in bits)]


def shapes_of(value: Any) -> Any:
    """Return a value that has the dtypes and shapes of a batch."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((key, shapes_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(shapes_of, value))
    return repr(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _checksum(batch: Any, start: int) -> int:
    """The crc32 of all tensors of a batch."""
    for value in find_tensors(batch)[0]:
        memory = value.detach().contiguous().view(-1).view(torch.uint8).cpu()
        start = crc32(memory.numpy().data, start)
    return start


class PipelineTraining:
    """The chunks of this rank as a runner calls them.

    Args:
        part: the chunks and the schedule.
        runtime: the runtime of their sharding.
        loss_fn: (output, targets) -> loss; None: the model has one.
        optimizer: the optimizer, if there is one.
        method: the method of an asynchronous pipeline; None for a synchronous one.

    Raises:
        ValueError: pipeline ranks step a parameter that they share with other hyperparameters.
    """

    def __init__(
        self,
        part: ModelPart,
        runtime: Runtime,
        loss_fn: LossFunction | None,
        optimizer: Optimizer | None,
        method: AsynchronousMethod | None,
    ) -> None:
        self._part, self._runtime, self._loss_fn, self.method = part, runtime, loss_fn, method
        self._axes = runtime.context.axes
        self._messages = Messages(self._axes.pp, open_pairs(self._axes, part.pairs))
        self._shared = Shared(runtime, self._messages)
        self._shared.start(optimizer)
        self._runners: dict[tuple[int, bool, int], Runner] = {}
        """By number of micro-batches; with backwards or without; by synchronous steps of the list."""
        self._units = {chunk: _units_of(part, runtime, chunk) for chunk in part.chunks}
        uses = Counter(unit for own in self._units.values() for unit in own)
        alone = {u for u, n in uses.items() if n == 1 and not any(b.originals[0].holders for b in u.buffers)}
        self._own_units = {chunk: frozenset(alone.intersection(own)) for chunk, own in self._units.items()}
        """The units of a chunk that are reduced with it: no other chunk gives them gradients."""
        self._signature = part.chunked.signature
        self._piece_of: Callable[[int], BatchPiece] | None = None
        """Returns a micro-batch of the list; its batch is loaded when a forward needs the first one."""
        self._factor = 1.0
        """The factor of each loss."""
        self._losses: list[tuple[int, Tensor]] = []
        """The micro-batches so far with their losses."""
        self._action = STEP
        """The action that runs."""
        self._runner: Runner
        """The runner of the list."""
        self._by_autograd = False
        """True while a list runs whose sums are left to autograd."""
        self._scales: list[float] = []
        """The numbers by which the gradients of the steps to come are divided."""
        self._comparison = BatchComparison(self._axes.pp, runtime.parameters, part.chunked.containers)
        self._take_step: TakeStep | None = None
        """Takes a step in the middle of a list."""

    def train(
        self,
        batches: Iterator[Any],
        num_batches: int,
        num: int,
        *,
        steps_taken: int,
        loss_scale: float | None,
        take_step: TakeStep,
    ) -> Tensor:
        """Take the step of a batch; or, in an asynchronous pipeline, all steps of the list of some batches.

        Args:
            batches: tuples of inputs and targets, as `Engine.train_batch` has them, or inputs alone; the same
                on all ranks of a pipeline.
            num_batches: the batches to take.
            num: micro-batches of each of them.
            steps_taken: the steps of training before.
            loss_scale: the factor of the loss in float16; None in other dtypes.
            take_step: takes one step; the context corrects the step of the optimizer.

        Returns:
            [num_batches], the mean loss over the micro-batches of each batch, on all ranks of the pipeline.

        Raises:
            ValueError: the batch does not divide into the micro-batches, or the schedule does not exist with
                so many; a batch has other shapes than the first one; or the list is one of the user, which
                has the micro-batches of one batch, and there are several.
            RuntimeError: the ranks of the pipeline have different batches.
        """
        if num_batches > 1 and self._part.cut.pipeline.schedule not in ASYNCHRONOUS:
            raise ValueError(
                "train_batches() with a list of your own in pipeline.schedule: expected 1 batch, whose "
                f"micro-batches the list has, got {num_batches}: call train_batch() for each"
            )
        runner = self._begin(num * num_batches, has_backward=True, steps_taken=steps_taken)
        if self.method is None:
            self._factor, self._scales = (loss_scale or 1.0) / num, [loss_scale or 1.0]
            means = self._run(runner, batches, num_batches, num)
            self._runtime.before_step()  # sums of a rank whose last backward has brought nothing
            self._shared.add_gradients()
            take_step(nullcontext())
            return means()  # ranks whose list ends early have stepped meanwhile
        self._factor, self._take_step, self._scales = 1.0, take_step, list(map(float, runner.ends.values()))
        try:
            with self.method.batch(runner.schedule, steps_taken):
                means = self._run(runner, batches, num_batches, num)
            if num_batches > 1:
                self._comparison.check_noted()
            return means()
        finally:
            self._take_step = None

    def evaluate(self, inputs: Any, targets: Any, num: int) -> Tensor:
        """Return the mean loss of a batch, [1]; arguments and errors as in `train`."""
        return self._run(self._begin(num, has_backward=False), iter([(inputs, targets)]), 1, num)()

    def _cut(self, batch: tuple[Any, Any], num: int) -> list[tuple[Any, Any]]:
        """Cut a batch into micro-batches, on the device."""
        return [*micro_batches(batch, num, self._runtime.context.device, "pipeline.num_microbatches")]

    def _bind(self, batch: list[tuple[Any, Any]]) -> list[BatchPiece]:
        """Give the micro-batches of a batch the names of the model's arguments."""
        pieces = [BatchPiece(self._named(piece), target) for piece, target in batch]
        self._part.chunked.check(pieces[0].arguments)  # all micro-batches have the same arguments
        return pieces

    def _run(
        self, runner: Runner, batches: Iterator[Any], num_batches: int, num: int
    ) -> Callable[[], Tensor]:
        """Run a list; return a function that waits for the mean losses of its batches.

        Until its call the exchange of the losses runs during other work.
        """
        batch, loaded = self._cut(next_batch(batches, 0, num_batches), num), 1
        shapes = shapes_of(batch)
        agree = self._comparison.begin(batch, shapes)
        pieces = self._bind(batch)

        def piece_of(microbatch: int) -> BatchPiece:
            nonlocal loaded, pieces
            while microbatch >= loaded * num:
                later = self._cut(next_batch(batches, loaded, num_batches), num)
                if (found := shapes_of(later)) != shapes:
                    raise ValueError(
                        f"batch {loaded}: expected the shapes of the first batch of the list, {shapes}, got "
                        f"{found}: leave out a last batch that is smaller (drop_last=True of a DataLoader)"
                    )
                loaded += 1
                self._comparison.note(later)
                pieces = self._bind(later)
            return pieces[microbatch % num]

        device = self._runtime.context.device
        self._piece_of, self._losses = piece_of, []
        self._by_autograd = self.method is None and adds_as_autograd(self._runtime)
        try:
            with (
                own_numbers(device, self._messages.rank),
                running_batch(self._runtime, by_autograd=self._by_autograd),
            ):
                runner.run(agree)
        finally:
            self._piece_of, self._runtime.here.action = None, ""
        totals = torch.zeros(num_batches, dtype=torch.float32, device=device)
        for microbatch, loss in self._losses:
            totals[microbatch // num] += loss
        return self._axes.pp.sum(totals / num, "mean loss of a pipeline")

    def _begin(self, num: int, *, has_backward: bool, steps_taken: int = 0) -> Runner:
        """Return the runner of a list, which begins."""
        num_synchronous = count_synchronous(self._part.cut.pipeline, self._axes.pp.size, num, steps_taken)
        if (runner := self._runners.get(key := (num, has_backward, num_synchronous))) is None:
            schedule = self._part.schedule(num, has_backward=has_backward, steps_taken=steps_taken)
            runner = self._runners[key] = Runner(schedule, self._messages, self)
        self._runner = runner
        return runner

    # -- the runner calls -----------------------------------------------------------------------------

    def forward(self, chunk: int, microbatch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute a chunk.

        The first one gets no inputs and takes the micro-batch's; the last one returns its loss alone.
        """
        with self._buffers_kept() if self._action.kind is Kind.RECOMPUTE else nullcontext():
            return self._compute(chunk, microbatch, inputs)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Give buffers the values back that they had: the first forward has changed them already."""
        buffers = list(self._runtime.module.buffers())  # some are in no module of the chunk
        before = [buffer.clone() for buffer in buffers]
        yield
        for buffer, values in zip(buffers, before, strict=True):
            buffer.data.copy_(values)  # autograd may have saved one that the forward only reads

    def _compute(self, chunk: int, microbatch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        assert self._piece_of is not None, "a list runs"
        piece, target = self._piece_of(microbatch)
        if self._action.kind is Kind.FORWARD and (chunk, microbatch) in self._runner.recomputed:
            # A recomputation gets the batch as it was before the first forward.
            piece, target = pytree.tree_map_only(Tensor, Tensor.clone, (piece, target))
        if chunk < len(self._part.cut.runs) - 1:
            outputs: Sequence[Any] = self._part.chunked(chunk, inputs, piece)
            for one in outputs:
                if not isinstance(one, Tensor):
                    raise ValueError(f"chunk {chunk}: expected a tensor as output, got {type(one).__name__}")
            return outputs

        def last(**kwargs: Any) -> Any:
            return self._part.chunked(chunk, inputs, kwargs)

        loss = loss_of(last, self._loss_fn, piece, target)
        if torch.is_grad_enabled() and self._part.is_trained:
            check_loss(loss)
        if loss.dim():
            raise ValueError(f"expected a loss of shape [], got {list(loss.shape)}")
        if self._action.kind is Kind.FORWARD:  # a recomputation makes the same loss again
            self._losses.append((microbatch, loss.detach().float()))
        return [loss * self._factor]

    def backward(self, chunk: int, is_last: bool, run: Callable[[], None]) -> None:
        """Run the backward of a chunk, or a half; the last one before a step reduces what ends with it."""
        reducer, has_more = self._runtime.reducer, self._action not in self._runner.ends
        self._runtime.state.has_sums |= self._by_autograd
        comes_through_units = self._by_autograd or self._action.kind is not Kind.WEIGHT_GRADIENT
        delivering = nullcontext() if comes_through_units else self._runtime.passes.delivering()
        # The last backward of the rank reduces all that are left.
        ending = self._own_units[chunk] if is_last and has_more else frozenset[Unit]()
        with reducer.next_backward(has_more, but=ending, scale=self._scales[0]), delivering:
            run()
        if ending:  # nothing may have come here, unlike on other ranks
            reducer.start_ahead(ending)
        if self._action.kind in END_BACKWARD:
            self._runtime.passes.calls.named.pop(self._action.place, None)  # no backward comes to it any more

    def deferring(self, waiting: Waiting) -> AbstractContextManager[None]:
        """Leave weight gradients of forwards and backwards inside to `waiting`; see `Products.deferring`.

        In a list of your own that has halves at some numbers of micro-batches alone, the first half is all.
        """
        products: Products | None = self._runtime.products
        return nullcontext() if products is None else products.deferring(waiting)

    def act(self, action: Action) -> None:
        """Unshard or reshard the units of a chunk, or take a step."""
        if action.kind is Kind.STEP:
            if self.method is not None:  # else the batch ends with the step
                assert self._take_step is not None, "it runs"
                self._runtime.check_edits()
                self._runtime.before_step()
                self._take_step(self.method.stepping())
                self._scales.pop(0)
        elif action.chunk is not None and action.kind is Kind.UNSHARD:
            self._runtime.unshard((self._runtime.root, *self._units[action.chunk]))  # the root to the end
        elif action.chunk is not None and action.kind is Kind.RESHARD:
            self._runtime.reshard(self._units[action.chunk])

    def enter(self, action: Action) -> None:
        """Note the action that begins, also for messages about a rank that is lost.

        Graphs of other micro-batches are alive. A backward comes to the calls of the forward with its name
        alone. Units of other chunks are not gathered ahead.
        """
        self._action, runtime = action, self._runtime
        runtime.here.action = f"{action} of pipeline rank {self._messages.rank}"
        runtime.here.enter(runtime.here.OUTSIDE)
        if action.chunk is not None:
            runtime.passes.calls.name, runtime.reducer.order.scope = action[1:], self._units[action.chunk]
        if self.method is not None and self._take_step is not None:
            self.method.enter(action)

    def _named(self, piece: Any) -> Mapping[str, Any]:
        """The arguments of the model, by name.

        Raises:
            ValueError: its forward has no such arguments.
        """
        named = dict(piece) if isinstance(piece, Mapping) else {}
        values = piece if isinstance(piece, tuple) else () if isinstance(piece, Mapping) else (piece,)
        try:
            given = self._signature.bind_partial(*values, **named).arguments
        except TypeError as error:
            raise ValueError(f"expected inputs as the forward of the model has them: {error}") from None
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given


def _units_of(part: ModelPart, runtime: Runtime, chunk: int) -> tuple[Unit, ...]:
    """The units of a chunk, in the same order on all ranks; the root belongs to all chunks."""
    inside = {module for place in part.chunked.modules_of(chunk) for module in place.modules()}
    return tuple(unit for unit in runtime.units[1:] if unit.module in inside)
