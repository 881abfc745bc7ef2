"""Weight gradients that wait: a backward in two halves, first the gradients of inputs, then those of weights.

    forward           y = x W^T
    input gradient    dL/dx = dL/dy W        keeps x and dL/dy: the operands of the other half
    weight gradient   dL/dW = dL/dy^T x      gives it to W, as any backward does

The two halves together compute each product of matrices once. Only products of layers wait, as they take
almost all of the time: the gradients of biases, norms and embeddings belong to the first half, as does every
operation that is not known here. Compiled layers are not seen, so their first half is a whole backward.

[Note: Products are seen where layers compute them]
A layer here is a module whose modules inside have no parameters, and that has a matrix. While it computes, a
mode of torch sees its operations, and takes over `linear` and `addmm` with a trained matrix. So divided
layers, adapters and layers of other libraries need no code of their own. The alternatives: a mode around the
whole chunk is called for each operation of the model; forwards of our own, one for each class of layers, miss
the layers that other parts of zeroshard have changed.

[Note: Weight gradients have the bits of autograd]
Autograd multiplies in an order that depends on the strides of the operands. Both halves follow its rules
(`mm_mat1_grad` and `mm_mat2_grad` of torch), and a weight that is used twice gets its summands in the same
order. So schedules with whole and with divided backwards agree to the bit.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from zeroshard.internals.autograd import is_transformed
from zeroshard.sharding.changes import Changes


class Waiting:
    """The weight gradients of one chunk and micro-batch that wait."""

    def __init__(self) -> None:
        self._weights: list[tuple[Tensor, _Operands]] = []
        """An empty value for each product, whose backward computes the weight gradient; and its operands."""

    def note(self, weight: Tensor, is_turned: bool) -> _Operands:
        """Note that a product begins.

        Args:
            weight: the matrix, [out, in].
            is_turned: True if it is [in, out].

        Returns:
            The operands of its weight gradient, to be filled by the first half of the backward.
        """
        operands = _Operands(is_turned, weight)
        self._weights.append((_Weight.apply(weight, operands), operands))
        return operands

    def compute(self) -> None:
        """Compute the gradients and give them to the weights; those without operands have none."""
        weights, self._weights = self._weights, []
        values = [value for value, operands in weights if operands.kept]
        if values:
            torch.autograd.backward(values, [value.detach() for value in values])


class Products:
    """The products of a model's layers, whose weight gradients can be made to wait.

    Args:
        model: the model, with all other changes of its forwards.
        changes: notes the changes of forwards that are made here.
    """

    def __init__(self, model: nn.Module, changes: Changes) -> None:
        self._waiting: Waiting | None = None
        for module in model.modules():
            if _is_layer(module):
                changes.set(module, "forward", self._seen(module.forward))

    @contextmanager
    def leaving(self, waiting: Waiting) -> Iterator[None]:
        """Leave the weight gradients of the products inside to `waiting`.

        A forward, and the first half of its backward: an activation checkpoint computes there again.
        """
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None

    def _seen(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # before `_waiting`, on whose changes code would be made again
                return forward(*args, **kwargs)
            waiting = self._waiting
            if waiting is None or not torch.is_grad_enabled() or is_transformed():
                return forward(*args, **kwargs)
            with _Sight(waiting):
                return forward(*args, **kwargs)

        return seen


def _is_layer(module: nn.Module) -> bool:
    """True for a module that computes with a trained matrix, and has no parameters in modules inside."""
    own = list(module.parameters(recurse=False))
    if len(own) < len(list(module.parameters())):
        return False
    return any(p.requires_grad and len(getattr(p, "full_shape", p.shape)) > 1 for p in own)


class _Product(NamedTuple):
    """A product of matrices: x times a weight, and perhaps a bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    is_turned: bool
    """True if the weight is [in, out]."""

    def compute(self) -> Tensor:
        """Return the result, by the operation that the layer has called."""
        if not self.is_turned:
            return F.linear(self.x, self.weight, self.bias)
        assert self.bias is not None, "an argument of addmm"
        return torch.addmm(self.bias, self.x, self.weight)

    @property
    def can_wait(self) -> bool:
        """True if the weight gradient can be computed by itself.

        A weight may be a parameter or a view of one. The graph of any other weight is needed in both halves.
        """
        x, weight, bias = self.x, self.weight, self.bias
        is_plain = type(x) is Tensor and x.ndim > 1 and (bias is None or bias.ndim == 1)
        is_trained = weight.requires_grad and weight.is_floating_point() and weight.ndim == 2
        base = weight._base if weight._is_view() else None
        return is_plain and is_trained and (weight.is_leaf or (base is not None and base.is_leaf))

    def cast(self) -> _Product:
        """Return the product with the operands to which autocast casts them."""
        kind = self.x.device.type
        if not torch.is_autocast_enabled(kind):
            return self
        dtype = torch.get_autocast_dtype(kind)

        def to(value: Tensor) -> Tensor:
            return value if value.dtype is torch.float64 else value.to(dtype)

        return self._replace(
            x=to(self.x), weight=to(self.weight), bias=None if self.bias is None else to(self.bias)
        )


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Product:
    return _Product(input, weight, bias, is_turned=False)


