"""The runner of a schedule: it walks through the list of this pipeline rank, action by action.

    a receive    is posted some actions before the action that needs it, in the order of the sender
    an action    computes one micro-batch in one chunk, or is a verb of the sharding: unshard, reduce, step
    a send       follows the action that makes its tensors; a few may be on their way

A chunk is a function of tensors. Its inputs come from the chunk before it, or are the batch's inputs; the
outputs of the last chunk are the losses. Between chunks all tensors are leaves: the backward of a chunk ends
at its inputs, whose gradients go back.

Recomputation runs the forward of a chunk without a graph and keeps the inputs and the states of random
generators; the recompute action runs it again with a graph.

A backward in two halves is one backward in which the gradients of large weights are left out, and a second
one that computes them alone; see `weights.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.comm.messages import Form, Forms, Messages
from zeroshard.parallel.pipeline.actions import (
    Action,
    ChunkTransfer,
    Kind,
    Place,
    Schedule,
    ends_of_chunks,
    ends_of_steps,
    plan_posts,
)
from zeroshard.parallel.pipeline.simulate import simulate
from zeroshard.parallel.pipeline.weights import Waiting
from zeroshard.parallel.random import forked, random_states, set_random_states

if TYPE_CHECKING:
    from zeroshard.parallel.pipeline.training import PipelineTraining

_MOST_FORMS = 64
"""Batches of different shapes whose forms are remembered."""


@dataclass(slots=True)
class _Call:
    """A micro-batch in a chunk of this rank, or on its way to a chunk of another rank."""

    inputs: tuple[Tensor, ...] = ()
    """Leaves."""
    outputs: tuple[Tensor, ...] = ()
    """() until a recomputation has made them."""
    gradients: tuple[Tensor, ...] = ()
    """Of the outputs that may need one."""
    random: Mapping[torch.device, Tensor] = field(default_factory=dict)
    """The states of random generators before it, if it will run again."""
    waiting: Waiting = field(default_factory=Waiting)
    """The weight gradients of a backward that comes in two halves."""


class Runner:
    """Runs batches by a schedule.

    Args:
        schedule: the lists of all pipeline ranks.
        messages: the messages of this rank.
        chunks: the chunks of this rank, and the verbs of their sharding.
    """

    def __init__(self, schedule: Schedule, messages: Messages, chunks: PipelineTraining) -> None:
        self._steps = schedule.exchanges[messages.rank]
        self._posts = list(plan_posts(self._steps))
        self.schedule, self._chunks, self._messages = schedule, chunks, messages
        messages.most_sends = max(messages.most_sends, room_for_sends(schedule))
        self._last_chunk = schedule.num_chunks - 1
        actions = schedule.lists[messages.rank]
        self.recomputed = {action.place for _, action in schedule if action.kind is Kind.RECOMPUTE}
        """The forwards that run twice, of all ranks. Their outputs are all taken to need a gradient."""
        self._halved = {action.place for action in actions if action.kind is Kind.INPUT_GRADIENT}
        self.ends = ends_of_steps(actions)
        """The last backward before each step, with the number of its backwards."""
        self._ends = ends_of_chunks(actions)
        self._trained = {action.chunk for action in self._ends}
        """The chunks that have backwards."""
        self._forms: dict[Any, dict[ChunkTransfer, Forms]] = {}
        """The forms of messages, by the shapes of the batch."""
        self._calls = defaultdict[Place, _Call](_Call)
        self._is_reached = defaultdict[int, bool](bool)
        """By chunk: True if one of its inputs got a gradient in this list, or none needs one."""
        self._awaited: dict[ChunkTransfer, Callable[[], list[Tensor]]] = {}
        """Messages that are under way to this rank, each with the function that waits for its tensors."""
        self._run: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
        }

    def run(self, agree: Callable[[], Any]) -> None:
        """Run the schedule once.

        Args:
            agree: waits for a value that all ranks have alike. Where it was seen before, all tensors between
                chunks have the forms that they had then, and are sent without them. The exchange of the
                value runs during the first action, if that action needs no message.

        Raises:
            RuntimeError: a tensor has another form than with the same value before.
            ValueError: no input of a chunk got a gradient: to zeros AdamW would add its decay.
        """
        self._calls.clear()  # a batch may have failed
        self._awaited.clear()
        self._is_reached.clear()
        first, needed, _ = self._steps[0]
        if not needed:
            self._chunks.enter(first)
            self._act(first)
        shapes = agree()
        known = self._forms.get(shapes)
        found: dict[ChunkTransfer, Forms] = {}
        for number, (action, receives, sends) in enumerate(self._steps):
            for message in self._posts[number]:
                forms = None if known is None else known[message]
                self._awaited[message] = self._messages.expect(message.source, message.label, forms)
            self._chunks.enter(action)
            for message in receives:
                found[message] = self._take(message, known)
            if number or needed:
                self._act(action)
            for message in sends:
                found[message] = self._send(message, known)
        self._messages.finish()
        if lost := [chunk for chunk, is_reached in self._is_reached.items() if not is_reached]:
            raise ValueError(
                f"chunk {lost[0]}: expected a gradient of its input, got none in any micro-batch: freeze the "
                "modules before it (requires_grad_(False) before initialize)"
            )
        self._forms[shapes] = found
        while len(self._forms) > _MOST_FORMS:
            del self._forms[next(iter(self._forms))]  # the same on all ranks

    def _act(self, action: Action) -> None:
        self._run.get(action.kind, self._chunks.act)(action)

    # -- messages -------------------------------------------------------------------------------------

    def _take(self, message: ChunkTransfer, known: dict[ChunkTransfer, Forms] | None) -> Forms:
        tensors = tuple(self._awaited.pop(message)())
        call = self._calls[message.user.place]
        if message.is_activation:
            call.inputs = tensors
        else:
            call.gradients = tensors
        return tuple(map(Form.of, tensors)) if known is None else known[message]

    def _send(self, message: ChunkTransfer, known: dict[ChunkTransfer, Forms] | None) -> Forms:
        call = self._calls.pop(message.user.place)
        tensors = call.inputs if message.is_activation else call.gradients
        forms = tuple(map(Form.of, tensors))
        if known is not None and known[message] != forms:
            raise RuntimeError(
                f"the {message.label} has {list(forms)}, and had {list(known[message])} for a batch of the "
                "same shapes: expected the shapes of activations to follow from the shapes of the inputs"
            )
        self._messages.send(tensors, message.target, message.label, with_forms=known is None)
        return forms

    # -- actions --------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        chunk, microbatch = place = action.place
        call, is_recomputed = self._calls[place], place in self.recomputed
        if is_recomputed:
            call.random = random_states(self._messages.device)
            with torch.no_grad():
                # The forward may edit its inputs, and comes again.
                outputs = tuple(self._chunks.forward(*place, [one.clone() for one in call.inputs]))
        else:
            with self._deferring(place):
                outputs = call.outputs = tuple(self._chunks.forward(*place, call.inputs))
        if chunk not in self._trained:
            del self._calls[place]
        if chunk != self._last_chunk:
            self._calls[chunk + 1, microbatch].inputs = tuple(
                value.detach().requires_grad_(_may_need(value, is_recomputed)) for value in outputs
            )

    def _recompute(self, action: Action) -> None:
        call = self._calls[action.place]
        with forked(self._messages.device), self._deferring(action.place):
            set_random_states(call.random)
            call.outputs = tuple(self._chunks.forward(*action.place, call.inputs))

    def _deferring(self, place: Place) -> AbstractContextManager[None]:
        """Leave weight gradients to the second half of the backward, if there are two."""
        return self._chunks.deferring(self._calls[place].waiting) if place in self._halved else nullcontext()

    def _backward(self, action: Action) -> None:
        """Run a whole backward, or its first half, and keep the gradients of inputs for the chunk before."""
        chunk, microbatch = place = action.place
        call, is_recomputed = self._calls.pop(place), place in self.recomputed
        if place in self._halved:
            self._calls[place].waiting = call.waiting
        is_last = chunk == self._last_chunk
        gradients: Sequence[Tensor | None] = (None,) * len(call.outputs) if is_last else call.gradients
        sent = [value for value in call.outputs if is_last or _may_need(value, is_recomputed)]
        pairs = [pair for pair in zip(sent, gradients, strict=True) if pair[0].requires_grad]

        def run() -> None:
            if pairs:
                torch.autograd.backward([value for value, _ in pairs], [one for _, one in pairs])

        with self._deferring(place):
            self._chunks.backward(chunk, action in self._ends, run)
        if chunk:  # gradients of unused inputs are zero
            inputs = [value for value in call.inputs if value.requires_grad]
            self._calls[chunk - 1, microbatch].gradients = tuple(
                torch.zeros_like(value) if value.grad is None else value.grad for value in inputs
            )
            may_need_none = not inputs or (chunk - 1, microbatch) in self.recomputed
            self._is_reached[chunk] |= may_need_none or any(value.grad is not None for value in inputs)

    def _weight_gradient(self, action: Action) -> None:
        waiting = self._calls.pop(action.place).waiting
        self._chunks.backward(action.place[0], action in self._ends, waiting.compute)


def room_for_sends(schedule: Schedule) -> int:
    """Return the messages to each rank that must be under way at once, so that no rank stands still.

    Raises:
        ValueError: the schedule deadlocks with any room.
    """
    simulate(schedule)
    for room in count(1):
        with suppress(ValueError):
            simulate(schedule, max_unreceived=room)
            return room
    raise AssertionError("the schedule runs without a limit")


def _may_need(value: Tensor, is_recomputed: bool) -> bool:
    """True if an output may need a gradient. Without a graph only the recomputation finds out."""
    return value.requires_grad or (is_recomputed and value.is_floating_point())
