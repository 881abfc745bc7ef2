"""Optimizers of other packages, which an engine takes over, and the names of their states in checkpoints.

Optimizers of bitsandbytes stay the same objects; their states are in blocks of the whole parameter.
Which states take a byte an element is told by the size of the whole parameter. A state of an optimizer:

    state1    codes of the first moment, or float32
    absmax1   their scales, [ceil(n / 256)]
    state2    the same of the second moment, where there is one
    absmax2
    step

The maps of the codes, which bitsandbytes keeps along with them, are the same for all: they are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import first_of, warn_first, warn_user
from zeroshard.optim.eightbit import blocks
from zeroshard.optim.eightbit.blocks import ABSMAX
from zeroshard.optim.eightbit.rule import Rule, rules_by_operator
from zeroshard.optim.eightbit.rules import BlockwiseOptimizer, rule_named
from zeroshard.optim.ranges import ChecksRanges
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


def check_optimizer(
    optimizer: Optimizer,
    names: Mapping[Any, str],
    ignored: Container[Any] = (),
    warn: Callable[[str], None] = warn_first,
) -> None:
    """Raise an error for an optimizer that cannot go on over slices of its parameters.

    Args:
        names: the model's parameters with their names.
        ignored: those that the user steps.
        warn: warns of trained parameters that the optimizer does not hold.

    Raises:
        ValueError: naming the optimizer or the parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer or a callable that makes one, got {optimizer!r}")
    _check_kind(optimizer)
    own = [(p, number) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
    if any(isinstance(parameter, ShardedParameter) for parameter, _ in own):
        raise ValueError(
            f"{_name(optimizer)} holds the slices of another engine; expected a new optimizer, built over "
            "the parameters of the model given to initialize"
        )
    if foreign := [f"{list(p.shape)} in group {number}" for p, number in own if p not in names]:
        raise ValueError(
            f"{_name(optimizer)} holds {len(foreign)} parameter(s) that are not the model's: "
            f"{', '.join(foreign[:3])}. Build it over the parameters of the model given to initialize"
        )
    others = (p for p in names.keys() - dict(own).keys() if p not in ignored)
    if left_out := sorted(names[p] for p in others if p.requires_grad):
        remedy = "Build it over model.parameters(), or set their requires_grad to False"
        warn(f"{_name(optimizer)} does not hold {first_of(left_out)}, which never change. {remedy}")
    if begun := [names[p] for p, state in optimizer.state.items() if p in names and _has_begun(state)]:
        raise ValueError(
            f"{_name(optimizer)} has state already, for {', '.join(map(repr, begun[:3]))}: "
            "initialize takes an optimizer that has not stepped yet"
        )
    states = ((p, value) for p, state in optimizer.state.items() for value in state.values())
    if lost := [names[p] for p, value in states if isinstance(value, Tensor) and value.is_meta]:
        raise ValueError(
            f"{_name(optimizer)} has made its state for '{lost[0]}' on the meta device, without values; "
            "expected an optimizer that makes its state in its first step"
        )


def _check_kind(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, UsesWholes):
        return
    if isinstance(optimizer, ChecksRanges):
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
        is_theirs = base.__module__.startswith("bitsandbytes.") and is_bitsandbytes(optimizer)
        if is_theirs:
            check_bitsandbytes(optimizer)
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
    optimizer: Optimizer,
    replacements: Mapping[Any, ShardedParameter],
    overrides: Overrides,
    device: torch.device,
) -> None:
    """Re-point parameter groups to the sharded parameters; every hyperparameter stays.

    Args:
        optimizer: over original parameters.
        replacements: of the original parameters.
        overrides: as they were read.
        device: the device that steps.
    """
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [p for p in optimizer.state if p in replacements]:  # Adagrad's, from when it was built
        sharded = replacements[parameter]
        optimizer.state[sharded] = {
            key: value if key == "step" else _slice_state(value, sharded)
            for key, value in optimizer.state.pop(parameter).items()
        }
    own: Overrides = {replacements[p]: settings for p, settings in overrides.items() if p in replacements}
    if (isinstance(optimizer, BlockwiseOptimizer) or is_bitsandbytes(optimizer)) and any(
        sharded.dtype is torch.float64 for group in optimizer.param_groups for sharded in group["params"]
    ):
        warn_user(f"{_name(optimizer)} steps in float32: it rounds main parameters of float64 to float32")
    if isinstance(optimizer, BlockwiseOptimizer):
        optimizer.compile_kernels(device)
    elif is_bitsandbytes(optimizer):
        adopt(optimizer, own)


