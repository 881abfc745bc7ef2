"""The profile of a model's blocks: the operations of each, and its bytes of parameters.

The model runs once on the meta device, forward and backward, and torch counts the floating-point operations
of each module: matrix products, convolutions and attention take almost all of the time. So the count needs no
memory, and is the same in each run, unlike seconds, which would also see what is no product. Modules before
the blocks count as a part of the first block, those after them as a part of the last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.partition import BlockProfile
from zeroshard.parallel.random import forked

if TYPE_CHECKING:
    from zeroshard.parallel.pipeline.traced import TracedChunks

_META = torch.device("meta")
_LENGTH = 128
"""The tokens of a row that is made up, at most: enough for matrix products of a usual form."""


class SampleSource(NamedTuple):
    """The data of a training, as `initialize` gets it."""

    training_data: Any = None
    collate_fn: Callable[..., Any] | None = None


class SampleBatch(NamedTuple):
    """A micro-batch on the CPU, without targets of a loss function."""

    inputs: tuple[Any, ...]
    """Positional arguments of the model."""
    named: Mapping[str, Any]
    """Arguments by name."""


def sample_of(model: nn.Module, source: SampleSource, size: int) -> SampleBatch | None:
    """Return a micro-batch: the first samples of the data, or random tokens for a model of transformers.

    A batch of the data is a mapping of arguments, one argument, or a pair of one argument and targets.

    Args:
        model: a `Sequential`, or a causal language model of transformers.
        source: the data.
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
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        batch, *_ = batch
    return SampleBatch((), batch) if isinstance(batch, Mapping) else SampleBatch((batch,), {})


def _random_tokens(model: Any, size: int) -> SampleBatch:
    config = model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or _LENGTH, _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (size, length), generator=generator, device="cpu")
    return SampleBatch((), {"input_ids": tokens})


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the generators of Python, NumPy and torch as they were: only one rank counts."""
    states = random.getstate(), np.random.get_state()
    try:
        with forked(device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def weigh_blocks(chunks: Chunked | TracedChunks) -> tuple[BlockProfile, ...]:
    """Return the profile of each block without a count: its time is its number of parameters."""
    found = []
    for number in range(len(chunks.outline.blocks)):
        own = [one for one in chunks.tensors_of(range(number, number + 1)) if isinstance(one, nn.Parameter)]
        time, num_bytes = sum(one.numel() for one in own), sum(one.nbytes for one in own)
        found.append(BlockProfile(time=time, parameter_bytes=num_bytes))
    return tuple(found)


def count_blocks(chunks: Chunked, sample: SampleBatch) -> tuple[BlockProfile, ...]:
    """Count the operations of the blocks of a model, which does not change, and is not read.

    Args:
        chunks: the model with the order of its modules, on any device.
        sample: a micro-batch; without its loss, which multiplies no matrices.

    Returns:
        The profile of each block; times are operations.

    Raises:
        RuntimeError: there are no operations to count; or whatever the model raises without values.
    """
    model, outline = chunks.model, chunks.outline

    def empty(value: Tensor) -> Tensor:
        # Kernels of experts are there for half precision alone.
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        return torch.empty_like(value, dtype=dtype, device=_META).requires_grad_(value.requires_grad)

    placed = {name: empty(p) for name, p in model.named_parameters()}
    placed |= {name: torch.empty_like(one, device=_META) for name, one in model.named_buffers()}
    inputs, named = pytree.tree_map_only(Tensor, empty, (sample.inputs, dict(sample.named)))
    if not isinstance(model, nn.Sequential):
        named["use_cache"] = False

    def run() -> None:
        found = find_tensors(model(*inputs, **named))[0]
        torch.autograd.backward([one.sum() for one in found if one.requires_grad])

    from torch.utils.flop_counter import FlopCounterMode  # it loads much of torch

    counter: Any = FlopCounterMode(display=False)
    assumed = Assumed()  # type: ignore[no-untyped-call]
    with same_random_numbers(torch.device("cpu")), torch.enable_grad(), _META, counter, assumed:
        call_with(model, placed, run)
    counts = {name: sum(own.values()) for name, own in counter.get_flop_counts().items()}
    blocks = []
    for number, weighed in enumerate(weigh_blocks(chunks)):
        own = (f"{_With.__name__}.module.{name}" for name in outline.chunk(range(number, number + 1)))
        blocks.append(replace(weighed, time=sum(counts.get(name, 0) for name in own)))
    if not any(block.time for block in blocks):
        raise RuntimeError("expected matrix products, convolutions or attention, got none")
    return tuple(blocks)


class Assumed(TorchDispatchMode):
    """A condition on values, of which there are none, is true: no token is padding, for example."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def call_with(model: nn.Module, placed: Mapping[str, Tensor], run: Callable[[], Any]) -> Any:
    """Call a function while a model has other parameters and buffers, by their names."""
    tensors = {f"module.{name}": value for name, value in placed.items()}
    return functional_call(_With(model), tensors, (run,))  # it puts them under the other names of tied ones


class _With(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()
