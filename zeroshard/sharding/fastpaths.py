"""torch's fast paths for transformer encoders in evaluation, which change the results.

`nn.TransformerEncoder` leaves padded positions out and returns 0 there, if the parameters of its first layer
are plain tensors; it reads them before it calls the layer. Then `nn.TransformerEncoderLayer` must take its
own fast path. It does so only if no hook is on it or on a module inside. So a function around the forward
gathers a unit that is such a layer, and the first layer is gathered before the encoder begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.sharding.changes import Changes
from zeroshard.sharding.unit import Unit


def allows_no_hooks(module: nn.Module) -> bool:
    """True for torch's own encoder layer, as long as nobody has hooked it."""
    has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return _is_own(module, nn.TransformerEncoderLayer) and not has_hooks


def layers_without_hooks(root: nn.Module) -> set[nn.Module]:
    """The modules inside torch's encoder layers, which may have no hook."""
    layers = [module for module in root.modules() if _is_own(module, nn.TransformerEncoderLayer)]
    return {part for layer in layers for part in layer.modules()}


def surround(
    module: nn.Module,
    changes: Changes,
    *,
    cast: Callable[..., tuple[Any, Any]] | None,
    before: Callable[..., None],
    after: Callable[..., Any] | None,
    at_last: Callable[..., None],
) -> None:
    """Do the work of a module's hooks from inside its `forward`.

    Args:
        module: the module whose forward is replaced.
        changes: the changes of the modules.
        cast: a function that changes the inputs, as a forward pre-hook with keywords.
        before: a forward pre-hook.
        after: a forward hook, if there is one.
        at_last: a forward hook that is called after an exception, too.
    """
    forward = module.forward

    @functools.wraps(forward)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        if cast is not None:
            args, kwargs = cast(module, args, kwargs)
        try:
            before(module, args)
            output = forward(*args, **kwargs)
            return output if after is None else after(module, args, output)
        finally:
            at_last(module, args, None)

    changes.set(module, "forward", surrounded)


def show_first_layers(units: Iterable[Unit], root: nn.Module, changes: Changes) -> None:
    """Gather the first layer of torch's encoders before an encoder looks at its parameters in evaluation."""
    of_module = {module: unit for unit in units for module in unit.modules}

    def show(unit: Unit, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() and not module.training:
            unit.unshard()
            unit.wait()
            unit.slots.install()

    for module in root.modules():
        if _is_own(module, nn.TransformerEncoder) and isinstance(module, nn.TransformerEncoder):
            first = of_module.get(module.layers[0])
            if first is not None:
                changes.hook(module.register_forward_pre_hook(functools.partial(show, first)))


def leave_fast_paths(root: nn.Module, cast: Container[nn.Module], changes: Changes) -> None:
    """Let torch's encoder layers take their slow path in evaluation, if some module inside one is cast.

    The fast path computes with all parameters of a layer at once, and refuses two dtypes. An encoder decides
    by its first layer for all of them, so all leave it.
    """
    layers = [module for module in root.modules() if _is_own(module, nn.TransformerEncoderLayer)]
    if any(part in cast for layer in layers if layer not in cast for part in layer.modules()):
        for layer in layers:
            changes.set(layer, "activation_relu_or_gelu", 0)  # a condition of layer and encoder


def _is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward
