"""Torch's dispatch to `__torch_function__` of subclasses, switched off. Nothing public offers it.

tests/parameters/test_parameter.py notices a change.
"""

from __future__ import annotations

import torch

past_guards = torch._C.DisableTorchFunctionSubclass
"""A context in which functions take sharded parameters as plain tensors."""

compute_past_guards = torch._C._disabled_torch_function_impl
"""(function, types, args, kwargs) -> the result of the function, called in that context."""
