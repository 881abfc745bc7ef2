"""What units keep for their backward, chosen in training so that a step stays within a budget of memory.

    steps 1 and 2     all units recompute, but one of each kind keeps all, and is measured: seconds, bytes
    before step 3     the plan of `keeping.py`, with what the peak of the device leaves to activations
    before 4 and 5    the plan again, with the peak of the step before
    a larger batch    begins anew

A unit keeps all, recomputes, sends what it would keep to the host and back, or recomputes and sends its input
there. A rank chooses for itself: the choice changes neither bits nor exchanges, since a unit is gathered for
its backward in any case. Tensor ranks choose alike, as recomputed layers exchange again. A Sequential whose
parameters are not gathered may recompute runs of units, and runs in runs, by Rotor's plan: nested checkpoints
carry it out. The measured unit of a kind stands for all with the same class and parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.comm import streams
from zeroshard.comm.streams import Stopwatch
from zeroshard.forwards import activations
from zeroshard.forwards.activations import HostCopies, SavedActivations, checked, offloading
from zeroshard.forwards.keeping import (
    KEEP,
    NO_LINK,
    OFFLOAD,
    OFFLOAD_INPUT,
    RECOMPUTE,
    KeepingPlan,
    Link,
    StageCosts,
    Tree,
    UnitCosts,
    choose_keeping,
    plan_chain,
    simulate,
    unit_costs,
)
from zeroshard.forwards.wrapped import checkpointed, outermost
from zeroshard.internals import pytree
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.unit import Unit
from zeroshard.tables import format_bytes

PROBED, PLANNED = 2, 5
"""The steps that measure, and the step from which on the plan stays as it is."""
SHARE = 0.9
"""The share of the device that is used if nobody says another one; the allocator needs some for itself."""
_LINK_BYTES = 1 << 26
"""Bytes that are copied each way to measure the link."""


class _Saved(NamedTuple):
    """Bytes of the forward of a unit, without memory that several units were given."""

    total: int = 0
    """Bytes that its backward needs, inputs included."""
    inputs: int = 0
    """The part of its inputs."""
    moved: int = 0
    """The part that may go to the host."""
    output: int = 0
    more: int = 0
    """Bytes that its backward needs, and of its output, besides its inputs."""


@dataclass(slots=True)
class _Measured:
    """Units of one class with parameters of the same sizes; the last of them is measured."""

    watches: tuple[Stopwatch, Stopwatch]
    """Of its forwards and of its backwards."""
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """The seconds of each."""
    most: _Saved = field(default_factory=_Saved)
    """The forward that has saved most."""
    saved: dict[int, int] = field(default_factory=dict)
    """The bytes of what the last forward has saved, by storage."""
    given: set[int] = field(default_factory=set)
    """The storages of its inputs."""
    made: dict[int, int] = field(default_factory=dict)
    """The bytes of its output, by storage."""

    def add_up(self, shared: Collection[int]) -> None:
        """Read what the last forward has saved, without storages that several units have been given."""
        own = {key: num for key, num in self.saved.items() if key not in shared}
        found = _Saved(
            total=sum(own.values()),
            inputs=sum(num for key, num in own.items() if key in self.given),
            moved=sum(num for num in own.values() if num >= activations.LEAST_BYTES),
            output=sum(self.made.values()),
            more=sum(num for key, num in (own | self.made).items() if key not in self.given),
        )
        self.most = max(self.most, found)
        self.saved, self.given, self.made = {}, set(), {}

    def read(self) -> None:
        """Read the watches."""
        for own, watch in zip(self.seconds, self.watches, strict=True):
            own += watch.read()

    def reset(self) -> None:
        """Drop what was measured."""
        self.read()
        self.seconds, self.most = ([], []), _Saved()

    def costs(self, link: Link | None) -> tuple[UnitCosts, StageCosts]:
        """Return the costs for a plan of all units, and for a plan of a chain."""
        forward = min(self.seconds[0], default=0.0)
        backward = min(self.seconds[1], default=2 * forward)  # its input needs no gradient
        total, inputs, moved, output, more = self.most
        unit = unit_costs(forward, backward, total, inputs, moved, link)
        if not self.seconds[0]:  # it has not run: nothing is known of what it would keep
            unit = replace(unit, options=unit.options[1:2])
        return unit, StageCosts(forward=forward, backward=backward, output=output, saved=more)


class Budget:
    """Lets each unit keep what its backward needs, compute it again, or send it to the host and back.

    Args:
        units: the root unit first; it keeps all.
        changes: the changes of their modules.
        context: the objects that their buffers share.
        num_bytes: the bytes of the device that a rank may use.

    Raises:
        ValueError: there are no blocks, or a block has a unit inside.
    """

    def __init__(self, units: Sequence[Unit], changes: Changes, context: Context, num_bytes: int) -> None:
        self._context, self._state, self._device = context, context.state, context.device
        self.num_bytes = num_bytes
        self._link: Link | None = None
        self._moving: SavedActivations | None = None
        """Moves activations to the host, if that is not the device."""
        if streams.has_streams(self._device):
            self._moving = SavedActivations(HostCopies(context.memory, context.streams), warns=False)
        self.take_peak: Callable[[], int] = int
        """Returns the largest number of bytes on the device since its last call; on the CPU without the
        activations of units. Set by the engine."""
        by_module = {unit.module: unit for unit in units[1:] if unit.buffers}
        modules = list(outermost(units[0].module, by_module))
        nested = any(
            part in by_module for module in modules for part in module.modules() if part is not module
        )
        if not modules or nested:
            raise ValueError(
                "recompute='auto': expected repeated blocks as units, with no unit inside of one; name the "
                "class of the blocks in units=, or set recompute to 'unit' or 'none'"
            )
        alike = [
            (type(module), tuple((p.shape, p.requires_grad) for p in module.parameters()))
            for module in modules
        ]
        self._measured = set({key: number for number, key in enumerate(alike)}.values())
        """The units that are measured, the last ones: inputs of the first ones may need no gradient."""
        self._distinct = {key: _Measured((Stopwatch(self._device), Stopwatch(self._device))) for key in alike}
        self._kinds = [self._distinct[key] for key in alike]
        """Of each unit."""
        for number, module in enumerate(modules):
            own = [units[0], by_module[module]]
            changes.around(module, RECOMPUTE, functools.partial(self._chosen, number, module, own))
        self._shown = [changes.stacks[module] for module in modules]
        """What lies around each unit, as `engine.units` shows it; the choice comes last."""
        root = units[0].module
        owns_loop = type(root).forward is nn.Sequential.forward and list(root.children()) == modules
        self._is_chain = owns_loop and all(unit.is_resident for unit in units)
        """True if the units are the stages of a chain, which may be computed again in runs, and runs in runs:
        a Sequential whose parameters are not gathered, as a run would gather all of its units together."""
        self._modules = modules
        self.tree: Tree | None = None
        """The plan of the chain, if that is what is run."""
        self._room = 0
        """The bytes that the last plan had for activations."""
        if self._is_chain:
            changes.around(root, "chain", self._chained)
        self._largest = [-1] * len(modules)
        """The most bytes of the tensors that each unit was given."""
        self._seen = -1
        self._uses = Counter[int]()
        """How many units of a forward have been given each storage."""
        self.seconds: dict[nn.Module, float] = {}
        """The predicted seconds of forward and backward of each unit; empty while units are measured."""
        changes.hook(root.register_forward_pre_hook(self._begin))
        self._restart()

    def _restart(self) -> None:
        """Measure from here on: at the begin, and when a unit is given more than ever."""
        self._steps = 0
        self.plan: KeepingPlan | None = None
        """The last plan; None while units are measured."""
        self.tree = None
        self.seconds.clear()
        self._uses.clear()
        self.take_peak()
        self._name(KEEP if number in self._measured else RECOMPUTE for number in range(len(self._kinds)))
        for kind in self._distinct.values():
            kind.reset()

    def _chosen(
        self, number: int, module: nn.Module, units: Sequence[Unit], forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        ways = {KEEP: forward, RECOMPUTE: checkpointed(module, forward)}
        if self._moving is not None:
            offload = functools.partial(offloading, self._moving, units)
            ways |= {OFFLOAD: offload(forward), OFFLOAD_INPUT: offload(ways[RECOMPUTE])}
        flats = [buffer.full for unit in units for buffer in unit.buffers]

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if self.tree is not None or not torch.is_grad_enabled() or is_in_backward():
                return forward(*args, **kwargs)  # a run of a chain is computed again as it was computed
            given = _bytes_of((args, kwargs))
            self._enter(number, given)
            name = self.names[number]
            if self._moving is not None and name in (KEEP, RECOMPUTE):
                self._moving.begin_segment()  # the copies of the unit before begin
            if self.plan is None:
                self._uses.update(given.keys())
            if self.plan is not None or name == RECOMPUTE:
                return ways[name](*args, **kwargs)
            kind = self._kinds[number]
            kind.saved |= given
            kind.given |= given.keys()
            with self._noting(kind.saved, flats), kind.watches[0]:
                output = forward(*args, **kwargs)
            kind.made = _bytes_of(output)
            _time_backward(kind.watches[1], (args, kwargs), output)
            return output

        return chosen

    def _enter(self, number: int, given: Mapping[int, int]) -> None:
        """Measure anew if a unit is given more than ever: storages with so many bytes."""
        if (size := sum(given.values())) > self._largest[number]:
            self._largest[number] = size
            if self.plan is not None:
                self._restart()

    def _chained(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def chained(input: Any) -> Any:  # as Sequential calls it
            if not torch.is_grad_enabled() or is_in_backward():
                return forward(input)
            self._enter(0, _bytes_of(input))
            return forward(input) if self.tree is None else self._run(self.tree, input)

        return chained

    def _run(self, tree: Tree, x: Any) -> Any:
        for part in tree:
            if isinstance(part, int):
                x = self._modules[part](x)
            else:
                inside = nn.ModuleList(self._modules[number] for number, _ in _depths(part))
                x = checkpointed(inside, functools.partial(self._run, part))(x)
        return x

    def _noting(self, storages: dict[int, int], flats: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Note the storages of tensors that autograd saves, but for those of parameters."""
        left_out = {flat.untyped_storage()._cdata for flat in flats}

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            storage = tensor.untyped_storage()
            if storage._cdata not in left_out and tensor.device.type == self._device.type:
                storages.setdefault(storage._cdata, storage.nbytes())
            alias = tensor.detach()
            return functools.partial(checked, alias, alias._version)

        return saved_tensors_hooks(pack, lambda saved: saved())

    def _begin(self, *_: object) -> None:
        """Begin a forward."""
        if not torch.is_grad_enabled() or is_in_backward():
            return
        has_stepped, self._seen = self._seen not in (-1, self._state.num_changes), self._state.num_changes
        if self.plan is None:
            shared = {key for key, num in self._uses.items() if num > 1}
            for kind in self._distinct.values():
                kind.add_up(shared)
        self._uses.clear()
        if has_stepped and self._steps < PLANNED:
            self._steps += 1
            for kind in self._distinct.values():
                kind.read()
            if self._steps >= PROBED:
                self._plan()

    def _plan(self) -> None:
        is_first = self._steps == PROBED
        if self._moving is not None and is_first:
            self._link = measure_link(self._device, self._context.memory.host(_LINK_BYTES))
        is_chain = self._is_chain and all(kind.seconds[0] for kind in self._kinds)
        measured = [kind.costs(self._link) for kind in self._kinds]
        found = measured, self._link or NO_LINK, self.take_peak(), self._largest[0], is_chain
        everyone = self._context.axes.tp.all_gather_object(found, "costs of units for a memory budget")
        measured, link, others, largest, is_chain = everyone[0]
        costs, stages = zip(*measured, strict=True)
        if self._device.type != "cpu":
            taken = [
                next((option for option in unit.options if option.name == name), unit.options[0])
                for unit, name in zip(costs, self.names, strict=True)
            ]
            expected = simulate(costs, taken, self.num_bytes, link).peak
            others -= expected if self.tree is None else self._room
        self._room = room = self.num_bytes - others
        self.plan, self.tree = choose_keeping(costs, room, link), None
        self._name(option.name for option in self.plan.options)
        times: Iterable[float] = self.plan.times
        chain = plan_chain(stages, largest, room) if is_chain else None
        if chain is not None and (chain.seconds < self.plan.seconds or self.plan.peak > room):
            # Rotor's plan, where a choice for each unit is slower or does not fit.
            self.tree, depths = chain.tree, dict(_depths(chain.tree))
            self._name(RECOMPUTE if depths[number] else KEEP for number in range(len(stages)))
            times = [(1 + depths[n]) * one.forward + one.backward for n, one in enumerate(stages)]
        elif self.plan.peak > room and is_first:
            budget, rest, own = map(format_bytes, (self.num_bytes, others, self.plan.peak))
            warn_user(
                f"memory_budget: {budget} are not enough for this batch: all else takes {rest}, and "
                f"activations {own} even where units recompute. Take fewer samples, or "
                "offload.optimizer='cpu'"
            )
        self.seconds = dict(zip(self._modules, times, strict=True))

    def _name(self, names: Iterable[str]) -> None:
        self.names = list(names)
        """The choices of the units that hold now."""
        for stack, name in zip(self._shown, self.names, strict=True):
            stack[-1] = name


