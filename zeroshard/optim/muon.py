"""Muon: the steps of matrices are made orthogonal, and AdamW steps all else; the groups of a model for it.

A step of the matrices has three phases:

    momentum        element by element, of each slice by itself
    orthogonalize   of whole matrices, for all groups together: each on one rank, see `stepping/wholes.py`
    apply           weight decay and the updates, slice by slice
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from zeroshard.optim.ranges import FLAG, Ranges, betas_range, called, check_ranges, dense, number_range
from zeroshard.parallel.pipeline.chunked import Absent
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.plan.names import fitting
from zeroshard.stepping.wholes import Deferred, Key, Shape, Wholes, whole_shape, wholes_here

Split = int | tuple[int, ...] | None
"""The matrices that the rows of a fused one consist of: how many of equal size, or the rows of each."""

_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
"""The factors of the learning rate by the shape of a matrix, as `torch.optim.Muon` has them."""

_MOST_STEPS = 99
"""The limit of `torch.optim.Muon`."""


def _is_split(split: Any) -> bool:
    sizes = split if isinstance(split, tuple) else (1 if split is None else split,)
    return bool(sizes) and all(type(size) is int and size >= 1 for size in sizes)


_RANGES: Ranges = {
    "use_muon": FLAG,
    "lr": number_range(),
    "weight_decay": number_range(),
    "eps": number_range(),
}
_OF_MUON: Ranges = {
    "momentum": number_range(below=1.0),
    "nesterov": FLAG,
    "ns_coefficients": (lambda x: isinstance(x, Sequence) and len(x) == 3, "three numbers"),
    "ns_steps": (lambda x: type(x) is int and 0 <= x <= _MOST_STEPS, f"an integer in [0, {_MOST_STEPS}]"),
    "adjust_lr_fn": (lambda x: x in (None, *_RATIOS), f"{', '.join(map(repr, _RATIOS))} or None"),
    "split": (_is_split, "a number of matrices, a tuple of their rows, or None"),
}
"""The hyperparameters of groups with `use_muon=True` alone."""
_OF_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
"""The hyperparameters of groups with `use_muon=False`, with the defaults of torch's AdamW."""

_HEADS = frozenset(("lm_head", "head", "output", "embed_out", "unembed", "classifier", "score"))
"""Names of the module that makes the output of a model, in the libraries that people use."""

_COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""The part that peft adds to the name of a module that it trains along with adapters."""


def orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Bring the singular values of a matrix near 1, by a Newton-Schulz iteration of fifth order.

    With X = G / |G| (the transpose, if G has more rows than columns) and coefficients a, b, c, each step is
    X = a X + (b X Xᵀ + c (X Xᵀ)²) X. It computes in bfloat16, by the same operations as `torch.optim.Muon`.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Args:
        matrix: G, [rows, columns].
        coefficients: (a, b, c).
        num_steps: steps of the iteration.
        eps: the least norm that is divided by.

    Returns:
        [rows, columns] bfloat16.
    """
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16, copy=True)
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def orthogonalize_cost(shape: Shape) -> int:
    """Return the multiplications and additions of a step of `orthogonalize`, for a matrix of this shape."""
    short, long = min(shape), max(shape)
    return short * short * (4 * long + 2 * short)


@dataclass(slots=True)
class _Matrix:
    """A parameter of one or several matrices, on its way through a step."""

    group: dict[str, Any]
    parameter: Tensor
    shapes: tuple[Shape, ...]
    """The matrices, one after another in memory."""
    update: Deferred = field(init=False)

    @property
    def ratios(self) -> list[float]:
        """The factors of the learning rate of its matrices."""
        ratio = _RATIOS[self.group["adjust_lr_fn"] or "original"]
        return [ratio(*shape) if math.prod(shape) else 1.0 for shape in self.shapes]

    @property
    def ratio(self) -> float | None:
        """The factor that all of its matrices have; None if they have several."""
        ratios = set(self.ratios)
        return ratios.pop() if len(ratios) == 1 else None

    def orthogonalized(self, whole: Tensor, part: int) -> Tensor:
        """Return the update of one of its matrices, in the dtype in which it is sent."""
        group = self.group
        update = orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return update if self.ratio is not None else update.to(whole.dtype).mul_(self.ratios[part])


