"""Tell who issued an operation, by the innermost frame that says something."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

import zeroshard

_ENGINE = str(Path(zeroshard.__file__).parent) + "/"
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + "/"
_LAYERS = str(Path(torch.__file__).parent / "nn") + "/"


@cache
def _name(code: CodeType) -> str | None:
    """The code in a finding; None for code that tells nothing."""
    path = code.co_filename
    if path.startswith(_ENGINE):
        return f"zeroshard/{path.removeprefix(_ENGINE)}({code.co_name})"
    if path.startswith(_OPTIMIZERS):
        return f"torch/optim({code.co_name})"
    return None


@cache
def _outer_name(code: CodeType) -> str | None:
    path = code.co_filename
    return f"{Path(path).name}({code.co_name})" if path.startswith(_LAYERS) or "/scenarios/" in path else None


def caller() -> str:
    """The code of the engine or of an optimizer that is running, else a layer or a scenario.

    Returns:
        "zeroshard/FILE(FUNCTION):LINE", or the like.
    """
    frame: FrameType | None = sys._getframe(2)
    outer: str | None = None
    while frame is not None:
        code = frame.f_code
        if (name := _name(code)) is not None:
            return f"{name}:{frame.f_lineno}"
        if outer is None and (name := _outer_name(code)) is not None:
            outer = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return outer or "autograd"
