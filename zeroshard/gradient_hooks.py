"""Communication hooks of DistributedDataParallel, which reduce gradients at stages 0 and 1.

A hook gets the gradients of this rank, a flat buffer at a time, once they are complete: at the boundary of
micro-batches. It returns a future of their means over all ranks.

    sums of this rank  --pack-->  flat  --copy-->  bucket  --hook-->  means  --copy-->  flat, as if reduced

The host waits for each hook on CPU ranks: hooks such as PowerSGD start further collectives in threads of
Gloo, and those of two buckets would come in other orders on other ranks. On accelerators the stream of
reductions waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import ALL_REDUCE
from zeroshard.comm.streams import Mark
from zeroshard.comm.watch.status import REDUCE
from zeroshard.config.checked import flat
from zeroshard.config.sections import Config
from zeroshard.internals import pytree
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.norms import UsesNorms
from zeroshard.stepping.wholes import UsesWholes

Hook = Callable[[Any, Any], torch.futures.Future[Any]]
"""(state, bucket) -> the future of the means, as `DistributedDataParallel.register_comm_hook` takes it."""


class GradientBucket:
    """The gradients of a buffer, with the methods of `torch.distributed.GradBucket`, which nobody can make.

    Args:
        flat: the gradients one after another, [n], in memory of their own.
        parameters: their parameters.
        index: the number of the bucket.
        is_last: True for the last bucket of a backward.
    """

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter], index: int, is_last: bool) -> None:
        self._flat, self._parameters, self._index, self._is_last = flat, parameters, index, is_last

    def buffer(self) -> Tensor:
        """Return all gradients one after another, [n]."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Take another tensor of the same size in the place of the buffer."""
        self._flat = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one in the shape of each parameter."""
        shapes = [p.shape for p in self._parameters]
        parts = self._flat.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in their shapes and compute dtype."""
        return list(self._parameters)

    def index(self) -> int:
        """Return the number of the bucket, the same in each step."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of a backward."""
        return self._is_last


