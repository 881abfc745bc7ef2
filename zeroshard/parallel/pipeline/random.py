"""Random numbers of pipeline ranks: each draws its own during a batch, and leaves those of the user alike.

All pipeline ranks may have the same random state, so that they choose the same batch. With it, their layers
would drop the same elements. So before a batch each rank draws one number from the default generator, and
computes the batch from a state that follows from that number and its rank. After the batch the generator goes
on as if the batch had drawn that number alone, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor

_LARGEST = 1 << 62


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of the default generators of the CPU and of a device."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    """Give the default generators states that `random_states` has returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def own_numbers(device: torch.device, pipeline_rank: int) -> Iterator[None]:
    """Draw other numbers than the other pipeline ranks."""
    drawn = int(torch.randint(_LARGEST, (), device="cpu"))
    before = random_states(device)
    digest = blake2b(f"{drawn} {pipeline_rank}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 2
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    try:
        yield
    finally:
        set_random_states(device, before)
