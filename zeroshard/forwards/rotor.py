"""The fastest forward and backward of a chain of stages within a budget of bytes, by recomputation alone.

Stages are recomputed from saved inputs, and recomputations may nest: this needs a caller that owns the loop
over the stages, such as a Sequential or a chunk of a pipeline. A flat choice for each unit is in
`keeping.py`.

    S0   K1 F2 S3 S4 B4 B3   S1 S2 B2 B1   B0        five stages, of which the last one is the loss

    F forward, its input is dropped    K forward, its input is kept    S forward, all is saved    B backward

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains: how
to train deep neural networks with limited memory" (Rotor), theorem 1. Its optimum is among the sequences that
keep what they have saved until its backward. The least seconds of stages s to t, with m bytes besides the
input of s, and the gradient of the output of t among these m from the begin on, are the least of

    split at j    forwards of s to j - 1, cost of j to t with m - (input of j), cost of s to j - 1 with m
    save s        forward of s, cost of s + 1 to t with m - (saved by s), backward of s
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of a stage of a chain. The loss is the last stage; its output may count as 0 bytes."""

    forward: float
    """Seconds of the forward."""
    backward: float
    """Seconds of the backward."""
    output: int
    """Bytes of the output; its gradient has as many."""
    saved: int
    """Bytes that the backward needs besides the input of the stage; the output counts."""
    forward_extra: int = 0
    """Bytes that the forward holds for itself while it runs."""
    backward_extra: int = 0
    """The same of the backward, where the gradients of input and output are not held in turn but at once:
    those of the input."""


class ChainTask(NamedTuple):
    """A task of a sequence.

    - forward: compute the output of the stage without autograd, and drop its input.
    - keep: compute the output without autograd, and keep the input.
    - save: compute the output with autograd, and keep the input.
    - backward: give the gradient of the input for that of the output; drop all that the stage has saved and,
      unless the stage before has saved it as its output, the input.
    """

    kind: Literal["forward", "keep", "save", "backward"]
    stage: int


class ChainPlan(NamedTuple):
    """The fastest sequence."""

    seconds: float
    tasks: tuple[ChainTask, ...]


