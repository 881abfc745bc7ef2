"""The user's optimizer goes on as the same object, over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.internals.warn import warn_user
from zeroshard.optim.adopt import bitsandbytes
from zeroshard.optim.adopt.bitsandbytes import Overrides
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.layerwise import LayerWise
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.stepping.wholes import UsesWholes

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

_ELEMENT_WISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""torch's optimizers whose update of an element needs that element's gradient and state alone."""

_WHOLE_TENSOR = {
    "adafactor": "row and column statistics of a matrix",
    "came": "row and column statistics of a matrix",
    "muon": "orthogonalized matrices: zeroshard.optim.Muon gets whole ones",
    "lbfgs": "inner products over all parameters",
    "sparseadam": "sparse gradients",
    "shampoo": "matrix preconditioners",
    "soap": "matrix preconditioners",
    "galore": "projections of whole matrices",
    "adahessian": "more than the gradient",
    "lars": "norms of whole tensors: zeroshard.optim.LARS and LARS8bit get them",
    "lamb": "norms of whole tensors: zeroshard.optim.LAMB and LAMB8bit get them",
    "prodigy": "sums over all parameters",
    "dadapt": "sums over all parameters",
}
"""The needs of an optimizer that has this in its name, in any case: FusedLAMB, MuonWithAuxAdam, ..."""


def check_optimizer(optimizer: Optimizer, names: Mapping[Any, str]) -> None:
    """Raise an error for an optimizer that cannot go on over slices of its parameters.

    Args:
        names: the model's parameters with their names.

    Raises:
        ValueError: naming the optimizer or the parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer or a callable that makes one, got {optimizer!r}")
    _check_kind(optimizer)
    foreign = [
        f"{list(parameter.shape)} in group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter not in names
    ]
    if any(isinstance(p, ShardedParameter) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"{_name(optimizer)} holds the slices of another engine; expected a new optimizer, built over "
            "the parameters of the model given to initialize"
        )
    wrap = any(hasattr(p, "__tensor_flatten__") for group in optimizer.param_groups for p in group["params"])
    hint = ", without frozen weights that wrap other tensors, as those of torchao do" if wrap else ""
    if foreign:
        raise ValueError(
            f"{_name(optimizer)} holds {len(foreign)} parameter(s) that are not the model's: "
            f"{', '.join(foreign[:3])}. Build it over the parameters of the model given to initialize{hint}"
        )
    begun = [names[p] for p, state in optimizer.state.items() if p in names and _has_begun(state)]
    if begun:
        raise ValueError(
            f"{_name(optimizer)} has state already, for {', '.join(map(repr, begun[:3]))}: "
            "initialize takes an optimizer that has not stepped yet"
        )
    lost = [names[p] for p, state in optimizer.state.items() if any(map(_is_lost, state.values()))]
    if lost:
        raise ValueError(
            f"{_name(optimizer)} has made its state for '{lost[0]}' on the meta device, without values; "
            "expected an optimizer that makes its state in its first step"
        )


def _check_kind(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, UsesWholes):
        return
    if isinstance(optimizer, LayerWise | BlockwiseOptimizer):
        if not _is_ours(kind) and not ("rule" in vars(kind) and _is_ours(kind.step)):
            _warn_unknown(optimizer)
        return
    for base in kind.__mro__:
        for part, needs in _WHOLE_TENSOR.items():
            if part in base.__name__.lower():
                raise ValueError(
                    f"{_name(optimizer)} needs whole tensors ({needs}), and a rank holds slices of them; "
                    "use an element-wise optimizer such as AdamW, SGD or RMSprop"
                )
        is_theirs = base.__module__.startswith("bitsandbytes.") and bitsandbytes.is_bitsandbytes(optimizer)
        if is_theirs:
            bitsandbytes.check(optimizer)
        if is_theirs or (base.__module__.startswith("torch.optim.") and base.__name__ in _ELEMENT_WISE):
            if kind is not base:
                _warn_unknown(optimizer)
            return
    _warn_unknown(optimizer)


def _is_ours(definition: Any) -> bool:
    """True for a class or function of zeroshard."""
    return bool(definition.__module__.startswith("zeroshard."))


def _warn_unknown(optimizer: Optimizer) -> None:
    warn_user(
        f"{_name(optimizer)} is not known to zeroshard. It sees 1-D slices of the parameters: results are "
        "right only if the update of an element depends on that element alone"
    )


def take_over(
    optimizer: Optimizer, replacements: Mapping[Any, ShardedParameter], overrides: Overrides
) -> None:
    """Re-point parameter groups to the sharded parameters; every hyperparameter stays.

    Args:
        optimizer: over original parameters.
        replacements: of the original parameters.
        overrides: as they were read.
    """
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
    fresh = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, state in fresh.items():  # Adagrad makes its state when it is built
        if (sharded := replacements.get(parameter)) is None:  # an ignored one
            optimizer.state[parameter] = state
            continue
        optimizer.state[sharded] = {
            key: value if key == "step" else _slice_state(value, sharded) for key, value in state.items()
        }
    own: Overrides = {replacements[p]: settings for p, settings in overrides.items() if p in replacements}
    if (isinstance(optimizer, BlockwiseOptimizer) or bitsandbytes.is_bitsandbytes(optimizer)) and any(
        sharded.dtype is torch.float64 for group in optimizer.param_groups for sharded in group["params"]
    ):
        warn_user(f"{_name(optimizer)} steps in float32: it rounds main parameters of float64 to float32")
    if isinstance(optimizer, BlockwiseOptimizer):
        optimizer.overrides.clear()
        optimizer.overrides.update(own)
    elif bitsandbytes.is_bitsandbytes(optimizer):
        bitsandbytes.adopt(optimizer, own)


def _slice_state(value: Any, sharded: ShardedParameter) -> Any:
    """A state that has not begun is the same for all elements of a parameter."""
    if not isinstance(value, Tensor) or value.shape != sharded.full_shape:
        return value
    dtype = torch.promote_types(sharded.dtype, torch.float32)
    return value.reshape(-1)[: sharded.numel()].to(device=sharded.device, dtype=dtype, copy=True)


def _is_lost(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _has_begun(state: dict[str, Any]) -> bool:
    step = state.get("step")
    return bool(state) and (step is None or bool(torch.as_tensor(step) != 0))


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