class GradientHook:
    """A hook with its state, as an engine calls it.

    Args:
        state: the first argument of the hook: a dict, or an object with attributes. Checkpoints keep both.
        hook: the hook.
        axis: the data-parallel ranks: all ranks.
        needed: for a hook that leaves gradients as they are, called when a backward begins. While it returns
            False, gradients are reduced as without the hook.
    """

    def __init__(self, state: Any, hook: Hook, axis: Axis, needed: Callable[[], bool] | None = None) -> None:
        self.state, self._hook, self._axis, self._needed = state, hook, axis, needed
        self.name = f"gradient_hook={getattr(hook, '__name__', type(hook).__name__)}"
        self._kind = f"{self.name} of {type(state).__name__}"
        self.lets_go_apart = hasattr(state, "post_local_gradient_allreduce") or "=noop_hook" in self.name
        """True for hooks of torch with which ranks go on with different parameters."""
        self.is_local = needed is not None or self.lets_go_apart
        """True if ranks may get different gradients."""
        self._buckets: dict[int, list[str]] = {}
        """The names of the parameters in each bucket, by the tag of its buffer."""
        self._called: set[int] = set()
        """The buckets of this backward so far."""

    def __repr__(self) -> str:
        """Return what must be the same on all ranks: of states of torch, the numbers, too."""
        values = self.saved() if type(self.state).__module__.startswith("torch.") else {}
        plain = {key: value for key, value in values.items() if isinstance(value, int | float)}
        return f"{self._kind} {plain}"

    def over(self, buffers: Sequence[FlatBuffer]) -> None:
        """Number the buffers that the hook reduces from the last one on, on all ranks alike."""
        self._buckets = {buffer.tag: [one.fqn for one in buffer.originals] for buffer in buffers[::-1]}

    def keeps_mean_of(self, group_size: int | None) -> bool:
        """True if ranks that go apart have the mean of their shard group, so that slices are of one model."""
        size = group_size or self._axis.size
        first, subgroup = self._axis.rank // size * size, getattr(self.state, "subgroup", None)
        if not isinstance(subgroup, ProcessGroup) or not self.state.post_local_gradient_allreduce:
            return False
        return self._axis.over(subgroup).global_ranks == [*range(first, first + size)]

    def begin(self) -> bool:
        """Begin a backward; return True if the hook reduces its gradients."""
        self._called.clear()
        return self._needed is None or self._needed()

    def run(self, buffer: FlatBuffer, parts: list[Tensor]) -> Mark:
        """Turn the gradients of a buffer into their means over the ranks, in place.

        A gradient that comes after the reduction of its unit is a bucket of its own, with the same number.

        Args:
            buffer: the buffer.
            parts: the gradient of each of its parameters on this rank, [n].

        Raises:
            RuntimeError: another rank is lost or too late.
            TypeError: the hook returns no future of as many means.
        """
        index = [*self._buckets].index(buffer.tag)
        is_last = index not in self._called and len(self._called) + 1 == len(self._buckets)
        self._called.add(index)
        parts = parts[::-1]  # as DistributedDataParallel has them: in the order in which gradients come
        bucket = GradientBucket(torch.cat(parts), buffer.unsharded[::-1], index, is_last)
        label = f"{self.name} over {buffer.described}"
        self._axis.ledger.note(label, REDUCE)
        future = self._hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"{self.name}: expected a torch.futures.Future of the means, got {type(future).__name__}"
            )
        work: Any = SimpleNamespace(wait=lambda _: future.wait())  # with the arguments of a dist.Work
        self._axis.waits.wait_for([work], label, ALL_REDUCE)
        value = future.value()
        means = value[0] if isinstance(value, list | tuple) else value
        if not isinstance(means, Tensor) or means.numel() != sum(part.numel() for part in parts):
            size, got = bucket.buffer().shape, getattr(means, "shape", means)
            raise TypeError(f"{self.name}: expected a future of a tensor of {size}, got {got}")
        torch._foreach_copy_(parts, list(means.view(-1).split([part.numel() for part in parts])))
        return self._axis.waits.issue(label)

    def drop(self) -> None:
        """Note that the backward has failed, whose gradients the hook may have seen."""
        if self._called and self._needed is None and self.saved():
            warn_user(
                f"a backward has failed after {self.name} had begun: the state of the hook may hold parts of "
                "gradients that were dropped. Load the last checkpoint to be rid of them"
            )

    # -- the state ----------------------------------------------------------------------------------------

    def _values(self) -> dict[Any, Any]:
        """The values of a state that is a dict, or the attributes of one that is an object."""
        if isinstance(self.state, dict):
            return self.state
        slots = (name for kind in type(self.state).__mro__ for name in getattr(kind, "__slots__", ()))
        names = [*getattr(self.state, "__dict__", ()), *slots]
        own = (name for name in names if name != "__weakref__" and hasattr(self.state, name))
        return {name: getattr(self.state, name) for name in own}

    def saved(self) -> dict[Any, Any]:
        """Return the values of the state but process groups, for a checkpoint."""
        values = {key: value for key, value in self._values().items() if not isinstance(value, ProcessGroup)}
        return {
            key: v.get_state() if isinstance(v, np.random.RandomState) else v for key, v in values.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the state, such as errors."""
        return [leaf for leaf in pytree.tree_leaves(self.saved()) if isinstance(leaf, Tensor)]

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Return True if a record of `to_files` is of the same hook, kind of state, groups and buckets."""
        key, values = "post_local_gradient_allreduce", record["values"]
        is_alike = record.get("of", self._kind) == self._kind and record["buckets"] == [
            *self._buckets.values()
        ]
        groups = self._values().keys() - self.saved().keys()  # they stay: the state was saved with None there
        return bool(
            is_alike and values.get(key) == getattr(self.state, key, None) and not groups & values.keys()
        )

    def to_files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a checkpoint keeps of this rank: a record without tensors, and the tensors by name."""
        leaves, form = pytree.tree_flatten(self.saved())
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = {f"gradient_hook/{self._axis.rank}/{at}": leaves[at] for at in places}
        plain = pytree.tree_unflatten([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
        record = {"of": self._kind, "buckets": [*self._buckets.values()], "values": plain}
        return record | {"tensors": [*tensors]}, tensors

    def from_files(self, record: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        """Take over what `to_files` has returned, with the tensors of the record in their order."""
        leaves, form = pytree.tree_flatten(record["values"])
        for name, tensor in zip(record["tensors"], tensors, strict=True):
            leaves[int(name.rpartition("/")[2])] = tensor
        present, state = self._values(), self.state
        put: Any = state.__setitem__ if isinstance(state, dict) else functools.partial(setattr, state)
        for name, value in pytree.tree_unflatten(leaves, form).items():
            if isinstance(random := present.get(name), np.random.RandomState):
                random.set_state(pytree.tree_map_only(Tensor, lambda key: key.cpu().numpy(), value))
            else:
                put(name, value)


def make_hook(
    pair: Any, optimizer: Any, config: Config, model: nn.Module, axis: Axis, *, is_local: bool
) -> GradientHook | None:
    """Return the hook that a user gives, or the one of an optimizer that exchanges by itself; None without.

    Args:
        pair: as `initialize` was given it.
        optimizer: the optimizer.
        config: the config.
        model: the model.
        axis: all ranks.
        is_local: True if replicas take steps of their own.

    Raises:
        ValueError: it is no pair of a state and a hook, or does not go with something else that was given.
    """
    hook = None
    if pair is not None:
        if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
            raise ValueError(f"gradient_hook: expected (state, hook), got {pair!r}")
        if isinstance(pair[0], list | tuple | set | Tensor):
            kind = type(pair[0]).__name__
            raise ValueError(
                f"gradient_hook: expected a dict or an object as state, to be saved, got a {kind}"
            )
        hook = GradientHook(*pair, axis)
        group = getattr(hook.state, "process_group", hook.state)
        if isinstance(group, ProcessGroup) and group.size() != axis.size:
            raise ValueError(f"{hook.name}: expected a group of all {axis.size} ranks, got {group.size()}")
    if (make := getattr(optimizer, "hook_over", None)) is not None:
        if hook is not None:
            raise ValueError(f"{hook.name}: expected none, as {type(optimizer).__name__} exchanges by itself")
        hook = make(axis)
    if hook is not None:
        if is_local:
            raise ValueError(f"{hook.name}: expected no outer_step, as a hook averages over all replicas")
        _check_settings(hook, config, model, optimizer)
    return hook


def install_hook(hook: GradientHook | None, runtime: Runtime) -> None:
    """Let a hook reduce the gradients of a model."""
    if hook is not None:
        hook.over([one.buffer for unit in runtime.units for one in unit.gradients])
        runtime.state.hook = hook


def _check_settings(hook: GradientHook, config: Config, model: nn.Module, optimizer: Any) -> None:
    """Refuse settings in which a hook cannot be right.

    Raises:
        ValueError: the name of the first one, and what it should be.
    """
    why = "it takes whole gradients of all ranks; precision.reduce_dtype='bf16' halves bytes at every stage"
    allowed: dict[str, Any] = {"mesh.pp": [1], "mesh.tp": [1], "stage": [0, 1]}
    allowed["nonfinite"] = ["report", "error"]  # what is skipped would stay in the state of the hook
    if hook.is_local:
        why = "ranks go on with different gradients (at stage 1 unless subgroup is the shard group); "
        why += "OuterStep.post_local_sgd takes local steps at all stages"
        if isinstance(optimizer, UsesNorms | UsesWholes):  # which ask ranks for parts, as of one gradient
            name = type(optimizer).__name__
            raise ValueError(f"{hook.name} with {name}: expected an element-wise optimizer, as {why}")
        allowed |= {"stage": [0, 1] if hook.keeps_mean_of(config.shard_group_size) else [0]}
        allowed |= {"nonfinite": ["report"], "clip_grad_norm": [None], "ignored": [None]}
        allowed |= {"offload.optimizer": ["none"], "precision.main_dtype": [None, torch.float32]}
    for key, values in allowed.items():
        if (value := flat(config)[key]) not in values:
            raise ValueError(f"{hook.name} with {key}={value!r}: expected one of {values}, as {why}")
    if torch.float16 in {config.precision.param_dtype or p.dtype for p in model.parameters()}:
        raise ValueError(f"{hook.name} with float16: an overflow would stay in its state: expected bf16")
