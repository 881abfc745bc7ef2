"""Random numbers of tensor and pipeline ranks: alike where values are whole, others where they are parts.

    x --dropout--> [ up: columns ] --dropout--> [ down: rows ] --dropout--> y
      same mask                    own masks                   same mask

Tensor ranks that drop other elements of the same values go apart without an error. So all of them begin a
forward with the random state of the first one. In a region, between a layer that is divided by columns and
the next one that is divided by rows, each rank has other elements, and draws other numbers.

The state of a region is a function of the state at its beginning and the rank. Nothing is kept but the
default generator of the device. So a forward that runs again from the state of its beginning, as under
recomputation and after a checkpoint was loaded, draws the same numbers again.

Korthikanti et al. 2022, section 4, need the same two kinds of random states.

All pipeline ranks may have the same random state, so that they choose the same batch. With it, their layers
would drop the same elements. So before a batch each rank draws one number from the default generator, and
computes the batch from a state that follows from that number and its rank. After the batch the generator goes
on as if the batch had drawn that number alone, on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parallel.tensor.sequence import Activations, Regions, blocks_of
from zeroshard.parallel.tensor.styles import Divided, Split
from zeroshard.sharding.context import Changes

_LARGEST = 1 << 62


def random_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Give the default generator of a device a state that `random_state` has returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def random_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the default generators of the CPU and of a device."""
    return {each: random_state(each) for each in {torch.device("cpu"), device}}


def set_random_states(states: Mapping[torch.device, Tensor]) -> None:
    """Give default generators states that `random_states` has returned."""
    for device, state in states.items():
        set_random_state(device, state)


@contextmanager
def own_numbers(device: torch.device, pipeline_rank: int) -> Iterator[None]:
    """Draw other numbers than the other pipeline ranks."""
    drawn = int(torch.randint(_LARGEST, (), device="cpu"))
    digest = blake2b(f"{drawn} {pipeline_rank}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 2
    with forked(device):
        for each in random_states(device):
            set_random_state(each, torch.Generator(each).manual_seed(seed).get_state())
        yield


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Leave the default generators of the CPU and of a device as they were."""
    devices = [] if device.type == "cpu" else [device]
    context: AbstractContextManager[None] = torch.random.fork_rng(devices, device_type=device.type)
    return context


class RandomStates:
    """The random states of a tensor rank: one that it shares with the others, and one of its own.

    A region begins inside the call of a module, its scope, and ends at the latest with that call, also after
    an exception: recomputation stops a forward by one. If only a part of that call runs again, there is no
    scope. Such a loose region is forgotten if it has not ended when another region begins.

    Args:
        over: the exchanges of the tensor ranks.
    """

    def __init__(self, over: Activations) -> None:
        self._over = over
        self._scopes: list[object] = []
        """The scopes that are under way, from the outside in."""
        self._region: tuple[Tensor, Tensor] | None = None
        """The shared state at the beginning of the region that is open, and the own one."""
        self._owner: object = None
        """The scope of the region; a module for a region without a scope."""

    def agree(self) -> None:
        """Take over the states of the first rank; collective."""
        self._scopes.clear()  # an interrupt may have left some
        self._region = None
        own = {device: bytes(state.numpy()) for device, state in random_states(self._over.device).items()}
        for device, state in self._over.first(own, "random states of the tensor ranks").items():
            if state != own[device]:
                set_random_state(device, torch.frombuffer(bytearray(state), dtype=torch.uint8))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Go around the call of a module."""
        scope = object()
        if not self._scopes:
            self._region = None
        self._scopes.append(scope)
        try:
            yield
        finally:
            if self._owner is scope:
                self.exit()
            if scope in self._scopes:
                self._scopes.remove(scope)

    def enter(self, module: nn.Module) -> None:
        """Begin a region of a module, unless there is one already."""
        if self._region is None or (not self._scopes and self._owner is not module):
            self._owner = self._scopes[-1] if self._scopes else module
            shared = random_state(self._over.device)
            salt = self._over.rank.to_bytes(8, "little")
            digest = blake2b(bytes(shared.numpy()), digest_size=8, salt=salt).digest()
            seed = int.from_bytes(digest, "little") >> 1
            own = torch.Generator(self._over.device).manual_seed(seed).get_state()
            set_random_state(self._over.device, own)
            self._region = shared, random_state(self._over.device)

    def exit(self) -> None:
        """End the region, if there is one: go on with the shared numbers.

        If numbers were drawn in the region, one of the shared ones is left out: the next region would begin
        with the same state. If none were drawn, no other numbers change either.
        """
        if self._region is None:
            return
        (shared, own), self._region = self._region, None
        is_used = not torch.equal(random_state(self._over.device), own)
        set_random_state(self._over.device, shared)
        if is_used:
            torch.empty((), device=self._over.device).uniform_()


def share_random_states(
    model: nn.Module,
    layers: Sequence[Divided],
    regions: Regions | None,
    over: Activations,
    changes: Changes,
) -> None:
    """Have the ranks drop the same elements where values are whole, and others where they are parts.

    Regions begin after some layers, and end with others.

    Args:
        model: the model.
        layers: the layers of its plan.
        regions: the switch of the regions that are divided along the sequence, if there are any.
        over: the exchanges of the tensor ranks.
        changes: the changes of the model.
    """
    states = RandomStates(over)
    # In evaluation too: a generation draws tokens after it, which must be the same on all ranks.
    changes.hook(model.register_forward_pre_hook(lambda *_: states.agree(), prepend=True))
    states.agree()
    blocks = [] if regions is None else blocks_of(layers)
    for block in blocks:
        # Not by hooks: recomputation runs a forward again without its hooks.
        changes.around(block, "random", functools.partial(_in_scope, block, states, regions))
    inside = {module for block in blocks for module in block.modules()}
    others = [layer for layer in layers if layer.module not in inside]
    first = [layer for layer in others if layer.style.way in (Split.COLUMNS, Split.SHARED_COLUMNS)]
    rows = [layer for layer in others if layer.style.way is Split.ROWS]
    last = [layer for layer in rows if not isinstance(layer.module, nn.Embedding)]

    def enter(scope: nn.Module, layer: nn.Module, args: Any, output: Any) -> None:
        if layer.training:
            states.enter(scope)

    def exit_region(layer: nn.Module, *_: Any) -> None:
        if layer.training:
            states.exit()

    for scope in dict.fromkeys(layer.parent for layer in first):
        changes.around(scope, "random", functools.partial(_in_scope, scope, states, None))
    for layer in first:
        changes.hook(layer.module.register_forward_hook(functools.partial(enter, layer.parent)))
    for layer in last:
        changes.hook(layer.module.register_forward_hook(exit_region))


def _in_scope(
    module: nn.Module, states: RandomStates, regions: Regions | None, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with states.scope():
            if regions is not None and regions.are_divided:
                states.enter(module)
            return forward(*args, **kwargs)

    return within
