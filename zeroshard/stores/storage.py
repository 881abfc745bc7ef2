"""Memory that is freed and allocated again under its views.

Autograd keeps views of parameters from forward to backward, so the storage stays and only its memory goes.
A view that somebody else has kept would make a kernel read at address 0, and the process would end. torch
2.14 can raise an error instead, 2.11 cannot.
tests/sharding/test_storage.py notices a change of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CAN_FORBID = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def release(tensor: Tensor, message: str) -> None:
    """Free the memory under a tensor. A read of the tensor, or of a view, then raises a RuntimeError.

    Args:
        tensor: a tensor over a storage that is all its own.
        message: the message of that error.
    """
    storage = tensor.untyped_storage()
    try:
        storage.resize_(0)
    except RuntimeError as error:  # an array of NumPy holds the memory
        raise RuntimeError(f"{message} (torch: {str(error).splitlines()[0]})") from None
    if _CAN_FORBID:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def allocate(tensor: Tensor, num_bytes: int) -> None:
    """Allocate memory again for a tensor and its views."""
    storage = tensor.untyped_storage()
    if _CAN_FORBID:
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    storage.resize_(num_bytes)


def count_views(tensor: Tensor) -> int:
    """Count the tensors over the storage of a tensor, including itself and those that autograd keeps."""
    storage = tensor.untyped_storage()  # counts, too
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
