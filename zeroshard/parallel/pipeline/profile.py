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
from torch.utils.data import default_collate

from zeroshard.forwards.dryrun import FLOPS, META, count, without_memory
from zeroshard.internals import pytree
from zeroshard.internals.nested import find_tensors
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.partition import BlockProfile
from zeroshard.parallel.random import forked

if TYPE_CHECKING:
    from zeroshard.parallel.pipeline.traced import TracedChunks

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


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Give each module the mode back that it had, train or eval."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def sum_of(outputs: Any) -> Tensor:
    """Return a loss for a model without one: the sum of its outputs."""
    found = (one.sum() for one in find_tensors(outputs)[0] if one.requires_grad)
    return sum(found, torch.zeros((), requires_grad=True))


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
    # Kernels of experts are there for half precision alone.
    outline, model = chunks.outline, without_memory(chunks.model, torch.bfloat16)

    def empty(value: Tensor) -> Tensor:
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        return torch.empty_like(value, dtype=dtype, device=META).requires_grad_(value.requires_grad)

    inputs, named = pytree.tree_map_only(Tensor, empty, (sample.inputs, dict(sample.named)))
    if not isinstance(model, nn.Sequential):
        named["use_cache"] = False

    names = {model.get_submodule(name): name for name in reversed(outline.names)}  # the first place of each
    modules = {"": model} | {name: module for module, name in names.items()}
    with same_random_numbers(torch.device("cpu")):
        rows = count(model, modules, lambda runs: sum_of(runs(*inputs, **named)), fuses=False).rows
    blocks = []
    for number, weighed in enumerate(weigh_blocks(chunks)):
        own = outline.chunk(range(number, number + 1))
        counts = (rows[name] for name in own if name in rows)
        time = sum(int(row.forward[FLOPS] + row.backward[FLOPS]) for row in counts)
        blocks.append(replace(weighed, time=time))
    if not any(block.time for block in blocks):
        raise RuntimeError("expected matrix products, convolutions or attention, got none")
    return tuple(blocks)
