"""Tell who issued an operation, by the innermost frame that says something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import zeroshard

_ENGINE = str(Path(zeroshard.__file__).parent) + "/"
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + "/"
_LAYERS = str(Path(torch.__file__).parent / "nn") + "/"


class _Place(NamedTuple):
    """A function, by how much it says."""

    code: CodeType
    name: str | None
    """Of code of the engine or of an optimizer, for findings."""
    outer: str | None
    """Of a layer or a scenario, which says less."""


_places: dict[int, _Place] = {}
"""By the address of the code: its hash goes through all instructions, and each operation asks for many."""


def _place_of(code: CodeType) -> _Place:
    path, name, outer = code.co_filename, None, None
    if path.startswith(_ENGINE):
        name = f"zeroshard/{path.removeprefix(_ENGINE)}({code.co_name})"
    elif path.startswith(_OPTIMIZERS):
        name = f"torch/optim({code.co_name})"
    elif path.startswith(_LAYERS) or "/scenarios/" in path:
        outer = f"{Path(path).name}({code.co_name})"
    return _places.setdefault(id(code), _Place(code, name, outer))


def caller() -> str:
    """The code of the engine or of an optimizer that is running, else a layer or a scenario.

    Returns:
        "zeroshard/FILE(FUNCTION):LINE", or the like.
    """
    frame: FrameType | None = sys._getframe(2)
    outer: str | None = None
    while frame is not None:
        code = frame.f_code
        place = _places.get(id(code)) or _place_of(code)
        if place.name is not None:
            return f"{place.name}:{frame.f_lineno}"
        if outer is None and place.outer is not None:
            outer = f"{place.outer}:{frame.f_lineno}"
        frame = frame.f_back
    return outer or "autograd"
