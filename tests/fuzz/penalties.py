"""Parts of a loss that are made of derivatives of the model, by torch.func or by autograd."""

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


def _directions(predict: Predict, inputs: Tensor) -> Tensor:
    return torch.func.jvp(predict, (inputs,), (inputs.flip(0) + 1,))[1]


def _samples(predict: Predict, inputs: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: predict(x[None])[0])(inputs)


def _gradients_of_samples(predict: Predict, inputs: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: predict(x[None]).sum()))(inputs)


def _gradients(predict: Predict, inputs: Tensor) -> Tensor:
    return torch.func.grad(lambda x: predict(x).square().sum())(inputs)


def _gradients_of_gradients(predict: Predict, inputs: Tensor) -> Tensor:
    inputs = inputs.detach().requires_grad_()
    total = predict(inputs).square().sum()
    return torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)[0]


PENALTIES: dict[str, Callable[[Predict, Tensor], Tensor]] = {
    "jvp": _directions,
    "vmap": _samples,
    "vmap of grad": _gradients_of_samples,
    "grad": _gradients,
    "autograd.grad": _gradients_of_gradients,
}


def penalty(kind: str, predict: Predict, inputs: Tensor) -> Tensor:
    """0-dim float32. The model should be in evaluation mode: what changes buffers is refused by torch.func.

    Args:
        kind: a key of PENALTIES.
        predict: a forward of the model.
        inputs: [batch, ...]
    """
    return 0.1 * PENALTIES[kind](predict, inputs.detach()).float().square().mean()


def can_compute(kind: str, model: Net, dtype: torch.dtype | None) -> bool:
    """Whether plain PyTorch computes a penalty of a model, with its gradients, whatever blocks are called.

    It does not of what looks at data inside vmap, saves tensors with hooks inside grad, or is not
    differentiable twice.

    Args:
        kind: a key of PENALTIES.
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
            value = penalty(kind, lambda x: prediction_of(model(x, called=called)), inputs)
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
