"""The profile of a model's blocks: measured times, and bytes of parameters.

The model runs once. Where its forward comes to a module of the outline, this module is measured with the
inputs that have arrived: its forward and its backward. Then its outputs go on.

    model's forward  --> embedding --> block 0 --> block 1 --> ... --> norm --> head --> loss
    on the device        measured      measured    as block 0          measured ...

Only one module is on the device at a time, so a model that is larger than the device can be measured. A block
that equals an earlier one in its classes, shapes and settings has the time of that one. A setting of an
unknown class equals only itself: a doubt costs a measurement. Modules before the blocks count as a part of
the first block; those after them, and the loss, as a part of the last one.

The model does not change: modules compute with tensors in the place of their parameters and buffers. Tensors
for parameters on the meta device have arbitrary values, because the time does not depend on them.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.data import default_collate

from zeroshard.comm.streams import mark_here
from zeroshard.data.microbatch import LossFunction, to_device
from zeroshard.internals import pytree
from zeroshard.lazy.deferred import has_memory, is_known, values_of
from zeroshard.parallel.pipeline.chunked import Chunked, Outline
from zeroshard.parallel.pipeline.partition import BlockProfile
from zeroshard.parallel.random import forked
from zeroshard.sharding.context import Changes

if TYPE_CHECKING:
    from zeroshard.parallel.pipeline.traced import TracedChunks

_LENGTH = 128
"""The tokens of a row that is made up, at most: enough for matrix products of a usual form."""


class SampleSource(NamedTuple):
    """The data and the loss of a training, as `initialize` gets them."""

    training_data: Any = None
    collate_fn: Callable[..., Any] | None = None
    loss_fn: LossFunction | None = None


class SampleBatch(NamedTuple):
    """A micro-batch on the CPU."""

    inputs: tuple[Any, ...]
    """Positional arguments of the model."""
    named: Mapping[str, Any]
    """Arguments by name."""
    targets: Any
    """None: the model gets them among its arguments, or there are none."""


def sample_of(model: nn.Module, source: SampleSource, size: int) -> SampleBatch | None:
    """Return a micro-batch: the first samples of the data, or random tokens for a model of transformers.

    A batch of the data is a mapping of arguments, one argument, or a pair of one argument and targets.

    Args:
        model: a `Sequential`, or a causal language model of transformers.
        source: the data and the loss.
        size: samples in the micro-batch.

    Returns:
        The micro-batch; None without data for a `Sequential`.
    """
    if source.training_data is not None:
        return _read(source.training_data, source.collate_fn or default_collate, size)
    return None if isinstance(model, nn.Sequential) else _random_tokens(model, size)


def _read(data: Any, collate_fn: Callable[..., Any], size: int) -> SampleBatch:
    with same_random_numbers(torch.device("cpu")):
        batch = collate_fn([data[number % len(data)] for number in range(size)])
    if isinstance(batch, Mapping):
        return SampleBatch((), batch, None)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        inputs, targets = (*batch, None) if len(batch) == 1 else batch
        is_named = isinstance(inputs, Mapping)
        return SampleBatch(() if is_named else (inputs,), inputs if is_named else {}, targets)
    return SampleBatch((batch,), {}, None)


def _random_tokens(model: Any, size: int) -> SampleBatch:
    config = model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or _LENGTH, _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (size, length), generator=generator, device="cpu")
    return SampleBatch((), {"input_ids": tokens, "labels": tokens}, None)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the generators of Python, NumPy and torch as they were: only one rank measures."""
    states = random.getstate(), np.random.get_state()
    try:
        with forked(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


_FEWEST, _MOST = 3, 20
"""Runs after a first one that warms up. The shortest counts: noise of the machine only adds time."""
_ENOUGH = 0.05
"""Seconds of runs after which the fewest are enough."""
_SPREAD = 0.02
"""The standard deviation of arbitrary parameters: as in usual inits, so that no value overflows."""
_LEFT_OUT = frozenset({*vars(nn.Module()), "layer_idx"} - {"training", "_parameters", "_buffers"})
"""The attributes that say nothing of a module's time; models of transformers keep the number of a block."""
_Result = TypeVar("_Result")
_PLAIN = (bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, type(None))


def weigh_blocks(chunks: Chunked | TracedChunks) -> tuple[BlockProfile, ...]:
    """Return the profile of each block without a measurement: its time is its number of parameters."""
    found = []
    for number in range(len(chunks.outline.blocks)):
        own = [one for one in chunks.tensors_of(range(number, number + 1)) if isinstance(one, nn.Parameter)]
        time, num_bytes = sum(one.numel() for one in own), sum(one.nbytes for one in own)
        found.append(BlockProfile(time=time, parameter_bytes=num_bytes))
    return tuple(found)


def measure_blocks(
    chunks: Chunked,
    sample: SampleBatch,
    loss_fn: LossFunction | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[BlockProfile, ...]:
    """Measure the blocks of a model; parameters, buffers, gradients and random generators stay as they are.

    Args:
        chunks: the model with the order of its modules, on any device, the meta device included.
        sample: a micro-batch.
        loss_fn: its time counts if the micro-batch has targets. Otherwise the time of the model's own
            loss counts, if the model returns a loss.
        device: the device of the measurement.
        dtype: the dtype of parameters and float inputs. None: as they are.

    Returns:
        The profile of each block; times are seconds.

    Raises:
        RuntimeError: the model's forward leaves out a block; or whatever it raises with this micro-batch.
    """
    profiler, outline = Profiler(device, dtype), chunks.outline
    with same_random_numbers(device), torch.enable_grad(), profiler.inside(chunks.model, outline):
        tail = profiler.run(chunks.model, to_device(sample, device), loss_fn)
    found = []
    for number, weighed in enumerate(weigh_blocks(chunks)):
        if not profiler.seconds[outline.blocks[number]]:
            name = outline.blocks[number]
            raise RuntimeError(f"expected the model's forward to call '{name}', but it did not")
        own = (profiler.seconds[name] for name in outline.chunk(range(number, number + 1)))
        found.append(replace(weighed, time=sum(map(sum, own))))
    return (*found[:-1], replace(found[-1], time=found[-1].time + tail))


class Profiler:
    """Stands in for the modules of a model while its forward runs.

    Args:
        device, dtype: as in `measure_blocks`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        """The seconds of each call, forward and backward, by name of a module."""
        self._measured: dict[Hashable, tuple[float, Any]] = {}
        """Seconds, and outputs without a graph, by likeness of the module and form of its arguments. Outputs
        that had a graph require gradients."""
        self._last: list[Tensor] = []
        """The outputs of the last module that was called, without a graph."""
        self._since = 0.0
        """The time at which it returned."""
        self._is_counting = True

    @contextmanager
    def inside(self, model: nn.Module, outline: Outline) -> Iterator[None]:
        """Stand in for all modules of the outline, and for others that have tensors, such as positions."""
        own = {name: model.get_submodule(name) for name in outline.names}
        below = {part for module in own.values() for part in module.modules()}
        for name, module in model.named_modules():
            has_tensors = any(
                one is not None for one in (*module._parameters.values(), *module._buffers.values())
            )
            # Containers of blocks have their own forward, which is to run as it is.
            if has_tensors and not below.intersection(module.modules()):
                own[name] = module
        changes = Changes()
        for name, module in own.items():
            changes.set(module, "forward", self._standing_for(name, module))
        try:
            yield
        finally:
            changes.undo()

    def run(self, model: nn.Module, sample: SampleBatch, loss_fn: LossFunction | None) -> float:
        """Run the model; return the seconds of the loss, which follows its last module."""
        named, targets = dict(sample.named), sample.targets
        if not isinstance(model, nn.Sequential):
            named["use_cache"] = False
            if loss_fn is None and targets is not None:
                named["labels"] = targets

        def run() -> tuple[float, None]:
            output = model(*sample.inputs, **named)
            loss = _loss_in(output) if loss_fn is None or targets is None else loss_fn(output, targets)
            seconds = self._now() - self._since
            self._is_counting = False  # later runs know the costs of all modules
            if loss is not None and loss.requires_grad and self._last:
                start = self._now()
                torch.autograd.grad(loss, self._last, allow_unused=True)  # a loss may have parameters, too
                seconds += self._now() - start
            return seconds, None

        return self._shortest(run)[0]

    def _standing_for(self, name: str, module: nn.Module) -> Callable[..., Any]:
        forward, likeness = module.forward, likeness_of(module)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            key = (likeness, facts_of(args), facts_of(kwargs))
            if key not in self._measured:
                self._measured[key] = self._measure(module, forward, args, kwargs)
            seconds, outputs = self._measured[key]
            if self._is_counting:
                self.seconds[name].append(seconds)
            self._last = [value for value in _tensors(outputs) if value.requires_grad]
            given = pytree.tree_map_only(Tensor, Tensor.clone, outputs)  # the model may write to it
            self._since = self._now()
            return given

        return stand_in

    @torch.enable_grad()  # the model may be inside a checkpoint, which switches it off
    def _measure(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[float, Any]:
        placed = self._place(module)

        def run() -> tuple[float, Any]:
            given, named = pytree.tree_map_only(Tensor, self._enter, (args, dict(kwargs)))
            start = self._now()
            # No other hooks, such as the hooks of a checkpoint around the block.
            with saved_tensors_hooks(lambda value: value, lambda value: value):
                outputs = forward(*given, **named)
                seconds = self._now() - start
            seconds += self._backward(_tensors(outputs))
            for value in placed.values():
                value.grad = None
            return seconds, outputs

        # The backward, too, needs the tensors in their place: it may run parts of the forward again.
        seconds, outputs = self._shortest(lambda: functional_call(_With(module), placed, (run,)))
        return seconds, pytree.tree_map_only(
            Tensor, lambda value: value.detach().requires_grad_(value.requires_grad), outputs
        )

    def _shortest(self, run: Callable[[], tuple[float, _Result]]) -> tuple[float, _Result]:
        """Run as often as a measurement needs; return the least seconds after a first run, and a result."""
        run()  # warms up
        start, least = self._now(), math.inf
        for number in count():
            seconds, result = run()
            least = min(least, seconds)
            if number + 1 >= (_FEWEST if self._now() - start > _ENOUGH else _MOST):
                break
        return least, result

    def _enter(self, value: Tensor) -> Tensor:
        """Return an argument of a module: a copy, as the module may write to it, of a leaf of its graph."""
        leaf = value.detach()
        if self._dtype is not None and leaf.is_floating_point():
            leaf = leaf.to(self._dtype)
        return leaf.requires_grad_(value.requires_grad).clone()

    def _backward(self, results: Sequence[Tensor]) -> float:
        """Return the seconds of a backward, which ends at leaves of ours alone."""
        results = [value for value in results if value.requires_grad]
        if not results:
            return 0.0
        gradients = [torch.ones_like(value) for value in results]
        start = self._now()
        torch.autograd.backward(results, gradients)
        return self._now() - start

    @torch.no_grad()
    def _place(self, module: nn.Module) -> dict[str, Tensor]:
        """Tensors on the device in the place of the parameters and buffers of a module, by name."""
        placed = {f"module.{name}": self._parameter(own) for name, own in module.named_parameters()}
        for name, buffer in module.named_buffers():
            values = values_of(buffer) if is_known(buffer) else torch.zeros_like(buffer, device="cpu")
            placed[f"module.{name}"] = values.to(self._device, copy=True)  # a forward may write to it
        return placed  # `functional_call` puts it under the other names of tied ones, too

    def _parameter(self, parameter: nn.Parameter) -> Tensor:
        dtype = self._dtype or parameter.dtype
        if has_memory(parameter):
            value = parameter.detach().to(self._device, dtype)
        else:
            value = torch.empty(parameter.shape, dtype=dtype, device=self._device).normal_(0, _SPREAD)
        return value.requires_grad_(parameter.requires_grad)

    def _now(self) -> float:
        """The time after all work on the device."""
        mark_here(self._device).synchronize()
        return time.perf_counter()


class _With(nn.Module):
    """Calls a function while a module has other tensors, which `functional_call` gives it.

    A call of the module itself would call its hooks, and the call in the model does so already.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        """Return the result of a function."""
        return run()


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, Tensor)]


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def likeness_of(module: nn.Module) -> Hashable:
    """Return facts that are equal for modules of the same classes, shapes and settings."""
    return tuple(
        (name, type(part), facts_of({key: own for key, own in vars(part).items() if key not in _LEFT_OUT}))
        for name, part in module.named_modules()
    )


def facts_of(value: Any) -> Hashable:
    """Return facts of an argument or a setting: the form of a tensor, the value of a number or a text."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(facts_of, value))
    if isinstance(value, Mapping):
        return type(value), tuple((facts_of(key), facts_of(item)) for key, item in value.items())
    if isinstance(value, partial):
        return partial, value.func, facts_of(value.args), facts_of(value.keywords)
    return id(value)
