"""Around the steps of an optimizer: gradients are made ready before, parameters gathered after."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from zeroshard.sharding.parameter import ShardedParameter
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.saved import SavedOptimizer
from zeroshard.stepping.norms import NormsOverRanks, UsesNorms
from zeroshard.stepping.rounding import Rounding
from zeroshard.stepping.widening import widen_steps


def attach(runtime: Runtime, rounding: Rounding | None, *optimizers: Optimizer) -> None:
    """Follow optimizers over the sharded parameters, whoever steps them.

    Args:
        runtime: of the parameters; the optimizers do not keep it alive.
        rounding: of updates into main parameters of bfloat16; None where they are wider.
        optimizers: replicated parameters are gathered again after the last of them has stepped, so they
            must step together, one after the other. One that steps alone is attached by itself.

    Raises:
        ValueError: one is of bitsandbytes', which `zeroshard.initialize` takes over.
    """
    together = _Together(optimizers)
    for optimizer in optimizers:
        _follow(runtime, optimizer, together)
        if isinstance(optimizer, UsesNorms):
            optimizer.norms_of = NormsOverRanks(runtime.buffers, runtime.context.axis)
        if rounding is not None:
            widen_steps(optimizer, [unit.starts() for unit in runtime.units], rounding)


class _Together:
    """Optimizers that step one after the other, after the last of which parameters are gathered."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all, self._stepped = WeakSet(optimizers), WeakSet[Optimizer]()

    def step(self, optimizer: Optimizer) -> bool:
        """Note a step; True if it was the last one."""
        self._stepped.add(optimizer)
        is_last = set(self._all) <= set(self._stepped)
        if is_last:
            self._stepped.clear()
        return is_last


def _follow(runtime: Runtime, optimizer: Optimizer, together: _Together) -> None:
    is_theirs = any(base.__module__.startswith("bitsandbytes.") for base in type(optimizer).__mro__)
    if is_theirs and "update_step" not in vars(optimizer):  # of its class: nobody took it over
        raise ValueError(
            f"{type(optimizer).__name__} would choose the precision of its states by this rank's slices: "
            "expected it at zeroshard.initialize, which takes it over, or an optimizer of zeroshard.optim"
        )
    weak, zero_grad = weakref.ref(runtime), optimizer.zero_grad

    def before(optimizer: Optimizer, *_: Any) -> None:
        if (runtime := weak()) is not None:
            _check_sharded(optimizer, runtime.module, runtime.ignored)
            runtime.before_step()
            runtime.here.enter("the optimizer step")

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (runtime := weak()) is not None:
            runtime.after_step(together.step(optimizer))
            runtime.here.leave()

    @functools.wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        if (runtime := weak()) is not None:
            runtime.drop_deferred()
        zero_grad(set_to_none)

    def mark(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        return None if weak() is None else SavedOptimizer(state_dict)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_post_hook(mark)
    optimizer.zero_grad = zero_all  # type: ignore[method-assign]


def _check_sharded(optimizer: Optimizer, model: nn.Module, ignored: Mapping[nn.Parameter, str]) -> None:
    """Refuse a parameter that came after sharding: its gradient is this rank's alone."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, ShardedParameter) and parameter not in ignored:
                names = (name for name, member in model.named_parameters() if member is parameter)
                name = next(names, None)
                which = (
                    f"the parameter '{name}'" if name is not None else "a parameter that is not the model's"
                )
                raise RuntimeError(
                    f"group {number} of the optimizer holds {which}, of shape {list(parameter.shape)}, that "
                    "was added after the model was sharded, so its gradient is this rank's alone: add "
                    "layers to the model, and their parameters to the optimizer, before initialize; to train "
                    "some of them later, freeze them until then: requires_grad_(False) after initialize"
                )