def _read_addmm(*args: Any, **kwargs: Any) -> _Product | None:
    if len(args) != 3 or kwargs:  # it may have factors
        return None
    bias, x, weight = args
    return _Product(x, weight, bias, is_turned=True)


_READERS: Mapping[Any, Callable[..., _Product | None]] = {F.linear: _read_linear, torch.addmm: _read_addmm}


class _Sight(TorchFunctionMode):
    """Sees the operations of a layer; see [Note: Products are seen where layers compute them]."""

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._waiting = waiting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (read := _READERS.get(func)) is not None:
            product = read(*args, **kwargs)
            if product is not None and product.can_wait:
                return _compute(product.cast(), self._waiting)
        return func(*args, **kwargs)


def _compute(product: _Product, waiting: Waiting) -> Tensor:
    operands = waiting.note(product.weight, product.is_turned)
    x, bias, anchor = product.x, product.bias, None
    if not (x.requires_grad or (bias is not None and bias.requires_grad)):
        anchor = x.new_empty(0, requires_grad=True)  # the result is to have a graph
    result: Tensor = _Halved.apply(x, bias, anchor, product, operands)
    return result


class _Halved(torch.autograd.Function):
    """A product whose backward computes the gradients of the input and the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, _: Tensor | None, product: _Product, operands: _Operands
    ) -> Tensor:
        ctx.save_for_backward(x, product.weight.detach())
        ctx.operands = operands
        return product.compute().detach()  # autograd refuses to edit a view that was made without a graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, by_rows = _rows(x), _rows(gradient)
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            other = weight if ctx.operands.is_turned else weight.t()
            of_x = _first_gradient(by_rows, rows, other).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            of_bias = by_rows if x.is_contiguous() else gradient  # autograd adds up the other dimensions
        ctx.operands.kept = rows, by_rows
        return of_x, of_bias, None, None, None


class _Operands:
    """The operands of a weight gradient: x and the gradient of the result, [n, in] and [n, out]."""

    __slots__ = ("is_column_major", "is_turned", "kept")

    def __init__(self, is_turned: bool, weight: Tensor) -> None:
        self.is_turned = is_turned
        self.is_column_major = _is_column_major(weight if is_turned else weight.t())
        self.kept: tuple[Tensor, ...] = ()

    def take_gradient(self) -> Tensor:
        """Return the gradient of the weight, and let go of the operands."""
        (rows, by_rows), self.kept = self.kept, ()
        found = by_rows.t().mm(rows).t() if self.is_column_major else rows.t().mm(by_rows)
        return found if self.is_turned else found.t()


class _Weight(torch.autograd.Function):
    """An empty value, whose backward is the second half of a product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, operands: _Operands) -> Tensor:
        ctx.operands = operands
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.operands.take_gradient(), None


def _first_gradient(gradient: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The gradient of the first operand of `mm(first, second)`."""
    if _is_column_major(first):
        return second.mm(gradient.t()).t()
    return gradient.mm(second.t())


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


def _rows(value: Tensor) -> Tensor:
    """A matrix of the last dimension."""
    return value.reshape(-1, value.shape[-1])
