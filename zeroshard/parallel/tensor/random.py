"""Random numbers of tensor ranks: the same where values are whole, others where each rank has a part.

    x --dropout--> [ up: columns ] --dropout--> [ down: rows ] --dropout--> y
      same mask                    own masks                   same mask

Ranks that drop other elements of the same values go apart without an error. So all of them begin a forward
with the random state of the first one. In a region, between a layer that is divided by columns and the next
one that is divided by rows, each rank has other elements, and draws other numbers.

The state of a region is a function of the state at its beginning and the rank. Nothing is kept beside the
default generator of the device. So a forward that runs again from the state of its beginning, as under
recomputation and after a checkpoint was loaded, draws the same numbers again.

Korthikanti et al. 2022, section 4, need the same two kinds of random states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.sharding.changes import Changes


class _Region(NamedTuple):
    """Two states at the beginning of a region."""

    shared: Tensor
    own: Tensor


@dataclass(slots=True)
class _Scope:
    """The call of a module, and the region that is open in it."""

    module: nn.Module
    region: _Region | None = None


class RandomStates:
    """The random states of a tensor rank: one that it shares with the others, and one of its own.

    A region begins inside the call of a module, the scope, and ends at the latest with that call, also after
    an exception. Recomputation stops a forward by one.

    Args:
        over: the exchanges of the tensor ranks.
    """

    def __init__(self, over: Activations) -> None:
        self._over = over
        self._scopes: list[_Scope] = []
        """The scopes that are under way, from the outside in."""

    def agree(self) -> None:
        """Take over the states of the first rank; collective."""
        self._scopes.clear()  # an interrupt may have left some
        devices = {torch.device("cpu"), self._over.device}
        own = {device: bytes(_get(device).numpy()) for device in devices}
        for device, state in self._over.first(own, "random states of the tensor ranks").items():
            if state != own[device]:
                _set(device, torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def open(self, module: nn.Module) -> None:
        """Begin a scope: the call of a module."""
        self._scopes.append(_Scope(module))

    def close(self, module: nn.Module) -> None:
        """End the scope of a module, and a region that is still open in it."""
        if self._scopes and self._scopes[-1].module is module:
            self._end(self._scopes.pop())

    def enter(self) -> None:
        """Begin a region, unless there is one already or there is no scope."""
        if not self._scopes or any(scope.region is not None for scope in self._scopes):
            return
        shared = _get(self._over.device)
        digest = blake2b(shared.numpy(), digest_size=8, salt=self._over.rank.to_bytes(8, "little")).digest()
        seed = int.from_bytes(digest, "little") >> 1
        own = torch.Generator(self._over.device).manual_seed(seed).get_state()
        _set(self._over.device, own)
        self._scopes[-1].region = _Region(shared, own)

    def leave(self) -> None:
        """End the region, if there is one."""
        for scope in self._scopes:
            self._end(scope)

    def _end(self, scope: _Scope) -> None:
        region, scope.region = scope.region, None
        if region is not None:
            self._share(region)

    def _share(self, region: _Region) -> None:
        """Go on with the shared numbers.

        If numbers were drawn in the region, one of the shared ones is left out: the next region would begin
        with the same state. If none were drawn, no other numbers change either.
        """
        is_used = not torch.equal(_get(self._over.device), region.own)
        _set(self._over.device, region.shared)
        if is_used:
            torch.empty((), device=self._over.device).uniform_()


def _get(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def hook_forwards(model: nn.Module, states: RandomStates, changes: Changes) -> None:
    """Let the ranks agree at the beginning of each forward in training; and now."""

    def before(module: nn.Module, args: Any) -> None:
        if module.training:
            states.agree()

    changes.hook(model.register_forward_pre_hook(before, prepend=True))
    states.agree()


def hook_regions(
    scopes: Iterable[nn.Module],
    first: Iterable[nn.Module],
    last: Iterable[nn.Module],
    states: RandomStates,
    changes: Changes,
) -> None:
    """Begin regions after some layers, and end them before others.

    Args:
        scopes: the modules that hold these layers.
        first: layers whose output is divided.
        last: layers whose input is divided.
    """

    def enter(module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            states.enter()

    def leave(module: nn.Module, args: Any) -> None:
        states.leave()

    _hook_scopes(scopes, states, changes)
    for module in first:
        changes.hook(module.register_forward_hook(enter))
    for module in last:
        changes.hook(module.register_forward_pre_hook(leave))


def _hook_scopes(scopes: Iterable[nn.Module], states: RandomStates, changes: Changes) -> None:
    def begin(module: nn.Module, args: Any) -> None:
        states.open(module)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        states.close(module)

    for module in dict.fromkeys(scopes):
        changes.hook(
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, always_call=True),
        )
