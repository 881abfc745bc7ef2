"""Parameters that several chunks use, such as a tied embedding and head.

Each pipeline rank of these chunks holds the parameter, in a flat buffer of its own. So the slices of ranks
with the same places on the other axes are the same ranges. They start with the values of the first holder.
After a batch each holder sends its gradient to the others, and all add them up in the order of the ranks.
Their optimizers then take the same step. Chunks of one rank, as the first and the last one of ZBV, add to one
sum, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.agreement import require_equal_by_name
from zeroshard.comm import moves
from zeroshard.comm.messages import Messages
from zeroshard.parameters.sharded import ShardedParameter, gradient_of, set_gradients
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime


class Shared:
    """The parameters of a runtime that other pipeline ranks hold, too.

    Args:
        runtime: the runtime.
        messages: the messages of this rank.
    """

    def __init__(self, runtime: Runtime, messages: Messages) -> None:
        self._memory, self._messages, self._pp = runtime.context.memory, messages, runtime.context.axes.pp
        own = [buffer for buffer in runtime.buffers if len(buffer.originals[0].holders) > 1]
        self._buffers = sorted(own, key=lambda buffer: buffer.originals[0].fqn)
        for _, parameter in self._parameters():  # the attribute hides the method
            vars(parameter)["hookable"] = partial(_refuse_hooks, parameter.describe())

    @torch.no_grad()
    def start(self, optimizer: Optimizer | None) -> None:
        """Take over the values of the first holder; collective.

        Raises:
            ValueError: holders have other hyperparameters for the same parameter.
        """
        for buffer in self._buffers:
            first = buffer.originals[0].holders[0]
            names = ", ".join(repr(original.fqn) for original in buffer.originals)
            self._memory.fetch(buffer.main)
            found = self._swap(buffer, [buffer.main.detach()], f"first values of {names}")
            self._memory.evict(buffer.main)
            if first in found:
                buffer.store.write(*found[first])
                buffer.store.changed()
        self._compare([] if optimizer is None else optimizer.param_groups)

    def _compare(self, param_groups: Sequence[dict[str, Any]]) -> None:
        groups, own = {p: group for group in param_groups for p in group["params"]}, dict[str, str]()
        for _, parameter in self._parameters():
            group = {k: v for k, v in groups.get(parameter, {}).items() if k not in ("params", "param_names")}
            own[parameter.fqn] = str(dict(sorted(group.items()))) if parameter in groups else "no optimizer"
        label = "hyperparameters of parameters that several chunks use"
        require_equal_by_name(
            self._pp.all_gather_object(own, label),
            lambda name, found: ValueError(
                f"'{name}' is shared by pipeline ranks, which step it with other hyperparameters: {found}. "
                "Expected the same. Note that the parameter has another name in the modules of each"
            ),
        )

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Give each parameter the sum of its gradients over its chunks; collective."""
        for buffer, parameter in self._parameters():
            if not buffer.trainable:
                continue
            gradient = gradient_of(parameter)
            own = [] if gradient is None else [moves.to_device(gradient, self._messages.device).view(-1)]
            swapped = self._swap(buffer, own, f"gradient of '{parameter.fqn}'")
            summands = swapped | {self._messages.rank: own}
            total: Tensor | None = None
            for rank in buffer.originals[0].holders:
                for summand in summands[rank]:
                    total = summand if total is None else total + summand
            if total is None:
                continue
            if gradient is None:
                set_gradients([(parameter, moves.beside(total.clone(), parameter.detach()))])
            else:
                gradient.copy_(total.view_as(gradient))

    def _parameters(self) -> Iterator[tuple[FlatBuffer, ShardedParameter]]:
        return ((buffer, parameter) for buffer in self._buffers for parameter in buffer.sharded)

    def _swap(self, buffer: FlatBuffer, tensors: list[Tensor], label: str) -> dict[int, list[Tensor]]:
        """Send tensors to the other holders; return theirs, by pipeline rank."""
        messages = self._messages
        others = [rank for rank in buffer.originals[0].holders if rank != messages.rank]
        awaited = {rank: messages.expect(rank, label, None) for rank in others}
        for rank in others:
            messages.send([value.to(messages.device) for value in tensors], rank, label, with_forms=True)
        found = {rank: arrived() for rank, arrived in awaited.items()}
        messages.finish()
        return found


def _refuse_hooks(parameter: str) -> NoReturn:
    raise RuntimeError(
        f"several pipeline ranks use {parameter}, and a hook would see the gradient of one: use "
        "optimizer.register_step_pre_hook on all ranks, where p.grad is the sum"
    )
