"""Gradients of one flat buffer that need no exchange, and the interface of all gradients.

Those whose plan has exchanges, or that leave the device, are `ReducedGradients`; see `reduced.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.gradient import gradient_of, set_gradients
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.noted import Noted

_register: Any = Tensor.register_post_accumulate_grad_hook  # past what `redirect_hooks` puts in its place


class Gradients:
    """Gradients without any exchange: those of autograd are handed on as they are.

    This is the interface of all gradients; those whose plan has exchanges are `ReducedGradients`.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.num_missing = len(buffer.sharded)
        """Parameters whose gradient has not arrived since the last reduction."""
        self.used = [False] * len(buffer.sharded)
        """Parameters that got a gradient since the last delivery, on this rank."""
        self.unscale = 1.0
        """One over the loss scale."""
        self.is_early = False
        """True if the gradients of this backward have been delivered, and stepped with, before its end."""
        self.arrived: list[Callable[[Tensor], None]] = []
        """For each parameter, the hook that takes the gradient that autograd has accumulated."""
        self._watches: list[RemovableHandle] = []
        self._is_narrow = buffer.plan.main_dtype != buffer.plan.wide_dtype
        self._is_plain = buffer.plan.main_dtype == buffer.plan.compute_dtype
        self._held: dict[int, Tensor] = {}
        self._new: list[tuple[ShardedParameter, Tensor]] = []
        """Gradients that were taken from autograd as they are to be delivered."""
        self._sums: list[Tensor | None] = []
        self._versions: list[int] = []
        """The versions of these sums when they were left to autograd."""
        self.left_to_autograd = False
        """True while autograd adds gradients up by itself; `take` ends that."""

    set_aside: Callable[[int, Tensor], bool] | None = None
    """Takes the gradient of the parameter at an index for later, or returns False; see `pack`."""
    noted: Noted | None = None
    """A note on the `p.grad` that the last delivery has set, if the device took it."""
    takes_notes = False
    """True if the device takes notes of gradients, which leave it."""
    is_kept = False
    """True while sums stay here until the last micro-batch, because `p.grad` has fewer bits."""
    has_more = False
    """True if a gradient has arrived since the last reduction."""
    is_reducing = False
    """True while an exchange is under way or to come."""

    @property
    def has_deferred(self) -> bool:
        """True if there are sums for a later backward, in no p.grad yet."""
        return bool(self._held)

    @property
    def local_bytes(self) -> int:
        """Bytes of gradients that are not in any p.grad."""
        return sum(gradient.nbytes for gradient in self._held.values())

    def watch(self) -> None:
        """Have autograd call the hooks of the parameters; repeatable."""
        if not self._watches:
            pairs = zip(self.buffer.unsharded, self.arrived, strict=True)
            self._watches = [_register(parameter, hook) for parameter, hook in pairs]

    def unwatch(self) -> None:
        """Have autograd call no hooks, since gradients are left to it until `watch`; repeatable."""
        for handle in self._watches:
            handle.remove()
        self._watches = []

    def begin(self, more: bool, *, leave: bool = False) -> None:
        """Begin a backward. New gradients are added to those that exist as they arrive.

        Args:
            more: True if a later backward is to add to the gradients of this one.
            leave: True to leave it to autograd to add them up, where it computes the same sums.
        """
        if self.left_to_autograd:  # it goes on adding to those of the last backward
            return
        self.is_kept, self.is_early = more and self._is_narrow, False
        sharded = self.buffer.sharded
        self._sums = [None] * len(sharded) if self.is_kept else list(map(gradient_of, sharded))
        is_same = self._is_plain and not self.is_kept and not self._held and self.unscale == 1.0
        self.left_to_autograd = leave and is_same and self.set_aside is None and not torch.is_grad_enabled()
        if self.left_to_autograd:
            self._versions = [0 if total is None else total._version for total in self._sums]
            with past_guards():
                for parameter, total in zip(self.buffer.unsharded, self._sums, strict=True):
                    if total is not None:
                        parameter.grad = total.view_as(parameter)

    def take(self) -> None:
        """Take over the gradients that were left to autograd, at the end of a backward."""
        if not self.left_to_autograd:
            return
        self.left_to_autograd = False
        with past_guards():
            for index, (parameter, total) in enumerate(zip(self.buffer.unsharded, self._sums, strict=True)):
                if (gradient := parameter.grad) is None:
                    continue
                parameter.grad = None
                self.used[index] = total is None or total._version != self._versions[index]
                if total is None:
                    self._new.append((self.buffer.sharded[index], self._flatten(index, gradient)))
                elif gradient.data_ptr() != total.data_ptr():  # somebody has put a new sum in its place
                    self.used[index] = True
                    total.copy_(self._flatten(index, gradient))

    def pack(self, index: int, gradient: Tensor, defer: bool) -> None:
        """Take over this rank's gradient of one parameter.

        Args:
            index: the index of the parameter in the buffer.
            gradient: in the compute dtype and the shape of the original, as autograd made it; nobody else
                uses it.
            defer: True if a later backward is to reduce it.

        Raises:
            RuntimeError: the gradient is sparse.
        """
        self.used[index] = True
        total, held = self._sums[index], self._held.get(index)
        before, factor = (held, 1.0) if total is None or held is not None else (total, self.unscale)
        if before is None:
            self._held[index] = gradient.to(self.buffer.plan.wide_dtype) if self.is_kept else gradient
        else:
            before.add_(self._flatten(index, gradient).view_as(before), alpha=factor)

    def start_reduce(self) -> None:
        """Start the reduction; parameters without a gradient count zeros."""

    def settle(self) -> None:
        """Wait for the exchange under way, so that the packed buffer is free."""

    def progress(self) -> None:
        """Wait for the exchange under way, and start the next one if the reduction needs several."""

    def complete(self) -> None:
        """Finish a reduction that was started; its gradients wait for delivery."""

    def keep_deferred(self) -> None:
        """End a backward whose sums stay here until a later one reduces them."""

    def deliver(self, used: Sequence[bool]) -> None:
        """Set `p.grad` of the sharded parameters, or add to it, unless sums are kept for a later backward.

        Args:
            used: for each parameter, True if any rank has used it; the others keep their `p.grad`.
        """
        if not (self.is_kept or self.left_to_autograd):
            self._detach(used)()

    def _detach(self, used: Sequence[bool]) -> Callable[[], None]:
        """Take all gradients out, and return a call that sets `p.grad`; see `hand_over`."""
        self.used = [False] * len(self.used)
        held, new, self._held, self._new, self._sums = self._held, self._new, {}, [], []
        sharded, dtype, unscale = self.buffer.sharded, self.buffer.plan.main_dtype, self.unscale

        def deliver() -> None:
            for index, gradient in held.items():
                parameter, flat = sharded[index], self._flatten(index, gradient)
                if unscale != 1.0:
                    flat = flat.to(self.buffer.plan.wide_dtype).mul_(unscale)
                if (total := gradient_of(parameter)) is not None:
                    total.add_(flat)
                else:
                    new.append((parameter, flat if flat.dtype is dtype else flat.to(dtype)))
            set_gradients(new)

        return deliver

    def hand_over(self) -> Callable[[], None]:
        """Take reduced gradients out before the end of the backward: this rank has all of the buffer.

        Returns:
            A call that sets `p.grad`, once, in any thread; it waits until the gradients are on the host.
        """
        used, self.is_early = self.used, True
        deliver = self._detach([True] * len(used))
        self.used = used  # for the agreement of all ranks
        return deliver

    def drop(self) -> None:
        """Forget all gradients that are in no `p.grad` yet, after the reductions under way have ended."""
        self.used = [False] * len(self.used)
        self._held, self._new, self._sums, self.left_to_autograd = {}, [], [], False

    def forget(self, index: int) -> None:
        """Forget the sum of gradients of one parameter that is not in its p.grad yet."""
        self.used[index] = False
        self._held.pop(index, None)

    def _flatten(self, index: int, gradient: Tensor) -> Tensor:
        if gradient.layout is not torch.strided:
            name = self.buffer.originals[index].fqn
            raise RuntimeError(f"the gradient of '{name}' is {gradient.layout}; expected a dense one")
        if gradient.requires_grad:
            gradient = gradient.detach()
        return gradient if gradient.ndim == 1 else gradient.reshape(-1)