def _slice_state(value: Any, sharded: ShardedParameter) -> Any:
    """A state that has not begun is the same for all elements of a parameter."""
    if not isinstance(value, Tensor) or value.shape != sharded.full_shape:
        return value
    dtype = torch.promote_types(sharded.dtype, torch.float32)
    return value.reshape(-1)[: sharded.numel()].to(device=sharded.device, dtype=dtype, copy=True)


def _has_begun(state: dict[str, Any]) -> bool:
    step = state.get("step")
    return bool(state) and (step is None or bool(torch.as_tensor(step) != 0))


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


# ---------------------------------------------------------------------------- optimizers of bitsandbytes


_METHODS = ("get_config", "init_state", "update_step")
"""Methods of an optimizer that are called or replaced here."""

_UNSUPPORTED = {
    "max_unorm": (0, "it needs norms of whole tensors, and a rank holds slices of them"),
    "skip_zeros": (False, "not all devices have it, so a step would depend on the device"),
}
"""The expected value of each option, and the reason."""

_BITS = ("optim_bits", "min_8bit_size")
"""The options that a module may have by itself."""

Overrides = dict[Tensor, dict[str, Any]]
"""The hyperparameters of single original parameters, in addition to the hyperparameters of their groups.

bitsandbytes' optimizers have the number of bits of each parameter here.
"""


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """True if it is one of bitsandbytes' or derived from one; the library is not imported for that."""
    return any(
        (base.__module__, base.__name__) == ("bitsandbytes.optim.optimizer", "Optimizer8bit")
        for base in type(optimizer).__mro__
    )


def check_bitsandbytes(optimizer: Any) -> None:
    """Raise an error for an optimizer that cannot go on over slices.

    Raises:
        ValueError: an update that is not known, or an option that needs whole tensors.
    """
    kind = type(optimizer)
    if optimizer.optimizer_name not in (rules := rules_by_operator()):
        raise ValueError(
            f"{kind.__name__}: expected an optimizer of bitsandbytes that is one of {', '.join(rules)}; "
            f"got {optimizer.optimizer_name!r}. zeroshard.optim has AdEMAMix8bit; torch has RMSprop, Adagrad"
        )
    for name in _METHODS:
        if not getattr(kind, name).__module__.startswith("bitsandbytes."):
            raise ValueError(
                f"{kind.__name__} has its own {name}(): expected the {name}() of bitsandbytes, the only one "
                "that zeroshard can run on slices"
            )
    check_options(kind.__name__, options_of(optimizer))


def options_of(optimizer: Any) -> dict[str, Any]:
    """The options that bitsandbytes keeps for a whole optimizer, not for a group."""
    keys = ("optim_bits", "min_8bit_size", *_UNSUPPORTED)
    return {key: getattr(optimizer.args, key) for key in keys if hasattr(optimizer.args, key)}


def check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of bitsandbytes that can't be had on slices.

    Args:
        where: they were given, for the error.
        options: by name; others are left alone.
    """
    if (num_bits := options.get("optim_bits", 32)) not in (8, 32):
        raise ValueError(f"{where}: optim_bits: expected 8 or 32, got {num_bits!r}")
    for key, (expected, why) in _UNSUPPORTED.items():
        if key in options and options[key] != expected:
            raise ValueError(f"{where}: expected {key}={expected}, got {options[key]!r}: {why}")


def read_overrides(optimizer: Any, names: Mapping[Any, str]) -> Overrides:
    """Read the hyperparameters of single parameters, while the original parameters are there.

    `GlobalOptimManager.register_module_override` sets the number of bits: so the Trainer of transformers asks
    for 32 bits in embeddings.

    Args:
        optimizer: over original parameters, or None.
        names: of the model's parameters.

    Raises:
        ValueError: something else was registered with the manager for a parameter of the optimizer.
    """
    if not is_bitsandbytes(optimizer):
        return {}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {key: getattr(optimizer.args, key) for key in _BITS}
    found: Overrides = {parameter: dict(own) for parameter in held}
    library = sys.modules.get("bitsandbytes.optim.optimizer")
    if library is None or (manager := library.GlobalOptimManager._instance) is None:
        return found
    triples = manager.module_weight_config_triple
    of_modules = {id(getattr(module, name, None)): config for module, name, config in triples}
    for parameter in held:
        config = of_modules.get(id(parameter), {})
        by_id = manager.pid2config.get(id(parameter), config)  # where the manager itself enters it, too
        if by_id != config or config.keys() - set(_BITS):
            raise ValueError(
                f"override of '{names[parameter]}' in bitsandbytes' GlobalOptimManager: expected "
                f"register_module_override with bits alone, got {by_id!r}. Other hyperparameters need a "
                "group of their own. GlobalOptimManager.get_instance().initialize() takes all back that was "
                "registered"
            )
        if config:
            check_options(f"override of '{names[parameter]}'", config)
            found[parameter] |= config
    return found


def adopt(optimizer: Any, settings: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Let an optimizer of bitsandbytes step over slices.

    Args:
        optimizer: the optimizer, whose groups hold the slices, [n], already.
        settings: the hyperparameters in which single parameters differ from their groups.
    """
    # Its own manager: the manager of all optimizers knows parameters by ids, which are given to others.
    manager = object.__new__(type(optimizer.mng))
    manager.initialize()
    for parameter, own in settings.items():
        bits = {"optim_bits": _bits_of(own, parameter), "min_8bit_size": 0}  # whatever the size of the slice
        manager.pid2config[id(parameter)] = bits
    optimizer.mng = manager
    optimizer.init_state = MethodType(_init_state, optimizer)
    optimizer.update_step = MethodType(_update_step, optimizer)


