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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.comm.streams import Mark, mark_here
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import refuse_averages
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime


class Averages:
    """Moving averages of the trained parameters of one module.

    The arithmetic is the same as in torch.optim.swa_utils: the first update copies the parameters, each later
    one is `average.lerp_(parameter, 1 - decay)`.

    Args:
        runtime: of the module.
        decay: 0 to 1, the share of the average that an update keeps.

    Raises:
        ValueError: `decay` is no such number, or optimizer states lie in files.
    """

    def __init__(self, runtime: Runtime, decay: Any) -> None:
        self.decay = decay
        self.num_updates = 0
        """Updates so far."""
        self._runtime, memory = runtime, runtime.context.memory
        self._values: dict[FlatBuffer, Tensor] = {}
        """The averages of each buffer, [n], as many as `buffer.main` has."""
        self.buffers: dict[str, Tensor] = {}
        """The copies of the model's buffers, by name; those that a checkpoint leaves out, too."""
        self._last = Mark(None)
        """The end of the last copy of averages to the host."""
        trained = [buffer for buffer in runtime.buffers if buffer.trainable]
        for buffer in trained:
            if buffer.plan.state_tier is Tier.DISK:
                raise ValueError(
                    "averages of parameters in files are not supported: expected offload.optimizer 'none' "
                    f"or 'cpu', got 'nvme', where {buffer.describe()} has its optimizer states"
                )
        with torch.inference_mode(False):
            for buffer in trained:
                dtype = torch.promote_types(buffer.main.dtype, torch.float32)
                self._values[buffer] = memory.empty(buffer.main.numel(), dtype, buffer.plan.state_tier)
            self.begin_anew()

    @property
    def decay(self) -> float:
        """The share of the average that an update keeps; it may be set between steps."""
        return self._decay

    @decay.setter
    def decay(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"decay: expected a number from 0 to 1, got {value!r}")
        self._decay = float(value)

    @property
    def parameters(self) -> dict[ShardedParameter, Tensor]:
        """The average of this rank's slice of each trained parameter, [n]; the host waits for updates."""
        self._runtime.state.look()
        self._last.synchronize()
        return {
            sharded: part
            for buffer, values in self._values.items()
            for sharded, part in zip(buffer.sharded, _slices(buffer, values), strict=True)
        }

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All memory of the averages."""
        yield from self._values.values()
        yield from self.buffers.values()

    def begin_anew(self) -> None:
        """Drop the updates: averages are the present values until the next one."""
        self._runtime.state.look()
        self.num_updates = 0
        self.update()
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the values after a step; those of a step that waits together with it."""
        weight = 1 - self._decay if self.num_updates else 1.0
        for buffer in self._values:
            self._runtime.state.follow_step(buffer.unit_name, functools.partial(self._update, buffer, weight))
        for name, value in self._runtime.module.named_buffers():
            self.buffers[name] = value.detach().clone()
        self.num_updates += 1

    def _update(self, buffer: FlatBuffer, weight: float) -> None:
        """Update the averages of a buffer on the device that computes."""
        device, values = self._runtime.context.device, self._values[buffer]
        buffer.source.await_stepped()
        near, main = moves.to_device(values, device), moves.to_device(buffer.main.detach(), device)
        if weight == 1.0:
            near.copy_(main)
        else:
            # Parameter by parameter, as torch does it: kernels may compute the last elements of a tensor in
            # another way than the others. Slices begin at blocks, so their last elements are the same ones.
            pairs = zip(_slices(buffer, near), _slices(buffer, main.to(near.dtype)), strict=True)
            if taken := [pair for pair in pairs if pair[0].numel()]:
                own, present = zip(*taken, strict=True)
                torch._foreach_lerp_(list(own), list(present), weight)
        if near is not values:
            values.copy_(near, non_blocking=True)
            self._last = mark_here(device)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Show the averages in the model; all ranks alike. At the end the trained values are back.

        Raises:
            RuntimeError: in a forward, a backward, `unsharded()` or another such block; or the engine is
                closed.
        """
        runtime, what = self._runtime, "EMA.applied()"
        if runtime.is_closed:
            raise RuntimeError(f"{what} after close(): the averages are of the engine's slices")
        runtime.wait()
        runtime.check_slots()
        runtime.require_slices(what)
        refuse_averages(runtime.state, what)
        with torch.inference_mode(False), torch.no_grad():
            mains = [(buffer.main.detach(), buffer.plan.main_tier) for buffer in self._values]
            empty = runtime.context.memory.empty
            trained = [empty(main.numel(), main.dtype, tier).copy_(main) for main, tier in mains]
            buffers = {name: value.detach().clone() for name, value in runtime.module.named_buffers()}
        runtime.state.is_averaged = True
        try:
            self._last.synchronize()
            self._write(self._values.values(), self.buffers)
            yield
        finally:
            runtime.state.is_averaged = False
            if not runtime.is_closed:
                try:
                    runtime.passes.drop_forward()
                    runtime.wait()  # for all that reads main parameters
                finally:
                    self._write(trained, buffers)

    @torch.no_grad()
    def _write(self, parameters: Iterable[Tensor], buffers: Mapping[str, Tensor]) -> None:
        runtime = self._runtime
        for buffer, values in zip(self._values, parameters, strict=True):
            buffer.source.write(values)
        for name, value in runtime.module.named_buffers():
            if name in buffers and buffers[name].shape == value.shape:
                value.copy_(buffers[name])
        runtime.changed(self._values)
        runtime.passes.refresh()


def _slices(buffer: FlatBuffer, flat: Tensor) -> list[Tensor]:
    """The parts of a flat range as long as `buffer.main` that the sharded parameters take, in their order."""
    return [flat[buffer.sharded_span(index).slice] for index in range(len(buffer.sharded))]