def _depths(tree: Tree, depth: int = 0) -> Iterator[tuple[int, int]]:
    """Yield each stage of a tree, and how often it is computed again."""
    for part in tree:
        if isinstance(part, int):
            yield part, depth
        else:
            yield from _depths(part, depth + 1)


def _time_backward(watch: Stopwatch, given: Any, output: Any) -> None:
    """Time the backward of a forward, from the gradient of its output to the gradient of its input."""
    made, inputs = (
        [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor) and one.requires_grad]
        for values in (output, given)
    )
    if made and inputs:
        begins: list[Any] = []
        made[0].register_hook(lambda _: begins.append(watch.point()))
        inputs[0].register_hook(lambda _: watch.add(begins.pop()) if begins else None)


def measure_link(device: torch.device, far: Tensor) -> Link:
    """Copy bytes to the host and back, with nothing else on the link; the host waits.

    Args:
        device: the device.
        far: pinned host memory, uint8.
    """
    near, watch = torch.empty_like(far, device=device), Stopwatch(device)
    for target, values in ((far, near), (near, far)):
        target.copy_(values, non_blocking=True)  # once, so that both are mapped
        with watch:
            target.copy_(values, non_blocking=True)
    to_host, from_host = (far.nbytes / max(seconds, 1e-9) for seconds in watch.read())
    return Link(to_host=to_host, from_host=from_host)


def budget_of(given: float | None, device: torch.device) -> int:
    """Return the bytes of `Config.memory_budget` on a device.

    Raises:
        ValueError: a share of the memory of the CPU, which others use, too.
    """
    if given is not None and given > 1:
        return int(given)
    if device.type == "cpu":
        raise ValueError("memory_budget: expected bytes on the CPU, such as '8GB', got a share")
    _, total = torch.accelerator.get_memory_info(device)
    return int((SHARE if given is None else given) * total)


def _bytes_of(values: Any) -> dict[int, int]:
    """The bytes of the tensors among some values, by storage; of a larger storage those that they show."""
    found = Counter[int]()
    for tensor in pytree.tree_leaves(values):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = min(storage.nbytes(), found[storage._cdata] + tensor.nbytes)
    return found
