"""A sharded module becomes an ordinary one again: its own parameters, whole, and its own methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn

from zeroshard.forwards.composed import form_of
from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.original import revive
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes
from zeroshard.parameters.state import Phase, refuse_averages
from zeroshard.plan.originals import Original
from zeroshard.sharding.runtime import DRAIN_S, Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.sharding.wholes import gather_wholes


class Closed:
    """A stand-in for the parts of a closed engine: any use is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "the engine is closed and its model is an ordinary module again: to go on sharded, give the "
            "model to zeroshard.initialize or zeroshard.shard once more, with a new optimizer"
        )


def restore(runtime: Runtime) -> None:
    """Give the module its original parameters back, with the values of the main parameters; collective.

    They are the objects that the module had before it was sharded, of full shape, in the main dtype and on
    the device of the runtime; those from the meta device are new objects. The engine keeps frozen ones in the
    compute dtype; they come in the main dtype, too, so that a plain forward works. With weights of torchao
    all come in the dtypes that they had: such weights compute in one dtype. One unit is gathered at a time.

    Raises:
        RuntimeError: a forward, a backward or `unsharded()` is running; or a parameter was replaced on any
            rank since the module was sharded. Then nothing has changed.
    """
    runtime.settle()
    runtime.require_slices("close()")
    refuse_averages(runtime.state, "close()")
    _check_replaced(runtime)
    runtime.drop_deferred()
    runtime.put_away()
    in_own = any(form_of(layer) is not None for layer in runtime.module.modules())
    for unit in runtime.units:
        for buffer in unit.buffers:
            views = gather_wholes(buffer, runtime.context.axes.tp)
            for original, sharded, view in zip(buffer.originals, buffer.sharded, views, strict=True):
                _give_back(original, sharded, view.to(_dtype_of(original, view, runtime, in_own), copy=True))
    release(
        runtime,
        "belongs to an engine that was closed, and its model has the whole parameter again: make a new "
        "optimizer over model.parameters(), or give the model to zeroshard.initialize once more",
    )


def dismantle(runtime: Runtime) -> None:
    """Let go of everything without an exchange; the module is not usable afterwards."""
    runtime.context.axes.drain(DRAIN_S)  # a wait that ends too early would close connections of all engines
    runtime.context.streams.join()
    for unit in runtime.units:
        unit.slots.uninstall()
    release(runtime, "belongs to an engine that was closed with restore=False: its model cannot be used")


def release(runtime: Runtime, refusal: str) -> None:
    """Take the hooks away, and the memory of parameters and gradients.

    Args:
        runtime: a runtime that is not used any more.
        refusal: the end of the sentence "the sharded parameter 'a.weight' ...", for a later use of one.
    """
    runtime.changes.undo()
    with past_guards():
        for sharded in runtime.parameters:  # the optimizer and the user may keep them
            sharded.grad, sharded.data = None, sharded.new_empty(0)
    for unit in runtime.units:
        unit.release()
    runtime.state.move(Phase.CLOSED)
    runtime.state.refusal = refusal


def _check_replaced(runtime: Runtime) -> None:
    """Refuse to write over parameters of the user.

    Raises:
        RuntimeError: the name of the first one, on all ranks.
    """
    own = next((name for unit in runtime.units for name in _replaced(unit)), None)
    everyone: list[str | None] = runtime.context.axes.world.all_gather_object(own, "agreement on close()")
    for rank, name in enumerate(everyone):
        if name is not None:
            raise RuntimeError(
                f"close(): '{name}' was replaced or removed since initialize (rank {rank}), so the engine "
                "cannot tell which parameter the model is to keep: edit parameters in place under "
                "engine.unsharded(write_back=True), or use close(restore=False)"
            )


def _replaced(unit: Unit) -> Iterator[str]:
    for buffer in unit.buffers:
        own = zip(buffer.originals, buffer.sharded, buffer.unsharded, strict=True)
        for original, sharded, unsharded in own:
            for owner, attribute in original.owners:
                current = owner._parameters.get(attribute)
                if current is not sharded and current is not unsharded:
                    yield original.fqn


def _dtype_of(original: Original, view: Tensor, runtime: Runtime, in_own: bool) -> torch.dtype:
    if in_own or original.is_packed:
        return view.dtype if original.is_packed else original.parameter.dtype
    main = runtime.context.setting.dtypes.main_dtype or torch.promote_types(
        original.parameter.dtype, torch.float32
    )
    return torch.promote_types(view.dtype, main)


@torch.no_grad()
def _give_back(original: Original, sharded: ShardedParameter, values: Tensor) -> None:
    parameter = original.parameter
    revive(parameter)
    if parameter.is_meta:
        parameter = _made_anew(parameter, values)
    else:
        parameter.data = values
    parameter.grad = None
    parameter.requires_grad_(sharded.requires_grad)
    for owner, attribute in original.owners:
        if type(owner).__setattr__ is nn.Module.__setattr__:
            owner._parameters[attribute] = parameter
        else:  # an RNN keeps a list of its weights beside
            setattr(owner, attribute, parameter)


def _made_anew(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter with memory in place of one from the meta device, of its class and with its attributes."""
    made = nn.Parameter(values, requires_grad=False)
    made.__class__ = type(parameter)
    carry_attributes(parameter, made)
    return made
