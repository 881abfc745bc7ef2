"""Weight gradients that wait: a backward in two halves, first the gradients of inputs, then of weights.

    forward           y = x W^T
    input gradient    dL/dx = dL/dy W        keeps x and dL/dy: the operands of the other half
    weight gradient   dL/dW = dL/dy^T x      gives it to W, as any backward does

The two halves together compute each product of matrices once. Only products of layers wait, as they take
almost all of the time: the gradients of biases, norms and embeddings belong to the first half, as does every
operation that is not known here. Compiled layers, and layers under torch.autocast, do all in their first
half: it is a whole backward.

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from zeroshard.sharding.context import Changes


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
                changes.around(module, "products", self._seen)

    @contextmanager
    def deferring(self, waiting: Waiting) -> Iterator[None]:
        """Leave the weight gradients of the products inside to `waiting`.

        A forward, and the first half of its backward: an activation checkpoint computes there again.
        """
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None

    def _seen(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # before `_waiting`, on whose changes code would be made again
                return forward(*args, **kwargs)
            waiting = self._waiting
            if waiting is None or not torch.is_grad_enabled():
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


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if the weight gradient of a product can be computed by itself.

    A weight may be a parameter or a view of one. The graph of any other weight is needed in both halves.
    """
    # A cast weight is no parameter; a run without memory casts none.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return False
    is_plain = type(x) is Tensor and x.ndim > 1 and (bias is None or bias.ndim == 1)
    is_trained = weight.requires_grad and weight.is_floating_point() and weight.ndim == 2
    base = weight._base if weight._is_view() else None
    return is_plain and is_trained and (weight.is_leaf or (base is not None and base.is_leaf))


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return (input, weight) if bias is None else (input, weight, bias)


class _Sight(TorchFunctionMode):
    """Sees the operations of a layer; see [Note: Products are seen where layers compute them]."""

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._waiting = waiting

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product: tuple[Any, ...] = ()
        if func is F.linear:
            product = _of_linear(*args, **kwargs)
        elif func is torch.addmm and len(args) == 3 and not kwargs:  # it may have factors
            product = args[1], args[2], args[0]
        if not product or not _can_wait(*product):
            return func(*args, **kwargs)
        x, weight, *bias = product
        anchor = None
        if not any(one.requires_grad for one in (x, *bias)):
            anchor = x.new_empty(0, requires_grad=True)  # the result is to have a graph
        operands = self._waiting.note(weight, func is torch.addmm)
        run = functools.partial(func, *args, **kwargs)
        return _Halved.apply(x, *(bias or [None]), anchor, weight.detach(), operands, run)


class _Halved(torch.autograd.Function):
    """A product whose backward computes the gradients of the input and the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Any, _: Any, weight: Tensor, operands: _Operands, run: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.operands = operands
        result: Tensor = run().detach()  # autograd refuses to edit a view that was made without a graph
        return result

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
        return of_x, of_bias, None, None, None, None


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
