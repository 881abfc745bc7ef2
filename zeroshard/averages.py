"""Moving averages of the main parameters: updated after a step, shown in the model in place of these.

    main parameters    slices of this rank   of the step
    averages           slices of this rank   float32 or wider, on the tier of the optimizer states
    buffers            whole                 copies of the model's at the last update

Main parameters are a slice of each parameter, and an average is element-wise: no update needs another rank.
To show averages is to write them into the main parameters. All that reads these (gathers, exports, files of
transformers) then has averages, and knows nothing of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.agreement import require_equal
from zeroshard.comm.collectives import on_all
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import Moment
from zeroshard.plan import pieces
from zeroshard.plan.layout import Span
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.stores.pieces import Piece, pieces_for
from zeroshard.stores.store import Store

if TYPE_CHECKING:
    from zeroshard.engine import Engine


class Averages:
    """Moving averages of the trained parameters of one module.

    The arithmetic is the same as in torch.optim.swa_utils: the first update copies the parameters, each later
    one is `average.lerp_(parameter, 1 - decay)`.

    Args:
        runtime: of the module.
        decay: 0 to 1, the share of the average that an update keeps.

    Raises:
        ValueError: `decay` is no such number.
    """

    def __init__(self, runtime: Runtime, decay: Any) -> None:
        self.decay = decay
        self.num_updates = 0
        """Updates so far; a checkpoint brings its own number."""
        self._runtime, context = runtime, runtime.context
        self._values: dict[FlatBuffer, Store] = {}
        """The averages of each buffer, [n], as many as `buffer.main` has."""
        self._ranges: dict[FlatBuffer, list[_Range]] = {}
        """The ranges of averages that travel to the device together, one after the other."""
        self.buffers: dict[str, Tensor] = {}
        """The copies of the model's buffers, by name; those that a checkpoint leaves out, too."""
        trained = [buffer for buffer in runtime.buffers if buffer.trainable]
        plans = [buffer.plan for buffer in trained]
        self._pieces = pieces_for(plans, context.memory, context.streams)
        weakref.finalize(self, self._pieces.end_copies).atexit = False
        with torch.inference_mode(False):
            for buffer in trained:
                dtype = torch.promote_types(buffer.main.dtype, torch.float32)
                tier = buffer.plan.state_tier
                values = context.memory.empty(buffer.main.numel(), dtype, tier)
                self._values[buffer] = store = Store(values, context.memory, tier)
                spans = (
                    [] if store.is_near else pieces.cut(values.numel(), pieces.NEAR_BYTES // values.itemsize)
                )
                self._ranges[buffer] = [_Range(span, values, self._pieces.alignment) for span in spans]
            self.begin_anew()

    @property
    def decay(self) -> float:
        """The share of the average that an update keeps. Set it between steps, on all ranks alike."""
        return self._decay

    @decay.setter
    def decay(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"decay: expected a number from 0 to 1, got {value!r}")
        self._decay = float(value)

    @property
    def parameters(self) -> dict[ShardedParameter, Tensor]:
        """The average of this rank's slice of each trained parameter, [n], to be read before the next step.

        The host waits for updates that are under way.
        """
        self._runtime.state.steps.before_look()
        self._pieces.wait()
        return {
            sharded: store.values[buffer.sharded_span(index).slice]
            for buffer, store in self._values.items()
            for index, sharded in enumerate(buffer.sharded)
        }

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All memory of the averages."""
        yield from (store.values for store in self._values.values())
        yield from self.buffers.values()

    def begin_anew(self) -> None:
        """Drop the updates: averages are the present values until the next one."""
        self._runtime.state.steps.before_look()
        self._pieces.join()  # what could not be written is written anew
        for store in self._values.values():
            self._runtime.context.memory.renew(store.values)
        self.num_updates = 0
        self.update()
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the values after a step; those of a step that waits together with it."""
        weight = 1 - self._decay if self.num_updates else 1.0
        self._pieces.expect([part for ranges in self._ranges.values() for part in ranges])
        for buffer in self._values:
            take_in = functools.partial(self._update, buffer, weight)
            self._runtime.state.steps.follow(buffer.unit_name, take_in)
        for name, value in self._runtime.module.named_buffers():
            self.buffers[name] = value.detach().clone()
        self.num_updates += 1

    def _update(self, buffer: FlatBuffer, weight: float) -> None:
        """Update the averages of a buffer on the device that computes."""
        buffer.store.await_stepped()
        ranges = self._ranges[buffer]
        if not ranges:
            values = self._values[buffer].values
            self._take_in(buffer, Span(0, values.numel()), values, weight)
        try:
            for part in ranges:
                piece = self._pieces.fetch(part)
                self._take_in(buffer, part.span, part.values_in(piece.memory), weight)
                with self._pieces.writing(part.places(), piece):
                    pass
        except BaseException:
            self._pieces.join()  # its error comes once; ranges that are lost keep theirs
            raise

    def _take_in(self, buffer: FlatBuffer, span: Span, averages: Tensor, weight: float) -> None:
        """Take in a range of the main parameters of a buffer.

        Args:
            averages: of the range, where it is computed.
        """
        main = buffer.main.detach()[span.slice]
        if weight == 1.0:
            buffer.store.load(averages, span.start)  # edits of main parameters wait for it
            return
        if not buffer.store.is_near:
            buffer.store.load(main := torch.empty_like(averages), span.start)
        # Parameter by parameter, as torch does it: kernels may compute the last elements of a tensor in
        # another way than the others. Slices and ranges begin at blocks, so their last elements are the same.
        spans = map(buffer.sharded_span, range(len(buffer.sharded)))
        parts = [own.intersect(span).shifted(-span.start) for own in spans]
        if taken := [part.slice for part in parts if part.size]:
            present = main.to(averages.dtype)
            old, new = ([values[part] for part in taken] for values in (averages, present))
            torch._foreach_lerp_(old, new, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Show the averages in the model, in a `with` block of all ranks; then the trained values again.

        Inside, forwards, `generate`, `eval_batch`, `full_state_dict`, `save_pretrained` and all else that
        reads parameters has the averages, rounded to the main dtype where that is narrower. Buffers have the
        values of the last update. At the end, also after an exception, the trained values and buffers are
        back, to the bit. The block takes as much memory as the main parameters.

        Raises:
            RuntimeError: in a forward, a backward, `unsharded()` or another such block; the engine is closed;
                or averages in files are lost, and the message names the folder. Inside: a backward to
                parameters, a step, a checkpoint, `close()`, and calls that keep edits of parameters.
        """
        runtime, what = self._runtime, "EMA.applied()"
        if runtime.is_closed:
            raise RuntimeError(f"{what} after close(): the averages are of the engine's slices")
        runtime.wait(what, Moment.FAILED, Moment.SHOWN, Moment.AVERAGED)
        runtime.check_slots()
        with torch.inference_mode(False), torch.no_grad():
            trained = [self._copy_of_main(buffer) for buffer in self._values]
            buffers = {name: value.detach().clone() for name, value in runtime.module.named_buffers()}
        runtime.state.moments.add(Moment.AVERAGED)
        try:
            self._pieces.wait()
            self._write(self._values.values(), self.buffers)
            yield
        finally:
            runtime.state.moments.remove(Moment.AVERAGED)
            if not runtime.is_closed:
                try:
                    runtime.passes.recover()
                    runtime.wait()  # for all that reads main parameters
                finally:
                    self._write(trained, buffers)

    def _copy_of_main(self, buffer: FlatBuffer) -> Store:
        memory, main, tier = self._runtime.context.memory, buffer.main, buffer.plan.main_tier
        store = Store(memory.empty(main.numel(), main.dtype, tier), memory, tier)
        buffer.store.load(store.values)
        return store

    @torch.no_grad()
    def _write(self, parameters: Iterable[Store], buffers: Mapping[str, Tensor]) -> None:
        runtime = self._runtime
        for buffer, store in zip(self._values, parameters, strict=True):
            buffer.store.write(store.values)
        for name, value in runtime.module.named_buffers():
            if name in buffers and buffers[name].shape == value.shape:
                value.copy_(buffers[name])
        runtime.changed(self._values)
        runtime.passes.refresh()


class EMA(Averages):
    """The exponential moving average (EMA) of the trained parameters of an engine; made on all ranks alike.

    It belongs to the engine from then on. Each step that the engine counts updates it, whoever takes the
    step; a step that is left out (float16, `nonfinite="skip"`) does not. Checkpoints of the engine hold it.
    Averages are as in torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay): the first
    update copies the parameters, each later one is `average.lerp_(parameter, 1 - decay)`, in float32 or
    wider. Frozen parameters are not averaged, and buffers are copied.

    Args:
        engine: the engine; make the average before `load_checkpoint`, which loads it.
        decay: 0 to 1, the share of the average that an update keeps.
        name: the name in checkpoints, for several averages of one engine.

    Raises:
        ValueError: an argument is not as expected, or differs between ranks; or the engine has an average
            of this name.
        RuntimeError: the call is in a forward or backward, or in `unsharded()` or `applied()`; or there is no
            such memory, or space on disks.
    """

    def __init__(self, engine: Engine, decay: float, *, name: str = "ema") -> None:
        if not hasattr(engine, "_parts"):
            raise ValueError(f"EMA: expected the engine of zeroshard.initialize, got {type(engine).__name__}")
        runtime, kept = engine._runtime, engine._parts.averages

        def make() -> tuple[str, float]:
            if not str(name).isidentifier():
                raise ValueError(f"EMA: expected a name like 'ema' or 'ema_2', got {name!r}")
            if name in kept:
                raise ValueError(
                    f"EMA: the engine has an average '{name}' already: give this one another name"
                )
            runtime.wait("EMA()", Moment.SHOWN, Moment.AVERAGED)
            Averages.__init__(self, runtime, decay)
            return name, self.decay

        everyone = on_all(runtime.context.axes.world, "agreement on an EMA", make)
        versions = [f"name {own!r} and decay {share}" for own, share in everyone]
        require_equal(versions, lambda found: ValueError(f"EMA: expected the same on every rank; {found}"))
        kept[name] = self


class _Range:
    """Averages of a range of a buffer, which travel together.

    Args:
        span: the range.
        values: the averages of the buffer.
        alignment: of the pieces of memory, in bytes.
    """

    def __init__(self, span: Span, values: Tensor, alignment: int) -> None:
        self.span, self._dtype = span, values.dtype
        self._place = values[span.slice].view(torch.uint8)
        start = int(self._place.storage_offset()) % alignment
        self._bytes = slice(start, start + self._place.nbytes)

    def lay_out(self) -> int:
        """The bytes in a piece."""
        return self._bytes.stop

    def places(self) -> Sequence[tuple[Tensor, slice]]:
        """The place at rest, with its range in a piece."""
        return [(self._place, self._bytes)]

    def sources(self, piece: Piece) -> Sequence[tuple[Tensor, slice]]:
        """As `places`."""
        return self.places()

    def values_in(self, memory: Tensor) -> Tensor:
        """The averages in a piece."""
        return memory[self._bytes].view(self._dtype)
