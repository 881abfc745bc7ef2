"""The functions of the commands, each in a module that is imported when the command runs.

torch alone takes a second or two to import, and the parts of it that write checkpoints as long again.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from typing import cast

_HOMES = {
    "export": ("checkpoints", "export"),
    "inspect": ("checkpoints", "inspect"),
    "estimate": ("planning", "plan"),
    "mesh": ("ranks", "show_groups"),
    "plan": ("pipelines", "plan_pipeline"),
    "doctor": ("doctor", "examine"),
    "chat": ("chat", "chat"),
}
"""The module in this folder, and the function in it, by the name of the command."""


def load_command(name: str) -> Callable[[Namespace], None]:
    """Import the function of a command. It takes the parsed options."""
    module, function = _HOMES[name]
    return cast(Callable[[Namespace], None], getattr(import_module(f"zeroshard.cli.{module}"), function))
