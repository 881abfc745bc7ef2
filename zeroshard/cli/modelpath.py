"""A model that a function of the user builds, without memory."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch
from torch import nn


def build_model(path: str) -> nn.Module:
    """Import a function or a class and call it on the meta device.

    Args:
        path: package.module:name; modules in the current directory are found, too.

    Raises:
        ValueError: it cannot be imported, raises an error, or gives no module.
    """
    module_name, _, name = path.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        make = import_module(module_name)
        for part in name.split("."):
            make = getattr(make, part)
        with torch.device("meta"):
            model = make if isinstance(make, nn.Module) else make()  # type: ignore[operator]
    except Exception as error:  # of any kind, as the code is the user's
        raise ValueError(f"'{path}': {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"'{path}': expected a function that returns a model, got {type(model).__name__}")
    return model
