"""The source of the gathers of a flat buffer: its main parameters, or other values in their place.

    main    [shard] or [total]  main dtype; always there
    copy    like main           compute dtype; where `main` lies on a tier that gathers do not read

Both may lie on other tiers than the device; the plan says where.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from zeroshard.comm.streams import Mark, mark_here
from zeroshard.parameters.state import Phase
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.context import Context


class Source:
    """The main parameters of one buffer, their copy, and who has the values of them.

    Args:
        main: the main parameters.
        plan: the plan of the buffer.
        unsharded: the part of the unsharded parameters that `main` holds, if they are resident; else None.
        context: the objects that all buffers share.
    """

    def __init__(self, main: Tensor, plan: BufferPlan, unsharded: Tensor | None, context: Context) -> None:
        self.main = main
        self._plan, self._context = plan, context
        self.filled_at = self._copied_at = main._version
        """The versions of `main` that unsharded parameters and `copy` have; -1: another write came.

        Steps and loads report their writes by `changed()`. Edits by the user count versions of torch, which
        are compared here and nowhere else.
        """
        self._copies: list[Mark] = []
        """The ends of copies out of host memory, which the host must not write to before."""
        self._stepped: Mark | None = None
        """The end of the copies of stepped values, to their place and into `copy`; then a gather may read."""
        self._use: tuple[Hashable, Callable[[], Tensor] | None] = None, None
        """The name of the values that gathers start from, and the call that gives them; None: `main`."""
        self.copy = unsharded if plan.copy_tier is not None else None
        """The main parameters in the compute dtype, if gathers start from such a copy; else None."""
        if plan.copy_tier is not None and unsharded is None:
            self.copy = context.memory.empty(main.numel(), plan.compute_dtype, plan.copy_tier)
            self.copy_to(main, self.copy)
        context.memory.evict(main)

    # -- values ---------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Note that main parameters were written, perhaps by kernels and files, which count no version."""
        self.filled_at = self._copied_at = -1

    def use(self, name: Hashable = None, values: Callable[[], Tensor] | None = None) -> None:
        """Let gathers start from other values than the main parameters; without arguments, from these again.

        Args:
            name: another name for other values; those under one name are the same.
            values: gives them, like `main`, in the main or the compute dtype; each gather asks again.
        """
        if self._use[0] != name:
            self.filled_at = -1
        self._use = name, values

    def move(self, unsharded: Tensor) -> None:
        """Go on with the same values in other memory of unsharded parameters, which are resident."""
        if self.copy is not None:
            self.copy = unsharded
        if self._plan.is_alias:
            self.main = unsharded
            self.filled_at = self._copied_at = unsharded._version

    def write(self, values: Tensor) -> None:
        """Write main parameters, [n] of any dtype on any device."""
        self._context.memory.check(self.main)
        self.main.copy_(values)  # the host waits: it may read them at once
        self._context.memory.evict(self.main)

    def stepped(self, values: Tensor, start: int) -> None:
        """Note that main parameters were written while they were on another tier.

        Args:
            values: main parameters where they are now, all or some of them. The current stream copies them.
            start: the first of them, counted in `main`.
        """
        is_current = self._copied_at == self.main._version
        self.changed()
        is_in_use = self._plan.is_resident and self._context.state.phase is Phase.BACKWARD
        if self.copy is not None and not is_in_use:
            self.transfer(values, self.copy[start : start + values.numel()])
            if is_current or values.numel() == self.main.numel():
                self._copied_at = self.main._version
        self._stepped = mark_here(self._context.device)

    # -- gathers --------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Let the system read the values that the next gather starts from, if they lie in files."""
        self._context.memory.fetch(self.main if self.copy is None else self.copy)

    def check(self) -> None:
        """Check the values that a gather starts from.

        Raises:
            RuntimeError: they are lost; the message names their file.
        """
        copy = self.copy if self._copied_at == self.main._version else None
        self._context.memory.check(self.main if copy is None else copy)

    def await_stepped(self) -> None:
        """Let the current stream wait for the copy of stepped values, which another stream may do."""
        if self._stepped is not None:
            self._stepped.wait()
            self._stepped = None

    def follow(self) -> None:
        """Note that the present values are gathered; copy main parameters that were written into `copy`."""
        if self.copy is not None and self._copied_at != self.main._version:
            self.copy_to(self.main.detach(), self.copy)
            self._copied_at = self.main._version
        self.filled_at = self.main._version

    def begin(self, own: Tensor) -> Tensor:
        """Return the values that a gather starts from, in `own` unless it can read them where they are.

        Args:
            own: this rank's part of the unsharded parameters.
        """
        if (others := self._use[1]) is not None:
            values = others()
        else:
            values = self.main.detach() if self.copy is None else self.copy
        if self.copy is not None and self._plan.is_resident:
            return values
        is_near = values.dtype == own.dtype and self._plan.gather_tier is Tier.DEVICE
        if is_near and self._plan.is_partial:
            return values
        self.copy_to(values, own)
        del self._copies[:-1]  # this stream has begun after them
        return own

    # -- copies ---------------------------------------------------------------------------------------

    def await_copies(self) -> None:
        """Let the host wait for the copies out of host memory, before it writes there."""
        copies, self._copies = self._copies, []
        for mark in copies:
            mark.synchronize()

    def follow_copies(self) -> None:
        """Let the current stream wait for the copies out of host memory, before it writes there."""
        for mark in self._copies:
            mark.wait()

    def copy_to(self, values: Tensor, target: Tensor) -> None:
        """Copy main parameters, or their copy, on the current stream; note it if they lie on the host."""
        self.transfer(values, target)
        if self._plan.main_tier is not Tier.DEVICE:
            mark = mark_here(self._context.device)
            if mark.event is not None:
                self._copies.append(mark)
                self._context.state.reads_main = True

    def transfer(self, values: Tensor, target: Tensor) -> None:
        """Copy values of any tier and dtype, on the current stream; a device that is not the host casts."""
        memory = self._context.memory
        memory.fetch(values)
        memory.check(target)
        if values.is_cpu and not target.is_cpu:  # torch would cast on the host, and wait
            values = values.to(target.device, non_blocking=True)
        target.copy_(values, non_blocking=True)
        memory.evict(values)
        memory.evict(target)

    def release(self) -> None:
        """Drop all values; tensors that others hold keep theirs."""
        self.await_stepped()
        self.await_copies()
        self.main, self.copy = self.main.new_empty(0), None
        self.filled_at = self._copied_at = self.main._version