class Muon(Optimizer):
    """Momentum whose updates are made orthogonal, for the matrices of hidden layers; AdamW for all else.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; as `torch.optim.Muon`. With
    gradient G and weights W of a matrix, momentum μ, weight decay λ, learning rate η:

        B = μ B + (1 - μ) G
        O = orthogonalize((1 - μ) G + μ B), or of B without Nesterov
        W = (1 - η λ) W - η r O

    where r depends on the shape, see `adjust_lr_fn`. Matrices are whole, also where `zeroshard.initialize`
    has sharded them: each is orthogonalized by one rank. Updates travel in bfloat16, the dtype of
    `orthogonalize`, so they are the same bits as without sharding.

    A parameter of 3 dimensions is a stack of matrices, such as the matrices of experts, each by itself.
    Groups with `use_muon=False` are stepped by AdamW; they have `lr`, `betas`, `eps` and `weight_decay`.
    `zeroshard.optim.muon_groups(model)` makes the groups of a model.

    Args:
        params: parameters of 2 or 3 dimensions, or groups; a group may have any of the following by itself.
            Messages have the names of `named_parameters()`, if these are given.
        lr: η.
        weight_decay: λ.
        momentum: μ, in [0, 1).
        nesterov: True for the momentum of Nesterov.
        ns_coefficients: as in `orthogonalize`.
        eps: likewise; in groups of AdamW its ε, 1e-8 by default.
        ns_steps: likewise, below 100.
        adjust_lr_fn: r of a matrix [A, B]: "original", √max(1, A/B), which None means too; "match_rms_adamw",
            0.2 √max(A, B), with which rates that are good for AdamW are good here (Liu et al. 2025, "Muon is
            Scalable for LLM Training"); or "spectral_unclamped", √(A/B).
        split: the matrices that each one of the group consists of, cut between rows: their number if they
            have equal size, or the rows of each, as (q, k, v). None: one.

    Raises:
        ValueError: a hyperparameter is out of its range, or a parameter has no matrices.
    """

    wholes_of: Wholes = staticmethod(wholes_here)

    def __init__(  # noqa: PLR0913 - the arguments of torch.optim.Muon
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: Split = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": split,
        }
        _check_group({**defaults, "use_muon": True})
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own.

        Raises:
            ValueError: a hyperparameter is out of its range, or a parameter of a group of Muon has no
                matrices.
        """
        group = {"use_muon": True, **param_group}
        uses_muon = group["use_muon"]
        if not uses_muon:
            if unknown := sorted(group.keys() & _OF_MUON.keys()):
                raise ValueError(f"a group with use_muon=False is stepped by AdamW; it has no {unknown[0]!r}")
            group = {**_OF_ADAMW, **group}
        _check_group({**self.defaults, **group})
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            if uses_muon:
                _check_matrices(len(self.param_groups) - 1, added)
        except ValueError:
            del self.param_groups[-1]
            raise
        for key in () if uses_muon else _OF_MUON:
            del added[key]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state of torch.optim.Muon does not have them
            for key, value in (("use_muon", True), ("split", None)) if "momentum" in group else ():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: a sparse gradient; a slice of a parameter whose other slices are not known; states
                of Muon in a group of AdamW, or the reverse.
        """
        loss = called(closure)
        for number, group in enumerate(self.param_groups):
            key, states = "momentum_buffer", [self.state.get(parameter) for parameter in group["params"]]
            if any(state and (key in state) != group["use_muon"] for state in states):
                raise RuntimeError(
                    f"group {number} has states of the other value of use_muon: expected the groups in which "
                    "its states were made; or let a parameter begin anew, by del optimizer.state[parameter]"
                )
        matrices: list[_Matrix] = []
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                grads = [dense(p.grad) for p in parameters]
                if group["use_muon"]:
                    matrices += self._advance(group, parameters, grads)
                else:
                    self._step_adamw(group, parameters, grads)
        self._step_muon(matrices)
        return loss

    def _advance(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> list[_Matrix]:
        """Advance the momentum of a group; its matrices, with what is to be made orthogonal of each slice."""
        for parameter, grad in zip(parameters, grads, strict=True):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(grad)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        matrices = []
        for parameter, grad, momentum in zip(parameters, grads, momenta, strict=True):
            matrix = _Matrix(group, parameter, _matrices_of(whole_shape(parameter), group["split"]))
            # Where several factors scale its matrices, the owner does so in the dtype of the parameter.
            dtype = momentum.dtype if matrix.ratio is None else torch.bfloat16
            make = functools.partial(_update_of, grad, momentum, group, dtype)
            matrix.update = Deferred(make, momentum, dtype)
            matrices.append(matrix)
        return matrices

    def _step_muon(self, matrices: Sequence[_Matrix]) -> None:
        if not matrices:
            return

        def compute(wholes: list[Tensor], keys: list[Key]) -> list[Tensor]:
            return [
                matrices[key.parameter].orthogonalized(whole, key.part)
                for whole, key in zip(wholes, keys, strict=True)
            ]

        updates = self.wholes_of(
            [matrix.parameter for matrix in matrices],
            [matrix.update for matrix in matrices],
            compute,
            shapes=[matrix.shapes for matrix in matrices],
            cost=orthogonalize_cost,
        )
        for matrix, update in zip(matrices, updates, strict=True):
            lr, ratio = float(matrix.group["lr"]), matrix.ratio
            matrix.parameter.mul_(1 - lr * matrix.group["weight_decay"])
            matrix.parameter.add_(update, alpha=-(lr if ratio is None else lr * ratio))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        means, squares, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        own = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        betas = {"beta1": beta1, "beta2": beta2}
        adamw(parameters, grads, means, squares, [], steps, amsgrad=False, maximize=False, **betas, **own)


def _update_of(grad: Tensor, momentum: Tensor, group: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Return what is made orthogonal of a slice, from its momentum of this step."""
    return (grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).to(dtype)


def _matrices_of(shape: Shape, split: Split) -> tuple[Shape, ...]:
    """Return the matrices of a parameter, [..., rows, columns], one after another in memory."""
    *stacks, rows, columns = shape
    if split is None:
        parts: tuple[int, ...] = (rows,)
    else:
        parts = split if isinstance(split, tuple) else (rows // split,) * split
    return tuple((part, columns) for _ in range(math.prod(stacks)) for part in parts)


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a hyperparameter that is out of its range."""
    own = _OF_MUON if group["use_muon"] else {"betas": betas_range(2)}
    check_ranges(group, {**_RANGES, **own})


def refuse_ignored(optimizer: Optimizer, ignored: Mapping[nn.Parameter, str]) -> None:
    """Refuse ignored parameters in groups of Muon: their updates need matrices that ranks share.

    Raises:
        ValueError: the name of the first one.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"] if group.get("use_muon") else ():
            if parameter in ignored:
                raise ValueError(
                    f"'{ignored[parameter]}' is ignored, and in group {number}, which Muon steps as whole "
                    "matrices over the ranks: give it to a group with use_muon=False"
                )


def _check_matrices(number: int, group: dict[str, Any]) -> None:
    """Raise ValueError for a parameter of a group of Muon that has no matrices, or others than `split`."""
    names = group.get("param_names") or [None] * len(group["params"])
    for at, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
        name = parameter.fqn if isinstance(parameter, ShardedParameter) else name
        which = f"'{name}'" if name else f"parameter {at} of group {number}"
        shape, split = whole_shape(parameter), group["split"]
        if len(shape) not in (2, 3) or not parameter.is_floating_point():
            raise ValueError(
                f"{which}: expected a matrix of floats, or a stack of matrices, got shape {list(shape)} and "
                f"{parameter.dtype}. Put it into a group with use_muon=False, which AdamW steps, or take the "
                "groups of zeroshard.optim.muon_groups(model)"
            )
        rows = shape[-2]
        if split is not None and (sum(split) != rows if isinstance(split, tuple) else rows % split):
            raise ValueError(f"{which}: split={split!r} does not fill the {rows} rows of shape {list(shape)}")


def muon_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    exclude: Sequence[str] = (),
    split: Mapping[str, int | Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Divide the trained parameters of a model into groups for `zeroshard.optim.Muon`.

    Muon gets the matrices of hidden layers, stacks of matrices such as experts have, and the matrices of
    LoRA. AdamW gets all else: embeddings and the weights tied to them, the last layer, biases, norms and
    convolutions. Embeddings are weights of `nn.Embedding`, and parameters with "embed", "wte" or "wpe" in a
    name; a stack of one is a position or a token, not a matrix. The last layer is what
    `get_output_embeddings()` returns, or has one of the usual names, such as "lm_head".

    Args:
        model: the model, before it is sharded.
        muon: hyperparameters of the groups of Muon.
        adamw: hyperparameters of the group of AdamW.
        exclude: names of parameters or modules that AdamW gets too, or patterns as in `Config.ignored`. A
            tied parameter has several names.
        split: by such patterns, the matrices that a fused one consists of: see `Muon`. A fused projection of
            queries, keys and values is three matrices, and one of gate and up is two.

    Returns:
        The groups, with the names of their parameters; none of them is empty.

    Raises:
        ValueError: no name fits a pattern of `exclude`, or no parameter of Muon one of `split`; or a split
            between rows is asked for a weight [inputs, outputs], whose fused matrices lie beside each other.
    """
    left, transposed = set(_others(model)), _transposed(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(parameter, []).append(name)
    rules: dict[str, int | tuple[int, ...]] = {
        pattern: parts if isinstance(parts, int) else tuple(parts) for pattern, parts in (split or {}).items()
    }
    fits = {pattern: set(fitting(pattern, named)) for pattern in (*exclude, *rules)}
    used: set[str] = set()
    matrices: dict[Split, list[tuple[str, nn.Parameter]]] = {}
    others: list[tuple[str, nn.Parameter]] = []
    for parameter, own in names.items():
        name = own[0]
        excluding = [pattern for pattern in exclude if not fits[pattern].isdisjoint(own)]
        used.update(excluding)
        if not parameter.requires_grad:
            continue
        if excluding or parameter in left or not all(_is_matrix(one, parameter) for one in own):
            others.append((name, parameter))
            continue
        cuts = [pattern for pattern in rules if not fits[pattern].isdisjoint(own)]
        used.update(cuts)
        if cuts and parameter in transposed:
            raise ValueError(
                f"split: '{cuts[0]}' would cut '{name}' between inputs, because it is a weight [inputs, "
                "outputs]; expected patterns for weights [outputs, inputs], as nn.Linear has them"
            )
        matrices.setdefault(rules[cuts[0]] if cuts else None, []).append((name, parameter))
    for key, patterns in (("exclude", exclude), ("split", rules)):
        for pattern in patterns:
            if pattern not in used and not fitting(pattern, tuple(_elsewhere(model))):
                raise ValueError(f"{key}: expected the name of a parameter, got '{pattern}', which fits none")
    groups = [
        {"params": named, "use_muon": True, **(muon or {}), **({} if parts is None else {"split": parts})}
        for parts, named in matrices.items()
    ]
    return [*groups, {"params": others, "use_muon": False, **(adamw or {})}] if others else groups


def _elsewhere(model: nn.Module) -> Iterator[str]:
    """The names of the parameters that other pipeline ranks have."""
    for name, module in model.named_modules():
        if isinstance(module, Absent):
            yield from (f"{name}.{own}" for own in module.names)


def _transposed(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of layers of transformers whose weights are [inputs, outputs], as in GPT-2."""
    layers = (module for module in model.modules() if type(module).__name__ == "Conv1D")
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}


def _others(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of embeddings, of convolutions and of the last layer."""
    find = getattr(model, "get_output_embeddings", None)
    heads = [find()] if callable(find) else []
    for name, module in model.named_modules():
        last = _COPY.sub("", name).rpartition(".")[2]
        is_head = last in _HEADS or any(module is head for head in heads)
        if is_head or isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd):
            yield from module.parameters(recurse=False)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for a matrix, or a stack of several, that is no embedding and no bias."""
    parts = name.split(".")
    is_embedding = any("embed" in part or part in ("wte", "wpe") for part in parts)
    is_stack = parameter.dim() == 3 and len(parameter) > 1
    return (parameter.dim() == 2 or is_stack) and not is_embedding and not parts[-1].endswith("bias")
