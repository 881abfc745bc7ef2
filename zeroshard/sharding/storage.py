"""Memory that is given back and taken again while tensors view it.

Autograd keeps views of parameters from forward to backward, so the storage stays and only its memory goes.
A view of it that somebody else has kept would make a kernel read at address 0, which ends the process;
torch 2.14 can raise an error there instead, 2.11 cannot. Under `no_grad` nobody but the user keeps a view.
tests/sharding/test_storage.py notices a change in what torch offers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CAN_FORBID = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def release(tensor: Tensor, message: str) -> None:
    """Give back the memory under a tensor. Who reads it, or a view of it, gets a RuntimeError.

    Args:
        tensor: over a storage that is all its own.
        message: of that error.
    """
    storage = tensor.untyped_storage()
    try:
        storage.resize_(0)
    except RuntimeError as error:  # an array of NumPy holds the memory
        raise RuntimeError(f"{message} (torch: {str(error).splitlines()[0]})") from None
    if _CAN_FORBID:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def allocate(tensor: Tensor, num_bytes: int) -> None:
    """Take memory again for a tensor and its views."""
    storage = tensor.untyped_storage()
    if _CAN_FORBID:
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    storage.resize_(num_bytes)


def share_storage(one: Tensor, other: Tensor) -> bool:
    """True if two tensors lie in one storage, whose memory may be given back at the moment."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def count_views(tensor: Tensor) -> int:
    """The tensors over the storage of a tensor, itself and those that autograd keeps included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
