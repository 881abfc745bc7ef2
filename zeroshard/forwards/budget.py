"""What units keep for their backward, chosen in training so that a step stays within a budget of memory.

    steps 1 and 2     all units recompute, but one of each kind keeps all, and is measured: seconds, bytes
    before step 3     the plan of `keeping.py`, with what the peak of the device leaves to activations
    before 4 and 5    the plan again, with the peak of the step before
    a larger batch    begins anew

A unit keeps all, recomputes, sends what it would keep to the host and back, or recomputes and sends its input
there. A rank chooses for itself: the choice changes neither bits nor exchanges, since a unit is gathered for
its backward in any case. A Sequential whose parameters are not gathered may recompute runs of units, and runs
in runs, by Rotor's plan: nested checkpoints carry it out. The measured unit of a kind stands for all with the
same class and parameters.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.comm import streams
from zeroshard.comm.streams import Stopwatch
from zeroshard.forwards import activations
from zeroshard.forwards.activations import HostCopies, SavedActivations, checked, offloading
from zeroshard.forwards.keeping import (
    KeepingPlan,
    Link,
    Option,
    StageCosts,
    Tree,
    UnitCosts,
    choose_keeping,
    plan_chain,
    simulate,
    tree_of,
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
_KEEP, _RECOMPUTE, _OFFLOAD, _OFFLOAD_INPUT = "keep", "recompute", "offload", "offload input"
_NO_LINK = Link(to_host=1.0, from_host=1.0)
_LINK_BYTES = 1 << 26
"""Bytes that are copied each way to measure the link."""


@dataclass(slots=True)
class _Measured:
    """Units of one class with parameters of the same sizes; the last of them is measured."""

    watch: Stopwatch
    saved: int = 0
    """The most bytes that its forward has saved, inputs included."""
    inputs: int = 0
    """The most bytes of the tensors among its inputs."""
    seconds: list[float] = field(default_factory=list)
    """Those of its forwards."""
    moved: int = 0
    """The part of `saved` that may go to the host."""
    output: int = 0
    """The most bytes of its output."""
    apart: int = 0
    """The most bytes that it has saved besides its inputs and its output."""
    storages: dict[int, int] = field(default_factory=dict)
    """The bytes of what the last forward has saved, by storage."""
    given: set[int] = field(default_factory=set)
    """The storages of its inputs."""
    made: dict[int, int] = field(default_factory=dict)
    """The bytes of its output, by storage."""

    def add_up(self, shared: Collection[int]) -> None:
        """Add up the bytes of the last forward without those that several units have been given."""
        own = {key: num for key, num in self.storages.items() if key not in shared}
        self.saved = max(self.saved, sum(own.values()))
        self.inputs = max(self.inputs, sum(num for key, num in own.items() if key in self.given))
        self.moved = max(self.moved, sum(num for num in own.values() if num >= activations.LEAST_BYTES))
        self.output = max(self.output, sum(self.made.values()))
        others = own.keys() - self.given - self.made.keys()
        self.apart = max(self.apart, sum(own[key] for key in others))

    def reset(self) -> None:
        """Forget what was measured."""
        self.saved = self.inputs = self.moved = self.output = self.apart = 0
        self.seconds.clear()
        self.watch.read()

    def costs(self, link: Link | None) -> UnitCosts:
        """What the plan needs to know; the backward takes twice as long as the forward.

        Args:
            link: the link to the host, if activations may go there. Compute waits for the copies of a unit
                beside the next one, so what a forward or backward leaves of their time is lost.
        """
        forward, saved, inputs = min(self.seconds, default=0.0), self.saved, self.inputs
        options = [
            Option(name=_KEEP, held=saved, working=saved),
            Option(name=_RECOMPUTE, held=inputs, working=saved, backward=forward),
        ]
        if not self.seconds:  # it has not run: nothing is known of what it would keep
            return UnitCosts(forward=0.0, backward=0.0, options=tuple(options[1:]))
        if link is not None:
            for name, moved, again in ((_OFFLOAD, self.moved, 0.0), (_OFFLOAD_INPUT, inputs, forward)):
                options.append(
                    Option(
                        name=name,
                        held=0 if again else saved - moved,
                        moved=moved,
                        working=saved,
                        forward=max(0.0, moved / link.to_host - forward),
                        backward=again + max(0.0, moved / link.from_host - 2 * forward),
                    )
                )
        return UnitCosts(forward=forward, backward=2 * forward, options=tuple(options))

    @property
    def stage(self) -> StageCosts:
        """What the plan of a chain needs to know."""
        forward, saved = min(self.seconds, default=0.0), self.apart + self.output
        return StageCosts(forward=forward, backward=2 * forward, output=self.output, saved=saved)


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
            copies = HostCopies(context.memory, context.streams)
            self._moving = SavedActivations(copies, activations.LEAST_BYTES, warns=False)
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
        self._distinct = {key: _Measured(Stopwatch(self._device)) for key in alike}
        self._kinds = [self._distinct[key] for key in alike]
        """Of each unit."""
        for number, module in enumerate(modules):
            own = [units[0], by_module[module]]
            changes.around(module, _RECOMPUTE, functools.partial(self._chosen, number, module, own))
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
        if self._is_chain:
            changes.around(root, "chain", self._chained)
        self._largest = [-1] * len(modules)
        """The most bytes of the tensors that each unit was given."""
        self._seen = -1
        self._uses, self._called = Counter[int](), set[int]()
        """How many units of a forward have been given each storage; and the units that were called."""
        self._is_new = True
        """True from the begin of a forward to that of its first unit."""
        changes.hook(root.register_forward_pre_hook(self._open))
        self._restart()

    def _restart(self) -> None:
        """Measure from here on: at the begin, and when a unit is given more than ever."""
        self._steps = 0
        self.plan: KeepingPlan | None = None
        """The last plan; None while units are measured."""
        self.tree = None
        self._uses.clear()
        self.take_peak()
        self._name(_KEEP if number in self._measured else _RECOMPUTE for number in range(len(self._kinds)))
        for kind in self._distinct.values():
            kind.reset()

    def _open(self, *_: object) -> None:
        self._is_new = True

    def _chosen(
        self, number: int, module: nn.Module, units: Sequence[Unit], forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        ways = {_KEEP: forward, _RECOMPUTE: checkpointed(module, forward)}
        if self._moving is not None:
            offload = functools.partial(offloading, self._moving, units)
            ways |= {_OFFLOAD: offload(forward), _OFFLOAD_INPUT: offload(ways[_RECOMPUTE])}
        flats = [buffer.full for unit in units for buffer in unit.buffers]

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if self.tree is not None or not torch.is_grad_enabled() or is_in_backward():
                return forward(*args, **kwargs)  # a run of a chain is computed again as it was computed
            given = _bytes_of((args, kwargs))
            self._enter(number, given)
            name = self.names[number]
            if self._moving is not None and name in (_KEEP, _RECOMPUTE):
                self._moving.begin_segment()  # the copies of the unit before begin
            if self.plan is not None:
                return ways[name](*args, **kwargs)
            self._uses.update(given.keys())
            if name == _RECOMPUTE:
                return ways[name](*args, **kwargs)
            kind = self._kinds[number]
            if number not in self._called:  # a unit that is called again keeps that of its calls so far
                kind.storages, kind.given = {}, set()
                self._called.add(number)
            kind.storages |= given
            kind.given |= given.keys()
            with self._noting(kind.storages, flats), kind.watch:
                output = forward(*args, **kwargs)
            kind.made = _bytes_of(output)
            return output

        return chosen

    def _enter(self, number: int, given: Mapping[int, int]) -> None:
        """Begin a unit that is given storages with so many bytes."""
        if self._is_new:
            self._is_new = False
            self._begin()
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
                inside = nn.ModuleList(self._modules[number] for number in _stages(part))
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

    def _begin(self) -> None:
        """Begin a forward."""
        has_stepped, self._seen = self._seen not in (-1, self._state.num_changes), self._state.num_changes
        if self.plan is None:
            shared = {key for key, num in self._uses.items() if num > 1}
            for kind in self._distinct.values():
                kind.add_up(shared)
        self._uses.clear()
        self._called.clear()
        if has_stepped and self._steps < PLANNED:
            self._steps += 1
            for kind in self._distinct.values():
                kind.seconds += kind.watch.read()
            if self._steps >= PROBED:
                self._plan()

    def _plan(self) -> None:
        if self._moving is not None and self._steps == PROBED:
            self._link = measure_link(self._context)
        costs = [kind.costs(self._link) for kind in self._kinds]
        link = self._link or _NO_LINK
        taken = [
            next((option for option in unit.options if option.name == name), unit.options[0])
            for unit, name in zip(costs, self.names, strict=True)
        ]
        before = simulate(costs, taken, self.num_bytes, link).peak
        beside = self.take_peak() - (before if self._device.type != "cpu" else 0)
        room = self.num_bytes - beside
        try:
            self.plan = choose_keeping(costs, room, link)
        except ValueError:
            least = [min(unit.options, key=lambda option: option.held + option.moved) for unit in costs]
            self.plan = simulate(costs, least, room, link)
        self._name(option.name for option in self.plan.options)
        if self._is_chain and all(kind.seconds for kind in self._kinds):
            self._plan_chain(self.plan, room)
        if self.plan.peak > room and self.tree is None and self._steps == PROBED:
            budget, others, own = map(format_bytes, (self.num_bytes, beside, self.plan.peak))
            warn_user(
                f"memory_budget: {budget} are not enough for this batch: all else takes {others}, and "
                f"activations {own} even where each unit recomputes. Take fewer samples, or "
                "offload.optimizer='cpu'"
            )

    def _plan_chain(self, flat: KeepingPlan, room: int) -> None:
        """Take Rotor's plan if a choice for each unit is slower or does not fit."""
        self.tree = None
        try:
            found = plan_chain([kind.stage for kind in self._kinds], self._largest[0], room)
        except ValueError:
            return
        if found.seconds < flat.seconds or flat.peak > room:
            self.tree = tree_of(found.tasks)
            self._name([_KEEP] * len(self._kinds))
            for part in self.tree:
                for number in () if isinstance(part, int) else _stages(part):
                    self._shown[number][-1] = _RECOMPUTE

    def _name(self, names: Iterable[str]) -> None:
        self.names = list(names)
        """The choices of the units that hold now."""
        for stack, name in zip(self._shown, self.names, strict=True):
            stack[-1] = name


def _stages(tree: Tree) -> Iterator[int]:
    """Yield the stages of a tree."""
    for part in tree:
        yield from (part,) if isinstance(part, int) else _stages(part)


def measure_link(context: Context) -> Link:
    """Copy bytes to the host and back; the host waits.

    Returns:
        The bytes per second in each direction, with nothing else on the link.
    """
    near = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=context.device)
    far, watch = context.memory.host(_LINK_BYTES), Stopwatch(context.device)
    for target, values in ((far, near), (near, far)):
        target.copy_(values, non_blocking=True)  # once, so that both are mapped
        with watch:
            target.copy_(values, non_blocking=True)
    to_host, from_host = (_LINK_BYTES / max(seconds, 1e-9) for seconds in watch.read())
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
