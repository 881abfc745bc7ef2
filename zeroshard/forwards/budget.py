"""What units keep for their backward, chosen in training so that a step stays within a budget of memory.

    steps 1 and 2     all units recompute, but one of each kind keeps all, whose bytes are measured
    before step 3     the plan of `keeping.py`, with what the peak of the device leaves to activations and
                      medians of seconds, without those of step 1, which loads and compiles
    before 4 to 6     the plan again, with the peak of the step before, and more seconds
    a larger batch    begins anew

A unit keeps all, recomputes, sends what it would keep to the host and back, or recomputes and sends its input
there. A rank chooses for itself: the choice changes neither bits nor exchanges, since a unit is gathered for
its backward in any case. Tensor ranks choose alike, as recomputed layers exchange again. A Sequential whose
parameters are not gathered may recompute runs of units, and runs in runs, by Rotor's plan: nested checkpoints
carry it out. In a pipeline each micro-batch in flight gets its part of the bytes.

Units of the same class with parameters of the same sizes are one kind, and take the same. What a step takes
besides its units is the root's. Compiled units keep or recompute: the backward of compiled code may write to
memory of saved tensors, so it stays on the device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from zeroshard.comm.streams import Stopwatch
from zeroshard.forwards import activations
from zeroshard.forwards.activations import SavedActivations, kept_near, offloading, storage_of, storages_of
from zeroshard.forwards.keeping import (
    KEEP,
    NO_LINK,
    OFFLOAD,
    OFFLOAD_INPUT,
    RECOMPUTE,
    KeepingPlan,
    Link,
    Tree,
    UnitProfile,
    choose_keeping,
    plan_chain,
    simulate,
)
from zeroshard.forwards.wrapped import checkpointed, outermost
from zeroshard.internals.autograd import at_end_of_backward, is_in_backward
from zeroshard.internals.nested import find_tensors
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.unit import Unit
from zeroshard.tables import format_bytes

PROBED, PLANNED = 2, 5
"""The steps that measure, and the step from which on the plan stays as it is."""
SHARE = 0.9
"""The share of the device that is used if nobody says another one; the allocator needs some for itself."""
_TIMED = (KEEP, RECOMPUTE)  # measured; seconds of other choices follow from these and the link
_GAIN = 1e-3  # the share of the time that a plan of a chain must save: less is noise
_LINK_BYTES = 1 << 26  # copied each way to measure the link


class Budget:
    """Lets each unit keep what its backward needs, compute it again, or send it to the host and back.

    Args:
        units: the root unit first; it keeps all.
        changes: the changes of their modules.
        context: the objects that their buffers share.
        budget: `Config.memory_budget`.
        loop: the modules that the root calls one after the other, and nothing else; () if it does more.
        in_flight: the micro-batches of a pipeline whose activations are there at a time, by the chunks of a
            rank together; 1 without a pipeline.
        has_link: True if activations may be sent to the host.

    Raises:
        ValueError: there are no blocks, or a block has a unit inside.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        changes: Changes,
        context: Context,
        budget: int | float | None,
        loop: Sequence[nn.Module],
        in_flight: float,
        *,
        has_link: bool,
    ) -> None:
        self._tp, self._state, self._device = context.axes.tp, context.state, context.device
        self._num_bytes, self._in_flight = budget_of(budget, self._device), in_flight
        self._left_out = storages_of(units)
        self._moving, self._link = SavedActivations(units, context), NO_LINK
        """Moves activations to the host, where there is a link."""
        if has_link:
            self._link = measure_link(self._device, context.memory.host(_LINK_BYTES))
        self.take_peak: Callable[[], int] = int
        """Returns the largest number of bytes on the device since its last call; on the CPU without the
        activations of units. Set by the engine."""
        self._root, with_hooks = units[0].module, {unit.module for unit in units[1:] if unit.buffers}
        self._modules = modules = list(outermost(self._root, with_hooks))
        inside = {part for module in modules for part in module.modules()} - {*modules}
        if inside & with_hooks or not (modules or context.axes.pp.size > 1):  # a pipeline rank may have none
            raise ValueError(
                "recompute='auto': expected repeated blocks as units, with no unit inside of one; name the "
                "class of the blocks in units=, or set recompute to 'unit' or 'none'"
            )
        alike = [(type(one), *((p.shape, p.requires_grad) for p in one.parameters())) for one in modules]
        self._kinds = [alike.index(key) for key in alike]
        """Of each unit the first one that takes the same: of its class, with parameters of its sizes."""
        self._watches = defaultdict[tuple[int, str, str], Stopwatch](partial(Stopwatch, self._device))
        """Of the forwards F and the backwards B of a kind of units that keep all, or recompute."""
        for number, module in enumerate(modules):
            changes.around(module, RECOMPUTE, partial(self._chosen, number, module))
        self._shown = [changes.stacks[module] for module in modules]
        """What lies around each unit, as `engine.units` shows it; the choice that holds now comes last."""
        self._is_chain = bool(modules) and list(loop) == modules and all(unit.is_resident for unit in units)
        """True if the units are the stages of a chain, which may be computed again in runs, and runs in runs:
        a Sequential whose parameters are not gathered, as a run would gather all of its units together."""
        changes.around(self._root, "budget", self._rooted)
        self._largest = -1
        """The most bytes of the tensors that the root was given."""
        self._given = set[int]()
        """The storages that units of this forward were given."""
        self._begun: Any = None
        """The begin of a forward whose backward has not begun."""
        self._restart()

    @property
    def names(self) -> list[str]:
        """The choices of the units that hold now."""
        return [stack[-1] for stack in self._shown]

    def _name(self, names: Iterable[str]) -> None:
        for stack, name in zip(self._shown, names, strict=True):
            stack[-1] = name

    def _restart(self) -> None:
        """Measure from here on: at the begin, and when the root is given more than ever."""
        self._steps, self._seen = 0, self._state.num_changes
        self.plan: KeepingPlan | None = None
        """The last plan; None while units are measured."""
        self.tree: Tree | None = None
        """The plan of the chain, if that is what is run."""
        self._room = self._of_root = 0
        """The bytes that the last plan had for activations; and, on the CPU, where nobody counts a peak, the
        most bytes that the root and the loss need."""
        self._profiles = defaultdict[int, list[UnitProfile]](list)
        """Of each kind: the bytes of forwards that keep all, without those that several units were given."""
        self._watch, self._rests = Stopwatch(self._device), list[float]()
        """Of forwards and backwards, from the begin of the one to the end of the other; and the seconds of
        them that belong to no unit."""
        self.seconds: dict[nn.Module, float] = {}
        """The predicted seconds of forward and backward of each unit, and of the root by itself; empty while
        units are measured."""
        self.take_peak()
        # The last one of a kind keeps all: inputs of the first ones may need no gradient.
        kinds = enumerate(self._kinds, start=1)
        self._name(RECOMPUTE if kind in self._kinds[after:] else KEEP for after, kind in kinds)

    def _chosen(self, number: int, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        offload, again = partial(offloading, self._moving, module), checkpointed(module, forward)
        ways = {KEEP: forward, RECOMPUTE: again, OFFLOAD: offload(forward), OFFLOAD_INPUT: offload(again)}

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if self.tree is not None or not torch.is_grad_enabled() or is_in_backward():
                return forward(*args, **kwargs)  # a run of a chain is computed again as it was computed
            name, kind = self._shown[number][-1], self._kinds[number]
            if name in _TIMED:
                self._moving.begin_segment()  # the copies of the unit before begin
            if self._steps == PLANNED or name not in _TIMED:
                return ways[name](*args, **kwargs)
            given = _bytes_of((args, kwargs))
            saved = {key: 0 if key in self._given else num for key, num in given.items()}
            self._given |= given.keys()
            is_probed = self.plan is None and name == KEEP
            with self._noting(saved) if is_probed else nullcontext(), self._watches[kind, name, "F"]:
                output = ways[name](*args, **kwargs)
            self._time_backward(self._watches[kind, name, "B"], (args, kwargs), output)
            if is_probed:
                self._profiles[kind].append(_profile(saved, given, output))
            return output

        return chosen

    def _rooted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def rooted(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or is_in_backward():
                return forward(*args, **kwargs)
            self._begin(sum(_bytes_of((args, kwargs)).values()))
            if self.tree is not None:
                return self._run(self.tree, *args)  # as Sequential is called
            if self.plan is not None or self._device.type != "cpu":
                return forward(*args, **kwargs)
            saved = dict[int, int]()
            with self._noting(saved):
                output = forward(*args, **kwargs)
            own = [num for key, num in saved.items() if key not in self._given]
            made, largest = sum(_bytes_of(output).values()), max(own, default=0)
            # A loss, inside or outside, saves as much as the logits, and its backward makes that twice.
            needs = sum(own) - largest + 3 * max(made, largest)
            self._of_root = max(self._of_root, needs)
            return output

        return rooted

    def _run(self, tree: Tree, x: Any) -> Any:
        for part in tree:
            if isinstance(part, int):
                x = self._modules[part](x)
            else:
                inside = nn.ModuleList(self._modules[number] for number, _ in _depths(part))
                x = checkpointed(inside, partial(self._run, part))(x)
        return x

    def _noting(self, storages: dict[int, int]) -> AbstractContextManager[None]:
        """Note the storages of tensors that autograd saves, but for those of parameters."""

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            if (storage := storage_of(tensor, self._device, self._left_out)) is not None:
                storages.setdefault(storage._cdata, storage.nbytes())
            return kept_near(tensor)

        return saved_tensors_hooks(pack, lambda saved: saved())

    def _time_backward(self, watch: Stopwatch, given: Any, output: Any) -> None:
        """Time the backward of a forward, from the gradient of its output to the gradient of its input."""
        made, inputs, begins = find_tensors(output)[0], find_tensors(given)[0], list[Any]()

        def begin(_: Tensor) -> None:
            begins.append(watch.point())
            if self._begun is not None:
                at_end_of_backward(partial(self._watch.add, self._begun))
                self._begun = None

        register_multi_grad_hook(made, begin, mode="any")
        register_multi_grad_hook(inputs, lambda _: watch.add(begins.pop()) if begins else None, mode="any")

    def _begin(self, size: int) -> None:
        """Begin a forward of the root, which was given so many bytes."""
        if size > self._largest:
            self._largest = size
            self._restart()
        self._given.clear()
        if self._steps == PLANNED:
            return
        if self._seen != self._state.num_changes:
            self._seen = self._state.num_changes
            self._steps += 1
            totals, self._watch = self._watch.read(), Stopwatch(self._device)
            if self._steps >= PROBED:
                self._plan(totals)
            else:  # it compiles, loads kernels and maps memory
                self._watches.clear()
        if self._in_flight == 1:  # else other forwards come before the backward
            self._begun = self._watch.point()

    def _measured(self, kind: int) -> UnitProfile:
        """Return the bytes of a kind of units along with the medians of seconds."""
        keep, again = ([self._watches[kind, name, part].read() for part in "FB"] for name in _TIMED)
        forward = median(keep[0] or again[0] or [0.0])
        backward = median(keep[1] or [2 * forward])  # its input needs no gradient
        # Both forwards of a unit that recomputes cost more than one; not less than half, whatever the noise.
        more = sum(map(median, again)) - forward - backward if all(again) else forward
        unknown = UnitProfile(kept=None)
        most = max(self._profiles[kind], key=lambda one: one.kept or 0, default=unknown)
        return replace(most, forward=forward, backward=backward, again=max(more, forward / 2))

    def _plan(self, totals: Iterable[float]) -> None:
        """Choose anew, after a step whose forwards and backwards took so many seconds each."""
        found = list(map(self._measured, self._kinds)), self._link, self.take_peak() + self._of_root
        measured, link, others = self._tp.all_gather_object(found, "costs of units for a memory budget")[0]
        units = [one.options(link) for one in measured]
        both = zip(units, self.names, strict=True)
        taken = [next((one for one in unit if one.name == name), unit[0]) for unit, name in both]
        now = simulate(taken, self._num_bytes, link)
        if self.tree is None:
            self._rests += [total - now.seconds for total in totals]
        if self._device.type != "cpu":
            others -= round(self._in_flight * (now.peak if self.tree is None else self._room))
        self._room = room = int((self._num_bytes - others) / self._in_flight)
        self.plan, self.tree = choose_keeping(units, room, link), None
        self._name(option.name for option in self.plan.options)
        times = self.plan.times
        chain = [replace(one, forward=one.again) for one in measured]
        if self._is_chain and (tree := plan_chain(chain, self._largest, room)):
            depths = dict(_depths(tree))
            nested = [one.forward + depths[n] * one.again + one.backward for n, one in enumerate(measured)]
            # Rotor's plan, where a choice for each unit is slower or does not fit.
            if self.plan.peak > room or sum(nested) < self.plan.seconds * (1 - _GAIN):
                self.tree, times = tree, nested
                self._name(RECOMPUTE if depths[number] else KEEP for number in range(len(measured)))
        if self.tree is None and self.plan.peak > room and self._steps == PROBED:
            warn_user(
                f"memory_budget: {format_bytes(self._num_bytes)} are not enough for this batch: all else "
                f"takes {format_bytes(others)}. Take fewer samples, or offload.optimizer='cpu'"
            )
        self.seconds = dict(zip(self._modules, times, strict=True))
        self.seconds[self._root] = max(0.0, median(self._rests or [0.0]))


def _depths(tree: Tree, depth: int = 0) -> Iterator[tuple[int, int]]:
    """Yield each stage of a tree, and how often it is computed again."""
    for part in tree:
        if isinstance(part, int):
            yield part, depth
        else:
            yield from _depths(part, depth + 1)


def _profile(saved: dict[int, int], given: Mapping[int, int], output: Any) -> UnitProfile:
    """The bytes of a forward, from those of storages that it has saved, its inputs among them."""
    made = _bytes_of(output)
    return UnitProfile(
        output=sum(made.values()),
        saved=sum(num for key, num in (saved | made).items() if key not in given),
        kept=sum(saved.values()),
        inputs=sum(saved[key] for key in given),
        moved=sum(num for num in saved.values() if num >= activations.LEAST_BYTES),
    )


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
    share = SHARE if given is None else given
    if share <= 1 and device.type == "cpu":
        raise ValueError("memory_budget: expected bytes on the CPU, such as '8GB', got a share")
    return int(share if share > 1 else share * torch.accelerator.get_memory_info(device)[1])


def _bytes_of(values: Any) -> dict[int, int]:
    """The bytes of the tensors among some values, by storage; of a larger storage those that they show."""
    found = Counter[int]()
    for tensor in find_tensors(values)[0]:
        storage = tensor.untyped_storage()
        found[storage._cdata] = min(storage.nbytes(), found[storage._cdata] + tensor.nbytes)
    return found
