"""A micro-batch with which the blocks of a model are measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from zeroshard.data.losses import LossFunction

_LENGTH = 128
"""The tokens of a row that is made up, at most: enough for matrix products of a usual form."""


class Source(NamedTuple):
    """The data and the loss of a training, as `initialize` gets them."""

    training_data: Any = None
    collate_fn: Callable[..., Any] | None = None
    loss_fn: LossFunction | None = None


class Sample(NamedTuple):
    """A micro-batch on the CPU."""

    inputs: tuple[Any, ...]
    """Positional arguments of the model."""
    named: Mapping[str, Any]
    """Arguments by name."""
    targets: Any
    """None: the model gets them among its arguments, or there are none."""


def sample_of(model: nn.Module, source: Source, size: int) -> Sample | None:
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


def _read(data: Any, collate_fn: Callable[..., Any], size: int) -> Sample:
    with same_random_numbers(torch.device("cpu")):
        batch = collate_fn([data[number % len(data)] for number in range(size)])
    if isinstance(batch, Mapping):
        return Sample((), batch, None)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        inputs, targets = (*batch, None) if len(batch) == 1 else batch
        return Sample((), inputs, targets) if isinstance(inputs, Mapping) else Sample((inputs,), {}, targets)
    return Sample((batch,), {}, None)


def _random_tokens(model: Any, size: int) -> Sample:
    config = model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or _LENGTH, _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (size, length), generator=generator, device="cpu")
    return Sample((), {"input_ids": tokens, "labels": tokens}, None)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leave the generators of Python, NumPy and torch as they were: only one rank measures."""
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
