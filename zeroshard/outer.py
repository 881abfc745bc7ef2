"""Local steps: replicas of a model train by themselves, and now and then an outer step brings them together.

    main parameters    slices of this rank   steps of this replica alone
    anchors            slices of this rank   float32 or wider, the same in all replicas: the last outer step
    momentum           as anchors            of the outer steps

A replica is a shard group. Its gradients, norms and agreements end at its ranks, so a slow replica delays the
others at an outer step only. Outer steps are element-wise on slices: ranks with the same shard exchange them.

    after a step        values = anchor - main, or main where the outer step is a plain mean
    all-reduce          over `Axes.outer`, during the next `delay` steps
    then                anchor = anchor - lr * nesterov(mean of values); main = anchor

Presets: `post_local_sgd` (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"),
`periodic_averaging` (Stich 2019, "Local SGD Converges Fast and Communicates Little") and `diloco` (Douillard
et al. 2023; its fragments and delay are those of Streaming DiLoCo, Douillard et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from zeroshard.comm.collectives import Axis, Handle, on_all
from zeroshard.comm.streams import mark_here
from zeroshard.config.sections import Config
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.stores.store import Store

T = TypeVar("T")

_UNEVEN = "a replica that left out a step would be a step behind the others"


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """Local steps of each replica, and the step that brings replicas together; an argument of `initialize`.

    `Config.shard_group_size` ranks are a replica; without it each rank is one. Checkpoints have a part for
    each replica, in `replica-0`, `replica-1` and so on, each of them a checkpoint by itself.

    Raises:
        ValueError: a value is not in its range.
    """

    every: int
    """Local steps between two outer steps of a parameter."""
    warmup: int = 0
    """First steps, after each of which replicas are averaged."""
    lr: float = 1.0
    """Learning rate of the outer step."""
    momentum: float = 0.0
    """Nesterov momentum of the outer step, 0 to below 1; with lr=1 and none, replicas are averaged."""
    fragments: int = 1
    """Parts of the model, of every so many-th unit each, with outer steps in turn."""
    delay: int = 0
    """Local steps during which values of a fragment travel, fewer than every / fragments."""
    keep_local: float = 0.0
    """Share of a replica's own values that an outer step keeps, 0 to below 1."""
    offload: bool = False
    """True lets anchors and momentum rest on the host. Else they lie with the states of the optimizer."""

    def __post_init__(self) -> None:
        period = self.every // max(self.fragments, 1)
        checks: Mapping[str, tuple[bool, str]] = {
            "every": (_is_count(self.every, 1), "an integer >= 1"),
            "warmup": (_is_count(self.warmup, 0), "an integer >= 0"),
            "lr": (self.lr > 0, "a number above 0"),
            "momentum": (0 <= self.momentum < 1, "a number from 0 to below 1"),
            "fragments": (period * self.fragments == self.every, f"a divisor of every={self.every}"),
            "delay": (self.delay in range(period), f"an integer from 0 to below {period}"),
            "keep_local": (0 <= self.keep_local < 1, "a number from 0 to below 1"),
        }
        for name, (is_met, expected) in checks.items():
            if not is_met:
                raise ValueError(f"OuterStep: {name}: expected {expected}, got {getattr(self, name)!r}")

    @classmethod
    def periodic_averaging(cls, every: int) -> OuterStep:
        """Average the parameters of replicas once in `every` steps (local SGD)."""
        return cls(every=every)

    @classmethod
    def post_local_sgd(cls, every: int, warmup: int) -> OuterStep:
        """Average the parameters of replicas after each of `warmup` steps, then once in `every` steps."""
        return cls(every=every, warmup=warmup)

    @classmethod
    def diloco(cls, every: int = 500, lr: float = 0.7, momentum: float = 0.9, **others: Any) -> OuterStep:
        """Step with Nesterov momentum along the mean change of replicas, with DiLoCo's numbers."""
        return cls(every=every, lr=lr, momentum=momentum, **others)

    @property
    def is_mean(self) -> bool:
        """True if an outer step is the mean of the replicas, which needs no anchor."""
        return self.lr == 1.0 and self.momentum == 0.0

    def fragment_begun(self, step: int) -> int | None:
        """The fragment whose values are sent after a step, if any; steps count from 1."""
        number, rest = divmod(step - self.warmup, self.every // self.fragments)
        return (number - 1) % self.fragments if number > 0 and rest == 0 else None

    def check(self, config: Config, optimizer: object) -> None:
        """Refuse settings that outer steps do not go with.

        Raises:
            ValueError: naming the setting.
        """
        if optimizer is None:
            raise ValueError("outer_step: expected an optimizer, which takes the local steps, got None")
        if config.mesh.pp * config.mesh.tp > 1:
            raise ValueError("outer_step: expected mesh.pp=1 and mesh.tp=1: a replica is a shard group")
        if config.nonfinite == "skip":
            raise ValueError(f"outer_step: expected nonfinite='report' or 'error': {_UNEVEN}")


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


class Kept(Protocol):
    """Values of trained parameters that follow an engine's steps and are in checkpoints: also an `EMA`."""

    num_updates: int
    buffers: dict[str, Tensor]

    @property
    def parameters(self) -> Mapping[ShardedParameter, Tensor]:
        """The values of this rank's slices, [n] each."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All memory of the values."""

    def begin_anew(self) -> None:
        """Take the present values of the model for a start."""

    def update(self) -> None:
        """Follow a step."""


class _Slices:
    """Values beside the main parameters, for checkpoints; `OuterSteps` owns and changes them."""

    num_updates = 0

    def __init__(self, values: Callable[[], Mapping[FlatBuffer, Tensor]], begin: Callable[[], None]) -> None:
        self._values, self.begin_anew = values, begin
        self.buffers: dict[str, Tensor] = {}

    @property
    def parameters(self) -> dict[ShardedParameter, Tensor]:
        return {
            sharded: values[buffer.sharded_span(index).slice]
            for buffer, values in self._values().items()
            for index, sharded in enumerate(buffer.sharded)
        }

    @property
    def tensors(self) -> Iterator[Tensor]:
        return iter(self._values().values())

    def update(self) -> None:
        """Stay: outer steps change the values."""


class OuterSteps:
    """The outer steps of one engine. In checkpoints it is the number of local steps; others have its values.

    Args:
        policy: when and how to step.
        runtime: of the model, whose axis `outer` joins the replicas.

    Raises:
        ValueError: the model computes in float16.
    """

    def __init__(self, policy: OuterStep, runtime: Runtime) -> None:
        if runtime.reducer.is_half:
            raise ValueError(f"outer_step: expected no parameters of float16, but bfloat16: {_UNEVEN}")
        self._policy, self._runtime, self._axis = policy, runtime, runtime.context.axes.outer
        self.parameters: Mapping[ShardedParameter, Tensor] = {}
        self.tensors: Iterator[Tensor] = iter(())
        self.buffers: dict[str, Tensor] = {}
        self._num_steps, self._num_edits = 0, runtime.state.num_edits
        trained = [unit for unit in runtime.units if unit.gradients]
        self._fragments = [
            [gradients.buffer for unit in trained[at :: policy.fragments] for gradients in unit.gradients]
            for at in range(policy.fragments)
        ]
        self._all = [buffer for fragment in self._fragments for buffer in fragment]
        self._anchors = {} if policy.is_mean else self._stores()
        self._momenta = self._stores() if policy.momentum else {}
        self._sent: dict[FlatBuffer, Tensor] = {}
        """The values of a fragment under way: this rank's, and after the exchange their means."""
        self._handles: list[Handle] = []
        self._reset_anchors()
        self._reset_momenta()

    @property
    def kept(self) -> dict[str, Kept]:
        """All that a checkpoint holds, by names of this schedule: what is under way is of no other one."""
        policy, parts = self._policy, dict[str, Kept]({"": self})
        key = f"outer_{policy.every}_{policy.warmup}_{policy.fragments}_{policy.delay}"
        if self._anchors:
            parts["_anchor"] = _Slices(lambda: self._at_rest(self._anchors), self._reset_anchors)
        if self._momenta:
            parts["_momentum"] = _Slices(lambda: self._at_rest(self._momenta), self._reset_momenta)
        if policy.delay:
            parts["_sent"] = _Slices(self._arrived, self._expect_all)
            names = [sorted(p.fqn for buffer in one for p in buffer.sharded) for one in self._fragments]
            key += f"_{crc32(repr(names).encode())}"  # values are under way for these parameters alone
        return {key + name: part for name, part in parts.items()}

    @property
    def num_updates(self) -> int:
        """Steps so far; a checkpoint brings its own number, after all values."""
        return self._num_steps

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._num_steps = number
        begun = (self._policy.fragment_begun(number - ago) for ago in range(self._policy.delay))
        under_way = next((fragment for fragment in begun if fragment is not None), None)
        wanted = [] if under_way is None else self._fragments[under_way]
        self._sent = {buffer: values for buffer, values in self._sent.items() if buffer in wanted}

    @torch.no_grad()
    def update(self) -> None:
        """Count a step of this replica, send values and take an outer step when it is time; collective.

        Raises:
            RuntimeError: the user has edited parameters, beside anchors or means that know nothing of it.
        """
        policy, self._num_steps = self._policy, self._num_steps + 1
        if not (self._anchors or self._sent):
            self._num_edits = self._runtime.state.num_edits
        if self._runtime.state.num_edits != self._num_edits:
            raise RuntimeError(
                "parameters were edited since initialize: an outer step would take the edit for a change by "
                "local steps, and scale it, or undo it. Edit the model before initialize, which may come "
                "again after engine.close(); or load a checkpoint to be rid of the edit"
            )
        if self._num_steps <= policy.warmup:
            self._send(self._all)
            self._take(self._all)
        if (begun := policy.fragment_begun(self._num_steps)) is not None:
            self._send(self._fragments[begun])
        if (ended := policy.fragment_begun(self._num_steps - policy.delay)) is not None:
            self._take(self._fragments[ended])

    @property
    def _is_mean(self) -> bool:
        return self._policy.is_mean or self._num_steps <= self._policy.warmup

    def _send(self, buffers: Iterable[FlatBuffer]) -> None:
        """Begin to add up the values of buffers over the replicas."""
        self._runtime.wait()
        for buffer in buffers:
            values = self._load(buffer.store)
            if not self._is_mean:
                values = self._load(self._anchors[buffer]).sub_(values)
            label = f"sum over the replicas of {buffer.described}"
            with self._runtime.context.streams.reduce.after_compute():
                self._handles.append(self._axis.all_reduce(values, label))
            self._sent[buffer] = values

    def _take(self, buffers: Iterable[FlatBuffer]) -> None:
        """Step buffers whose values were sent."""
        policy, sent = self._policy, self._arrived()
        self._runtime.wait()
        for buffer in buffers:
            values = sent.pop(buffer)
            if not self._is_mean:
                change = values
                if policy.momentum:
                    momentum = self._load(self._momenta[buffer]).mul_(policy.momentum).add_(change)
                    self._momenta[buffer].store(momentum)
                    change = change.add_(momentum, alpha=policy.momentum)
                values = self._load(self._anchors[buffer]).sub_(change, alpha=policy.lr)
            if self._anchors:
                self._anchors[buffer].store(values)
            if policy.keep_local:
                values = values.lerp(self._load(buffer.store), policy.keep_local)
            buffer.store.write(values)
        self._runtime.changed(buffers)
        self._runtime.passes.refresh()

    def _stores(self) -> dict[FlatBuffer, Store]:
        memory, stores = self._runtime.context.memory, {}
        far = self._runtime.context.setting.host if self._policy.offload else Tier.DEVICE
        for buffer in self._all:
            tier = far if buffer.plan.state_tier is Tier.DEVICE else buffer.plan.state_tier
            stores[buffer] = Store(memory.empty(buffer.main.numel(), _wide(buffer.main), tier), memory, tier)
        return stores

    def _load(self, store: Store) -> Tensor:
        """Return a copy of values on the device that computes, [n], in float32 or wider."""
        device = self._runtime.context.device
        store.load(values := torch.empty_like(store.values, dtype=_wide(store.values), device=device))
        return values

    def _at_rest(self, stores: Mapping[FlatBuffer, Store]) -> dict[FlatBuffer, Tensor]:
        mark_here(self._runtime.context.device).synchronize()
        return {buffer: store.values for buffer, store in stores.items()}

    def _arrived(self) -> dict[FlatBuffer, Tensor]:
        """The means under way, once they are there."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for values in self._sent.values() if handles else ():
            values.div_(self._axis.size)
        return self._sent

    def _expect_all(self) -> None:
        """Make memory for the means of a checkpoint; those that it has not go as its number comes."""
        self._arrived()
        self._sent = {buffer: self._load(buffer.store) for buffer in self._all}

    def _reset_anchors(self) -> None:
        for buffer, store in self._anchors.items():
            store.store(self._load(buffer.store))

    def _reset_momenta(self) -> None:
        for store in self._momenta.values():
            store.values.zero_()

    def begin_anew(self) -> None:
        """Count from the first step again."""
        self.num_updates, self._num_edits = 0, self._runtime.state.num_edits


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


# ------------------------------------------------------------------------------ checkpoints of replicas


def folder_of(folder: Path, outer: Axis) -> Path:
    """The folder for the checkpoints of this replica, in the folder that all replicas were given."""
    return folder if outer.size == 1 else folder / f"replica-{outer.rank}"


def find_folder(folder: Path, outer: Axis) -> Path:
    """The folder with the checkpoints of this replica; `folder` itself has one checkpoint for all.

    Raises:
        ValueError: there are checkpoints of another number of replicas.
    """
    saved = sorted(folder.glob("replica-*"))
    if not saved or (outer.size == 1 and (folder / "latest").exists()):
        return folder
    if len(saved) != outer.size:
        raise ValueError(
            f"'{folder}': expected checkpoints of {outer.size} replicas, found {len(saved)}: to begin anew "
            f"from the values of one of them, load '{saved[0]}'"
        )
    return folder_of(folder, outer)


def check_kept(folder: Path, saved: Container[str], present: Iterable[str]) -> None:
    """Refuse the checkpoint of one of several replicas that was saved with another outer step.

    Raises:
        ValueError: there is no anchor, number of steps, or exchange under way for the present one.
    """
    if any(name.startswith("outer_") and name not in saved for name in present):
        raise ValueError(
            f"'{folder}' was saved with another outer_step, or one with `delay` for other units or trained "
            "parameters: expected the same; to begin anew from the values of one replica, load "
            f"'{folder.parent}/replica-0' on all ranks"
        )


def on_replicas(outer: Axis, act: Callable[[], T]) -> T:
    """Save or load in each replica, which may be collective in it; an error of one is raised in all.

    Raises:
        ValueError, RuntimeError: as `on_all` does.
    """
    if outer.size == 1:
        return act()
    found: list[T] = []
    on_all(outer, "checkpoints of all replicas", lambda: found.append(act()))
    return found[0]
