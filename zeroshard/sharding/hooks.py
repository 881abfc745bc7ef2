"""The hooks on modules and parameters that drive a `Runtime` in ordinary training.

They call its verbs and decide nothing themselves: `before_forward`, `after_forward` and `exit_forward`
around a forward, `watch_layer` after a layer inside it, `receive` when autograd has accumulated a gradient.
"""

from __future__ import annotations

import functools
import sys
import weakref

from torch import Tensor, nn

from zeroshard.internals.nested import cast_inputs
from zeroshard.plan.originals import computes_in_own_dtype
from zeroshard.sharding.changes import Changes
from zeroshard.sharding.passes import Passes, closed_error
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit


def hook(runtime: Runtime) -> None:
    """Let the forwards and backwards of a module drive its runtime."""
    for unit in runtime.units:
        _hook_unit(runtime, unit)
    for number, (_, gradients) in enumerate(runtime.passes.trained):
        for index, parameter in enumerate(gradients.buffer.unsharded):
            _hook_gradient(runtime.passes, number, index, parameter)
    _avoid_fast_paths(runtime.module, runtime.changes)


def _hook_unit(runtime: Runtime, unit: Unit) -> None:
    """Hook the modules of a unit, and the layers inside them."""
    hook = runtime.changes.hook  # a hook keeps the runtime, which a model without engine still needs
    for module in unit.modules:
        cast, dtype = runtime.casts.get(module), runtime.input_dtype(module)
        casts_itself = computes_in_own_dtype(module) if cast is None else cast.without is not None
        if dtype is not None and not casts_itself:
            own = functools.partial(cast_inputs, dtype=dtype, in_lists=unit is runtime.root)
            hook(module.register_forward_pre_hook(own, prepend=True, with_kwargs=True))
        if unit in runtime.passes.quiet:
            hook(module.register_forward_pre_hook(lambda *_: runtime.passes.show(unit), prepend=True))
            hook(module.register_forward_hook(lambda *_: runtime.passes.hide(unit), always_call=True))
            continue
        hook(
            module.register_forward_pre_hook(
                lambda *_: runtime.passes.before_forward(unit, sys._getframe(1)), prepend=True
            )
        )
        hook(module.register_forward_hook(lambda *call: runtime.passes.after_forward(unit, call[-1])))
        hook(module.register_forward_hook(lambda *_: runtime.passes.exit_forward(unit), always_call=True))
    for layer in unit.layers:
        hook(layer.register_forward_hook(lambda *call: runtime.passes.watch_layer(unit, call[-1])))


def _hook_gradient(passes: Passes, number: int, index: int, parameter: nn.Parameter) -> None:
    # Autograd keeps the hook out of the garbage collector's sight: a strong reference would leak.
    of_passes = weakref.ref(passes)

    def arrived(parameter: Tensor) -> None:
        passes = of_passes()
        gradient, parameter.grad = parameter.grad, None
        if passes is None:
            raise closed_error()
        assert gradient is not None, "called when it has been accumulated"
        passes.receive(number, index, gradient)

    Tensor.register_post_accumulate_grad_hook(parameter, arrived)  # type: ignore[no-untyped-call]


def _avoid_fast_paths(root: nn.Module, changes: Changes) -> None:
    """Let torch's encoders compute in evaluation as in training: their fast paths allow no hooks."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            changes.set(module, "activation_relu_or_gelu", 0)
        elif isinstance(module, nn.TransformerEncoder):
            changes.set(module, "use_nested_tensor", False)