def plan_chain(
    stages: Sequence[StageCosts], input_bytes: int, budget: int, num_slots: int = 500
) -> ChainPlan:
    """Return the fastest sequence of tasks whose bytes stay within a budget, and its time.

    It takes O(L^3 slots) for L stages. Sizes are rounded up to slots: with integer sizes and no more bytes
    in the budget than slots the result is the optimum, otherwise it may be slower.

    Args:
        stages: the stages, in the order of the forward.
        input_bytes: bytes of the input of the first stage, which is there from begin to end.
        budget: bytes that the device has for the input, activations and gradients of the chain.
        num_slots: parts of the budget that sizes are counted in.

    Raises:
        ValueError: no sequence fits into the budget; the text names a budget into which one fits.
    """
    table, enough = _Table(stages, input_bytes, budget, num_slots), budget
    while table.least > table.room:
        enough = -(-enough * table.least // table.room) if enough > 0 else table.least
        table = _Table(stages, input_bytes, enough, num_slots)
    if enough > budget:
        raise ValueError(f"expected a memory budget of at least {enough} bytes for the chain, got {budget}")
    return table.solve()


Tree = list[Any]
"""Stages that save all, by number, and, as trees of their own, runs of stages that are computed again."""


def tree_of(tasks: Sequence[ChainTask]) -> Tree:
    """Return how nested checkpoints carry a sequence out: one around a tree inside keeps its input alone."""

    def parse(at: int) -> tuple[Tree, int]:
        kind, stage = tasks[at]
        at += 1
        if kind == "keep":
            while tasks[at].kind == "forward":
                at += 1
            rest, at = parse(at)
            again, at = parse(at)
            return [again, *rest], at
        rest = []
        if tasks[at] != ("backward", stage):
            rest, at = parse(at)
        return [stage, *rest], at + 1

    return parse(0)[0]


class _Table:
    """The recurrence for all parts of a chain and all bytes, in slots.

    Args:
        stages: the stages.
        input_bytes: bytes of the input of the first one.
        budget: bytes.
        num_slots: slots of the budget.
    """

    def __init__(self, stages: Sequence[StageCosts], input_bytes: int, budget: int, num_slots: int) -> None:
        def slots(size: int) -> int:
            return size if budget <= num_slots else -(-size * num_slots // budget)

        self._stages, self._last = stages, len(stages) - 1
        self.room = min(budget, num_slots)
        """Slots of the budget."""
        self._saved = [slots(stage.saved) for stage in stages]
        self._forward = [slots(stage.forward_extra) for stage in stages]
        self._backward = [slots(stage.backward_extra) for stage in stages]
        self._sizes = [slots(input_bytes), *(slots(stage.output) for stage in stages)]
        """The input of each stage, and the output of the last one."""

    def _parts(self) -> Iterator[tuple[int, int]]:
        """All parts of the chain, (first stage, last stage), the shorter ones first."""
        return (
            (first, first + size) for size in range(self._last + 1) for first in range(self._last + 1 - size)
        )

    def _to_save(self, first: int, last: int) -> int:
        """Slots for the first stage of a part alone, if it is saved."""
        before = self._sizes[last + 1] + self._forward[first]
        return self._saved[first] + max(before, self._sizes[first + 1] + self._backward[first])

    def _to_pass(self, first: int, last: int) -> int:
        """Slots for the forwards of a part but the last stage, without saving."""
        sizes, extra = self._sizes, self._forward
        inner = (sizes[stage] + sizes[stage + 1] + extra[stage] for stage in range(first + 1, last))
        return sizes[last + 1] + max([sizes[first + 1] + extra[first], *inner])

    @cached_property
    def least(self) -> int:
        """Slots that the chain needs with its input."""
        sizes, least = self._sizes, dict[tuple[int, int], int]()
        for first, last in self._parts():
            saves = max(self._to_save(first, last), self._saved[first] + least.get((first + 1, last), 0))
            splits = [
                max(self._to_pass(first, last), sizes[j] + least[j, last], least[first, j - 1])
                for j in range(first + 1, last + 1)
            ]
            least[first, last] = min([saves, *splits])
        return sizes[0] + least[0, self._last]

    def solve(self) -> ChainPlan:
        """Return the plan; at least `least` slots are there."""
        shape = (self._last + 1, self._last + 1, self.room + 1)
        cost, with_input, choice = np.empty(shape), np.empty(shape), np.empty(shape, np.int16)
        ahead = np.array([0.0, *accumulate(stage.forward for stage in self._stages)])
        for first, last in self._parts():
            stage = self._stages[first]
            saves = np.full(self.room + 1, float(stage.forward + stage.backward))
            if first < last:
                saves += _later(cost[first + 1, last], self._saved[first])
            saves[: self._to_save(first, last)] = np.inf
            inner = slice(first + 1, last + 1)
            splits = (
                with_input[inner, last] + cost[first, first:last] + (ahead[inner] - ahead[first])[:, None]
            )
            splits[:, : self._to_pass(first, last)] = np.inf
            ways = np.vstack([saves, splits])
            choice[first, last], cost[first, last] = ways.argmin(0), ways.min(0)
            with_input[first, last] = _later(cost[first, last], self._sizes[first])

        def tasks(first: int, last: int, room: int) -> Iterator[ChainTask]:
            split = first + int(choice[first, last, room])
            if split > first:
                yield ChainTask("keep", first)
                yield from (ChainTask("forward", stage) for stage in range(first + 1, split))
                yield from tasks(split, last, room - self._sizes[split])
                yield from tasks(first, split - 1, room)
            else:
                yield ChainTask("save", first)
                if first < last:
                    yield from tasks(first + 1, last, room - self._saved[first])
                yield ChainTask("backward", first)

        room = self.room - self._sizes[0]
        return ChainPlan(float(cost[0, self._last, room]), tuple(tasks(0, self._last, room)))


def _later(costs: Any, num_slots: int) -> Any:
    """Return costs by slots, if so many slots are taken by something else."""
    return np.concatenate([np.full(num_slots, np.inf), costs])[: len(costs)]
