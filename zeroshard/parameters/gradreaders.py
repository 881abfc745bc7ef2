"""Code that reads gradients of sharded parameters: refused or warned if it takes slices for wholes."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from zeroshard.parameters import counts
from zeroshard.parameters.state import refuse_in_step

_GRAD_READERS = {
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"): "engine.clip_grad_norm_(max_norm) or "
    "Config(clip_grad_norm=...)",
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_"): "engine.clip_grad_norm_(max_norm), whose norm is "
    "that of all ranks,",
    ("torch.amp.grad_scaler", "_unscale_grads_"): "Precision(param_dtype='float16', loss_scale=...) with "
    "engine.backward(loss) and engine.step(), or bfloat16, which needs no scaling,",
}
"""Functions of torch that would take a slice of the gradient for the whole, with the call to use instead."""

_GRAD_CHANGERS = {*_GRAD_READERS, ("torch.nn.utils.clip_grad", "clip_grad_value_")}
"""Functions of torch between backward and step, which find no gradient once units have been stepped."""
_GRAD_FORGETTERS = {("torch.nn.modules.module", "zero_grad"), ("torch.optim.optimizer", "zero_grad")}
"""Functions of torch that drop gradients, and leave alone those whose `grad` is None."""

QUIET: dict[int, tuple[CodeType, bool]] = {}
"""Code that reads gradients and has nothing to be told, by its id: the code, which keeps the id its own, and
False if that holds only while no sums wait for a later reduction."""
_MOST = 4096


def _classify(frame: FrameType) -> None:
    """Note code that `check_reader` has nothing to say of, now or later."""
    code = frame.f_code
    reader = (frame.f_globals.get("__name__", ""), code.co_name)
    if reader in _GRAD_CHANGERS or "norm" in code.co_names or code.co_name.startswith("<"):
        return
    if len(QUIET) >= _MOST:  # code that is made anew again and again
        QUIET.clear()
    QUIET[id(code)] = code, reader not in _GRAD_FORGETTERS and "zero_" not in code.co_names


def check_reader(parameter: Any, frame: FrameType | None) -> None:
    """Refuse the functions of torch that would take a slice of the gradient for the whole; warn of norms."""
    if frame is not None:
        _classify(frame)
        if "norm" in frame.f_code.co_names:
            counts.warn_of_line(parameter, frame)
    while frame is not None and frame.f_code.co_name.startswith("<"):
        frame = frame.f_back  # a comprehension has a frame of its own on Python 3.11
    if frame is None or not hasattr(parameter, "is_partial"):  # a slice in another dtype
        return
    reader = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
    if reader in _GRAD_CHANGERS:
        refuse_in_step(parameter.state, reader[1] + "()")
    if parameter.state.has_sums:
        if reader in _GRAD_FORGETTERS:
            parameter.state.forget_gradient(parameter)
        elif "zero_" in frame.f_code.co_names:
            counts.warn_of_zeros(parameter, frame)
    if parameter.is_partial and reader in _GRAD_READERS:
        raise RuntimeError(
            f"{'.'.join(reader)} would see only this rank's slice of the gradient of '{parameter.fqn}'; "
            f"use {_GRAD_READERS[reader]} instead"
        )
