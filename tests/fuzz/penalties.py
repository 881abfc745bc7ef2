"""A part of a loss that is made of derivatives of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.blocks import Gate, says_yes
from tests.fuzz.models import Net, prediction_of, random_inputs

Predict = Callable[[Tensor], Tensor]
"""[batch, ...] -> the prediction [batch, length, outputs]."""


def penalty(predict: Predict, inputs: Tensor) -> Tensor:
    """0-dim float32: of the gradients of the inputs, by torch.autograd.grad with create_graph.

    Args:
        predict: a forward of the model, in evaluation mode.
        inputs: [batch, ...]
    """
    inputs = inputs.detach().requires_grad_()
    total = predict(inputs).square().sum()
    slopes = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)[0]
    return 0.1 * slopes.float().square().mean()


def can_compute(model: Net, dtype: torch.dtype | None) -> bool:
    """Whether plain PyTorch computes the penalty of a model, with its gradients, whatever blocks are called.

    It does not of what is not differentiable twice.

    Args:
        model: is left alone.
        dtype: of all parameters inside a forward; None: each has its own.
    """
    model, generator = copy.deepcopy(model).eval(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    for module in model.modules():
        if isinstance(module, Gate):
            module.forward = _inside(module)
    inputs = random_inputs(model.kind, 2, generator)
    if dtype and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    called = tuple(range(len(model.blocks)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = penalty(lambda x: prediction_of(model(x, called=called)), inputs)
            (value + model.offset.float().sum()).backward()
        except (RuntimeError, ValueError, NotImplementedError):
            return False
    return True


def _inside(gate: Gate) -> Callable[[Tensor], Tensor]:
    """A forward of a gate that looks at the data but is always open."""

    def forward(x: Tensor) -> Tensor:
        says_yes(x)
        return gate.inside(x)

    return forward
