"""The floating-point operations of a step: all that run, and the model's alone.

    of the model     the forward and the backward as the formulas of the model have them
    outside of it    forwards that run again, scores that a kernel of attention computes again, and the
                     products of an optimizer such as Muon

Chowdhery et al. 2022, PaLM, appendix B, divide the first by the time for the model FLOPs utilization (MFU),
and all for the hardware FLOPs utilization (HFU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from zeroshard.internals.autograd import is_in_second_forward


class Flops(NamedTuple):
    """Floating-point operations."""

    all: int
    """The operations that ran."""
    of_model: int
    """The operations among them that the model needs."""


class FlopCounter:
    """Counts the operations of matrix products, convolutions and attention while it is on.

    Args:
        is_beside: returns True while what runs is not of the model: an optimizer, an action of recomputation.
    """

    def __init__(self, is_beside: Callable[[], bool]) -> None:
        self._is_beside, self._of_model = is_beside, 0
        own: dict[Any, Any] = {op: self._noted(formula, formula) for op, formula in flop_registry.items()}
        for name in _KERNELS_OF_ATTENTION:
            kernel, backward = (
                getattr(torch.ops.aten, f"_scaled_dot_product_{name}{end}") for end in ("", "_backward")
            )
            own[kernel] = self._noted(_of_attention, _of_attention)
            own[backward] = self._noted(_of_its_backward, _of_the_backward_alone)
        self._mode: Any = FlopCounterMode(display=False, custom_mapping=own)

    def begin(self) -> None:
        """Begin to count."""
        self._mode.__enter__()

    def stop(self) -> Flops | None:
        """Stop to count and return the operations; a second call returns None."""
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        mode.__exit__(None, None, None)
        return Flops(mode.get_total_flops(), self._of_model)

    def _noted(self, formula: Callable[..., int], of_model: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **kwargs: Any) -> int:
            number = formula(*args, **kwargs)
            if not (self._is_beside() or is_in_second_forward(sys._getframe())):
                self._of_model += number if of_model is formula else of_model(*args, **kwargs)
            return number

        count._get_raw = True  # type: ignore[attr-defined] # torch gives it tensors, not shapes
        return count


_KERNELS_OF_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
"""torch counts kernels of GPUs alone; torch 2.11 refuses queries with more heads than keys have."""


def _of_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products, of queries with keys and of scores with values; all are [batch, heads, length, size]."""
    return _of_product(query, key) * (query.shape[3] + value.shape[3])


def _of_its_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Five products: the scores once more, and the gradients of values, scores, queries and keys."""
    return _of_product(query, key) * (3 * query.shape[3] + 2 * value.shape[3])


def _of_the_backward_alone(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Four of these products: the forward has made the scores."""
    return _of_product(query, key) * (2 * query.shape[3] + 2 * value.shape[3])


def _of_product(query: Tensor, key: Tensor) -> int:
    """The operations of a product of queries with keys, for each element of a head."""
    return 2 * prod(query.shape[:3]) * key.shape[2]
