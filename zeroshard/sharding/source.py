"""The source of the gathers of a flat buffer: its main parameters, or other values in their place.

    main    [shard] or [total]  main dtype; always there
    copy    like main           compute dtype; where `main` lies on a tier that gathers do not read

Both are stores, on any tier; the plan says where.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from zeroshard.comm.streams import Mark, mark_here
from zeroshard.parameters.state import Phase
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.context import Context
from zeroshard.stores.store import Store, Values


class Source:
    """The main parameters of one buffer, their copy, and who has the values of them.

    Args:
        main: the main parameters.
        plan: the plan of the buffer.
        unsharded: the part of the unsharded parameters that `main` holds, if they are resident; else None.
        context: the objects that all buffers share.
    """

    def __init__(self, main: Tensor, plan: BufferPlan, unsharded: Tensor | None, context: Context) -> None:
        self._plan, self._context = plan, context
        self.store = Store(main, context.memory)
        """The main parameters."""
        self._copies: list[Mark] = []
        """The ends of copies out of host memory, which the host must not write to before."""
        self._stepped: Mark | None = None
        """The end of the copies of stepped values, to their place and into `copy`; then a gather may read."""
        self._used: Values | None = None
        """What gathers start from in place of the main parameters, if anything."""
        self.copy: Store | None = None
        """The main parameters in the compute dtype, if gathers start from such a copy."""
        if plan.copy_tier is not None:
            memory = unsharded
            if memory is None:
                memory = context.memory.empty(main.numel(), plan.compute_dtype, plan.copy_tier)
                self.load(self.store, memory)
            self.copy = Store(memory, context.memory)
        self._copied = self.store.version
        """The version of main parameters that `copy` has."""
        self.filled: Hashable = self._copied
        """The version of the values that unsharded parameters have; None: they are no such values."""
        context.memory.evict(main)

    # -- values ---------------------------------------------------------------------------------------

    @property
    def version(self) -> Hashable:
        """The version of the values that the next gather starts from."""
        return (self._used or self.store).version

    def changed(self) -> None:
        """Note that main parameters were written, perhaps by kernels and files, or unsharded ones edited."""
        self.store.changed()
        self.filled = None

    def use(self, values: Values | None = None) -> None:
        """Let gathers start from other values than the main parameters; None: from these again."""
        self._used = values

    def move(self, unsharded: Tensor) -> None:
        """Go on with the same values in other memory of unsharded parameters, which are resident."""
        if self.copy is not None:
            self.copy.values = unsharded
        if self._plan.is_alias:
            self.store.values = unsharded
            self.filled = self._copied = self.store.version

    def write(self, values: Tensor) -> None:
        """Write main parameters, [n] of any dtype on any device; the host waits: it may read them at once."""
        self.store.store(values)
        mark_here(self._context.device).synchronize()

    def stepped(self, values: Tensor, start: int) -> None:
        """Note that main parameters were written while they were on another tier.

        Args:
            values: main parameters where they are now, all or some of them. The current stream copies them.
            start: the first of them, counted in `main`.
        """
        is_current = self._copied == self.store.version
        self.changed()
        is_in_use = self._plan.is_resident and self._context.state.phase is Phase.BACKWARD
        if self.copy is not None and not is_in_use:
            self.copy.store(values, start)
            if is_current or values.numel() == self.store.values.numel():
                self._copied = self.store.version
        self._stepped = mark_here(self._context.device)

    # -- gathers --------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Let the system read the values that the next gather starts from, if they lie in files."""
        (self.copy or self.store).prefetch()

    def check(self) -> None:
        """Check the values that a gather starts from.

        Raises:
            RuntimeError: they are lost; the message names their file.
        """
        copy = self.copy if self._copied == self.store.version else None
        (copy or self.store).check()

    def await_stepped(self) -> None:
        """Let the current stream wait for the copy of stepped values, which another stream may do."""
        if self._stepped is not None:
            self._stepped.wait()
            self._stepped = None

    def follow(self) -> None:
        """Note that the present values are gathered; copy main parameters that were written into `copy`."""
        if self.copy is not None and self._copied != self.store.version:
            self.load(self.store, self.copy.values)
            self._copied = self.store.version
        self.filled = self.version

    def begin(self, own: Tensor) -> Tensor:
        """Return the values that a gather starts from, in `own` unless it can read them where they are.

        Args:
            own: this rank's part of the unsharded parameters.
        """
        values = self._used or self.copy or self.store
        if isinstance(values, Store):
            is_near = values.values.dtype == own.dtype and self._plan.gather_tier is Tier.DEVICE
            if (values is self.copy and self._plan.is_resident) or (is_near and self._plan.is_partial):
                return values.values.detach()
        self.load(values, own)
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

    def load(self, values: Values, out: Tensor) -> None:
        """Load main parameters, or what is used for them; note it if they lie on the host."""
        values.load(out)
        if self._plan.main_tier is not Tier.DEVICE:
            mark = mark_here(self._context.device)
            if mark.event is not None:
                self._copies.append(mark)
                self._context.state.reads_main = True

    def release(self) -> None:
        """Drop all values; tensors that others hold keep theirs."""
        self.await_stepped()
        self.await_copies()
        self.store.values, self.copy, self._used = self.store.values.new_empty(0), None, None
