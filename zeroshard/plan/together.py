"""Units of several modules, which `units=` lists by name: one gather for a norm and a head, for example.

Each module's forward is a call of the unit, as if one module were called several times. The parameters stay
gathered from one call to the next if no other unit runs in between.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import nn


class Together(NamedTuple):
    """Modules that become one unit."""

    name: str
    """Their names, joined by "+"."""
    modules: tuple[nn.Module, ...]
    """The modules in the order of registration."""
    reason: str = "listed together in units="


def find_together(root: nn.Module, policy: Any, chosen: Container[nn.Module]) -> dict[nn.Module, Together]:
    """The lists of module names in `units=`, by each of their modules.

    Args:
        root: the model.
        policy: the value of `units=`; its entries may be lists of names.
        chosen: modules that are units by their class.

    Raises:
        ValueError: a name that no module has; a module that is in two units, is a list, or holds another one.
    """
    found: dict[nn.Module, Together] = {}
    entries = () if policy is None or callable(policy) else policy
    for names in (entry for entry in entries if not isinstance(entry, str)):
        group = _read(root, names)
        for module in group.modules:
            if module in chosen or module in found:
                raise ValueError(
                    f"config key 'units': expected each module in one unit, got a module of {list(names)} "
                    "that is in another unit too"
                )
            found[module] = group
    return found


def _read(root: nn.Module, names: Sequence[str]) -> Together:
    known = dict(root.named_modules())
    for name in names:
        if name not in known or known[name] is root:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"config key 'units': the model has no module named '{name}'{hint}")
        if type(known[name]).forward is nn.Module.forward:
            raise ValueError(
                f"config key 'units': '{name}' is a {type(known[name]).__name__}, whose forward is never "
                "called; name the modules in it"
            )
    modules = {known[name]: name for name in sorted(names, key=list(known).index)}
    for module, name in modules.items():
        if not modules.keys().isdisjoint(set(module.modules()) - {module}):
            raise ValueError(
                f"config key 'units': expected modules beside each other, got '{name}' and a "
                f"module inside it in {list(names)}"
            )
    return Together("+".join(modules.values()), tuple(modules))
