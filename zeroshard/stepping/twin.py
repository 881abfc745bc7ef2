"""A twin of an optimizer, which steps a part of its parameters while others may look at the optimizer.

The twin has the states, the options and the class of its optimizer, and parameter groups of its own. So
`param_groups` and hooks of the optimizer stay as they are, whichever thread steps the twin. Optimizers for
which `parts.is_known` keep nothing of a step but the states: nothing else is to come back from the twin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from zeroshard.parameters.sharded import ShardedParameter


def twin_of(optimizer: Optimizer, groups: Sequence[Sequence[ShardedParameter]]) -> Optimizer:
    """Make the twin of an optimizer.

    Args:
        optimizer: the optimizer; its state is shared, and its options are those of this moment.
        groups: the parameters of each group of the twin.

    Returns:
        The twin, without hooks: a step that calls the step of its base class would run them in its middle.
    """
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, MethodType) and value.__self__ is optimizer:  # as of adopted optimizers
            value = MethodType(value.__func__, twin)
        vars(twin)[name] = value
    twin.param_groups = [
        {**group, "params": list(parameters)}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stepped: Optimizer = twin
    return stepped
