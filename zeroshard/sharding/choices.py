"""Lists of modules of which a forward may run a part: read in the source of the class that holds the list.

Ranks that run other parts would wait for each other, so such a list is not cut into units. The signs:

    self.heads[task](x)                         an index that is not the variable of a loop over a range
    for block in self.blocks:
        if torch.rand(()) < 0.1: continue       a step of the loop that may be left out before the call
    for block in self.blocks:
        if is_needed: x = block(x)              a call on one branch alone

A condition of constants, attributes of `self` and loop variables is the same on all ranks. Where there is no
source, there is no sign.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_ALWAYS_CHOOSING: tuple[type[nn.Module], ...] = (nn.AdaptiveLogSoftmaxWithLoss,)
_LISTS_TO_CHOOSE_FROM = frozenset(("experts", "routers"))
"""Names that say so themselves; transformers and most others call the list `experts`."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_STATIC_CALLS = frozenset(("len", "isinstance", "hasattr", "getattr", "range"))


def chosen_among(module: nn.Module) -> set[str]:
    """The names of the children of a module of which its forward may run a part."""
    names = {name for name, child in module._modules.items() if isinstance(child, _CONTAINERS)}
    if isinstance(module, _ALWAYS_CHOOSING):
        return names
    by_name = _LISTS_TO_CHOOSE_FROM & module._modules.keys()
    kind: Any = type(module)
    return {*by_name, *(names & signs_of_choice(kind) if names else ())}


@functools.lru_cache(maxsize=256)
def signs_of_choice(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes from which a method of a class chooses; empty where the source is not known."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module) or base.__module__.startswith("torch.nn."):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                _Method(found).visit_body(function.body, (), {})
    return frozenset(found)


class _Method:
    """Reads the statements of a method.

    Args:
        found: attributes of which it calls a part are added here.
    """

    def __init__(self, found: set[str]) -> None:
        self._found = found

    def visit_body(
        self, body: Sequence[ast.stmt], doubts: tuple[ast.expr, ...], items: dict[str, str | None]
    ) -> None:
        """Read statements in their order.

        Args:
            doubts: conditions of which it depends whether these statements run in each turn of their loop.
            items: the variables of the loops around, with the attribute whose items they are; None: an index.
        """
        for statement in body:
            if isinstance(statement, ast.For):
                self.visit_body(statement.body, (), {**items, **_loop_variables(statement, items)})
            elif isinstance(statement, ast.If):
                self._visit_if(statement, doubts, items)
                if any(isinstance(part, ast.Continue) for part in ast.walk(statement)):
                    doubts = (*doubts, statement.test)
            elif isinstance(statement, ast.With | ast.While | ast.Try):
                self.visit_body(statement.body, doubts, items)
            else:
                for name in _calls(statement, items):
                    self._note(name, doubts, items)

    def _visit_if(
        self, statement: ast.If, doubts: tuple[ast.expr, ...], items: dict[str, str | None]
    ) -> None:
        once, other = _called_in(statement.body, items), _called_in(statement.orelse, items)
        for name in once ^ other:
            self._note(name, (*doubts, statement.test), items)
        for name in once & other:
            self._note(name, doubts, items)
        for branch in (statement.body, statement.orelse):
            self.visit_body([part for part in branch if isinstance(part, ast.For | ast.If)], doubts, items)

    def _note(self, name: str, doubts: Sequence[ast.expr], items: dict[str, str | None]) -> None:
        attribute, is_indexed_by_value = name.rstrip("?"), name.endswith("?")
        if is_indexed_by_value or any(not _is_static(test, items) for test in doubts):
            self._found.add(attribute)


def _called_in(body: Sequence[ast.stmt], items: dict[str, str | None]) -> set[str]:
    return {name for part in body if not isinstance(part, ast.For) for name in _calls(part, items)}


def _calls(statement: ast.AST, items: dict[str, str | None]) -> Iterator[str]:
    """The attributes whose items are called here; with a question mark, by an index that is any value."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call):
            continue
        for part in (node.func, *node.args):  # also handed to checkpoint(block, x)
            if isinstance(part, ast.Name) and (attribute := items.get(part.id)) is not None:
                yield attribute
            elif isinstance(part, ast.Subscript) and (attribute := _attribute_of_self(part.value)):
                used = {name.id for name in ast.walk(part.slice) if isinstance(name, ast.Name)}
                is_fixed = isinstance(part.slice, ast.Slice) or used <= {"self"}
                yield attribute if is_fixed or used & items.keys() else attribute + "?"


def _loop_variables(loop: ast.For, items: dict[str, str | None]) -> dict[str, str | None]:
    """Each variable of a loop over a range or a list of `self`, with the attribute that it goes through."""
    lists = {name for node in ast.walk(loop.iter) if (name := _attribute_of_self(node))}
    names = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    lists |= {name for each in names if (name := items.get(each)) is not None}
    if not lists and "range" not in names:
        return {}
    variables = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
    is_walk = "range" not in names and len(lists) == 1
    return dict.fromkeys(variables, lists.pop() if is_walk else None)


def _attribute_of_self(node: ast.AST) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else None


def _is_static(test: ast.expr, items: dict[str, str | None]) -> bool:
    """True for a condition that is the same on all ranks: of constants, attributes and loop variables."""
    called = [node.func for node in ast.walk(test) if isinstance(node, ast.Call)]
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    is_plain = all(isinstance(func, ast.Name) and func.id in _STATIC_CALLS for func in called)
    return is_plain and names <= {"self", *items, *_STATIC_CALLS}