def num_bits(optimizer: Any, parameter: Tensor) -> int:
    """8 if the states of a parameter are to be codes of a byte, else 32; the same on all ranks."""
    if is_bitsandbytes(optimizer):
        settings = {**options_of(optimizer), **optimizer.mng.pid2config.get(id(parameter), {})}
    elif isinstance(optimizer, BlockwiseOptimizer):
        group = next(g for g in optimizer.param_groups if any(held is parameter for held in g["params"]))
        settings = {"optim_bits": 8, **group}
    else:
        return 32
    return _bits_of(settings, parameter)


def _bits_of(settings: Mapping[str, Any], parameter: Tensor) -> int:
    is_large = blocks.whole_size(parameter) >= settings["min_8bit_size"]
    return 8 if settings["optim_bits"] == 8 and is_large else 32


def to_common(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter under the names that torch's optimizers use; views of it.

    A quantized state has its uint8 codes under the name, and its scales under `<name>_absmax`.
    """
    if not is_bitsandbytes(optimizer):
        return dict(state)
    common = {key: value for key, value in state.items() if not key.startswith(("state", "absmax", "qmap"))}
    for slot, name in _slots(optimizer):
        for key, ending in ((f"state{slot}", ""), (f"absmax{slot}", ABSMAX)):
            if key in state:
                common[name + ending] = state[key]
    return common


def from_common(optimizer: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_common`; what is to be paged, for the driver to move, is copied."""
    state = dict(common)
    for slot, name in _slots(optimizer) if is_bitsandbytes(optimizer) else ():
        for key, ending in ((f"state{slot}", ""), (f"absmax{slot}", ABSMAX)):
            if name + ending in state:
                values = state.pop(name + ending)
                if optimizer.is_paged and values.is_cuda and not ending:
                    values = optimizer.get_state_buffer(values, values.dtype).copy_(values)
                state[key] = values
    return state


def rule_of(optimizer: Any) -> Rule | None:
    """The rule that says which states are signed, also of derived classes; None where no rule has them."""
    if isinstance(optimizer, BlockwiseOptimizer):
        return optimizer.rule
    if is_bitsandbytes(optimizer):
        return rules_by_operator()[optimizer.optimizer_name]
    return rule_named(type(optimizer).__name__)


def _slots(optimizer: Any) -> Iterable[tuple[int, str]]:
    """The states that are kept under 1 and under 2."""
    return enumerate(rules_by_operator()[optimizer.optimizer_name].states, start=1)


def _init_state(self: Any, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
    self.mng.index2config[gindex, pindex] = self.mng.pid2config.get(id(p), {})  # where some versions look
    with past_guards():
        type(self).init_state(self, group, p, gindex, pindex)
    for slot in (1, 2):
        self.state[p].pop(f"qmap{slot}", None)


def _update_step(self: Any, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
    state, rule = self.state[p], rules_by_operator()[self.optimizer_name]
    if not p.numel():
        state["step"] += 1
        return
    signs = rule.states.values() if "absmax1" in state else ()
    maps = {f"qmap{slot}": blocks.codebook(sign, p.device).values for slot, sign in enumerate(signs, 1)}
    # Operators change it unseen by autograd, and replicated parameters follow its changes.
    increment_version(p)
    state.update(maps)
    with past_guards():
        type(self).update_step(self, group, p, gindex, pindex)
    for key in maps:
        del state[key]
