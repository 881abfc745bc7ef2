"""Functions of torch by what they do to a parameter: which of them a slice can take part in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_FUNCTIONS = frozenset(
    function
    for namespace in (F, torch, Tensor)
    for name in (
        *("linear", "bilinear", "embedding", "embedding_bag", "layer_norm", "rms_norm", "group_norm"),
        *("batch_norm", "instance_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "prelu"),
        *("conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "cross_entropy"),
        *("multi_head_attention_forward", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm"),
        *("t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "adjoint"),
        *("addmm", "addmv", "baddbmm", "addbmm", "einsum", "tensordot", "chain_matmul", "multi_dot"),
    )
    if callable(function := getattr(namespace, name, None))
)
"""Functions that compute with a whole weight: refused for a slice even if the shapes happen to fit."""


CASTS = frozenset(
    (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as)
)

KINDS = frozenset((torch.is_complex, torch.is_floating_point, Tensor.is_complex, Tensor.is_floating_point))
"""The questions that optimizers ask of each parameter in each step; slice and whole answer alike."""
ARITHMETIC = frozenset(
    getattr(Tensor, name)
    for name in ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "copy_", "zero_", "clamp_")
)
"""The arithmetic of optimizers with one parameter at a time."""


# Compared with ==: each access of a getter makes a new object.
GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
SET_GRAD = (Tensor.grad.__set__, Tensor.grad.__delete__)  # type: ignore[union-attr]
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
CHANGES = frozenset((SET_DATA, SET_REQUIRES_GRAD, Tensor.requires_grad_))
PARTS = frozenset((Tensor.__getitem__, Tensor.T.__get__))  # type: ignore[attr-defined]
"""The parts that models take of a weight before they compute with it; meaningless for a slice."""

DESCRIBES = frozenset(
    getattr(Tensor, name)
    for name in (
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr"),
        *("is_floating_point", "is_complex", "is_contiguous", "get_device", "untyped_storage"),
        *("__len__", "__hash__", "__repr__", "register_hook", "requires_grad_"),
    )
)
VALUES = frozenset(
    getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag", "grad")
)
