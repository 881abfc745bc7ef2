"""Lists of modules of which a forward may run a part: read in the source of the class that holds the list.

Ranks that run other parts would wait for each other, so such a list is not cut into units. The signs:

    self.heads[task](x)                         an index that is not the variable of a loop over a range;
                                                also through a local name: head = self.heads[task]; head(x)
    random.choice(self.heads)(x)                a draw
    for block in self.blocks[:depth]            a slice or range whose length is an argument
    for block in self.blocks:
        if torch.rand(()) < 0.1: continue       a step of the loop that may be left out before the call
        if is_needed: x = block(x)              a call on one branch alone, of a statement or an expression
        if x.norm() < 1: break                  an end of the loop that depends on data; also a return
    if x.norm() < 1: return x                   a return before the call

Some conditions count as equal on all ranks. They consist of constants, attributes of `self` that the method
does not compute, loop variables, comparisons with None, types, and flags such as `use_cache`. Lengths and
shapes count as equal only in the bounds of a loop. A class without source has no sign.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_ALWAYS_CHOOSING: tuple[type[nn.Module], ...] = (nn.AdaptiveLogSoftmaxWithLoss,)
_LISTS_TO_CHOOSE_FROM = frozenset(("experts", "routers"))
"""Names of lists that are chosen from; transformers and most others call the list `experts`."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_STATIC_CALLS = frozenset(("len", "getattr", "range", "min", "max", "int", "bool"))
_TYPE_TESTS = frozenset(("isinstance", "hasattr", "callable"))
_KINDS_OF_TENSOR = frozenset(("dtype", "device", "ndim", "is_cuda", "requires_grad", "layout"))
_FLAGS = ("output_", "return_", "use_")
"""The beginnings of names of arguments that are the same on all ranks by convention."""

_RATE_OF_DROPS = "layerdrop"
"""The attribute for the chance to leave out a block, of a module of transformers or of its config."""

_DRAWS = frozenset(("choice", "choices", "sample"))

_Items = dict[str, str | None]
"""Local names with their meanings. "blocks" is an item of that attribute, "blocks?" any item, "*blocks" the
list itself. "#" is an index whose bound may differ between ranks, None another index."""


def chosen_among(module: nn.Module) -> set[str]:
    """The names of the children of a module of which its forward may run a part."""
    names = {name for name, child in module._modules.items() if isinstance(child, _CONTAINERS)}
    if isinstance(module, _ALWAYS_CHOOSING):
        return names
    by_name = _LISTS_TO_CHOOSE_FROM & module._modules.keys()
    kind: Any = type(module)
    config = getattr(module, "config", None)
    drops_none = getattr(module, _RATE_OF_DROPS, getattr(config, _RATE_OF_DROPS, None)) == 0
    return {*by_name, *(names & signs_of_choice(kind) if names and not drops_none else ())}


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
                _Method(function, found).read()
    return frozenset(found)


class _Method:
    """Reads the statements of a method.

    Args:
        function: the method.
        found: attributes of which it calls a part are added here.
    """

    def __init__(self, function: ast.FunctionDef, found: set[str]) -> None:
        self._function, self._found = function, found
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        stores = Counter(node.id for node in names if isinstance(node.ctx, ast.Store))
        arguments = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
        self._locals = arguments | stores.keys()
        self._computed: set[str] = set()
        self._constants: set[str] = set()
        self._lengths: set[str] = set()
        steps = [target for target, value in _assignments(function) if isinstance(value, ast.Constant)]
        counted = Counter(target.id for target in steps if isinstance(target, ast.Name))
        self._counters = {name for name, times in counted.items() if times == stores[name]} - arguments
        for target, value in _assignments(function):
            if (own := _attribute_of_self(target)) is not None and not self._is_static(value, {}):
                self._computed.add(own)
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            once = {
                part.id for part in parts if isinstance(part, ast.Name) and stores[part.id] == 1
            } - arguments
            if self._is_static(value, {}):
                self._constants |= once
            if self._is_static(value, {}, any_length=True):
                self._lengths |= once

    def read(self) -> None:
        """Add the attributes of which the method calls a part."""
        self._visit_body(self._function.body, False, {}, is_in_loop=False)

    def _visit_body(self, body: Sequence[ast.stmt], in_doubt: bool, items: _Items, is_in_loop: bool) -> None:
        """Read statements in their order; `in_doubt`: some ranks may not run them."""
        items = dict(items)
        for statement in body:
            if isinstance(statement, ast.For):
                inner = {**items, **self._loop_variables(statement.target, statement.iter, items)}
                ends = self._leaves(statement.body, inner, ast.Break | ast.Return)
                is_part = self._is_part(statement.iter, items, in_range=False)
                self._visit_body(statement.body, in_doubt or ends or is_part, inner, is_in_loop=True)
                in_doubt = in_doubt or self._leaves(statement.body, inner, ast.Return)
            elif isinstance(statement, ast.If):
                self._visit_if(statement, in_doubt, items, is_in_loop)
                in_doubt = in_doubt or self._leaves([statement], items, ast.Continue)
                if not is_in_loop and not _mentions_self(statement):
                    in_doubt = in_doubt or self._leaves([statement], items, ast.Return)
            elif isinstance(statement, ast.With | ast.While | ast.Try):
                self._visit_body(statement.body, in_doubt, items, is_in_loop)
            else:
                for name in self._calls(statement, items):
                    self._note(name, in_doubt)
                self._name_items(statement, items)

    def _visit_if(self, statement: ast.If, in_doubt: bool, items: _Items, is_in_loop: bool) -> None:
        once, other = self._called_in(statement.body, items), self._called_in(statement.orelse, items)
        is_open = in_doubt or not self._is_static(statement.test, items)
        for name in once ^ other:
            self._note(name, is_open)
        for name in once & other:
            self._note(name, in_doubt)
        for branch in (statement.body, statement.orelse):
            nested = [part for part in branch if isinstance(part, ast.For | ast.If)]
            self._visit_body(nested, in_doubt, items, is_in_loop)

    def _note(self, name: str, in_doubt: bool) -> None:
        if name.endswith("?") or in_doubt:
            self._found.add(name.rstrip("?"))

    def _called_in(self, body: Sequence[ast.stmt], items: _Items) -> set[str]:
        called: set[str] = set()
        items = dict(items)
        for part in body:
            if not isinstance(part, ast.For):
                called.update(self._calls(part, items))
                self._name_items(part, items)
        return called

    def _calls(self, node: ast.AST, items: _Items) -> Iterator[str]:
        """The attributes whose items are called here; with a question mark, where it may be any part."""
        if isinstance(node, ast.IfExp):
            once, other = set(self._calls(node.body, items)), set(self._calls(node.orelse, items))
            mark = "" if self._is_static(node.test, items) else "?"
            yield from once & other
            yield from (name + mark for name in once ^ other)
            yield from self._calls(node.test, items)
            return
        mark = ""
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            items = dict(items)
            for loop in node.generators:
                is_part = self._is_part(loop.iter, items, in_range=False)
                items.update(self._loop_variables(loop.target, loop.iter, items))
                if is_part or not all(self._is_static(test, items) for test in loop.ifs):
                    mark = "?"
        elif isinstance(node, ast.Call):
            for part in (node.func, *node.args):  # also handed to checkpoint(block, x)
                name = items.get(part.id) if isinstance(part, ast.Name) else self._item(part, items)
                if name is not None and not name.startswith(("*", "#")):
                    yield name
        for child in ast.iter_child_nodes(node):
            yield from (name + mark for name in self._calls(child, items))

    def _item(self, node: ast.AST, items: _Items) -> str | None:
        """The attribute of whose list this expression takes an item; with a question mark, any item."""
        if isinstance(node, ast.Subscript) and (attribute := _list_of(node.value, items)):
            used = _names_in(node.slice)
            is_fixed = isinstance(node.slice, ast.Slice) or used <= {"self"}
            is_fixed = is_fixed or any(name in items and _is_known(items[name]) for name in used)
            is_unbounded = any(items.get(name) == "#" for name in used)
            is_fixed = is_fixed or (not is_unbounded and self._is_static(node.slice, items))
            return attribute if is_fixed else attribute + "?"
        if isinstance(node, ast.Call) and _is_draw(node):
            lists = [name for part in ast.walk(node.args[0]) if (name := _list_of(part, items))]
            return lists[0] + "?" if lists else None
        return None

    def _name_items(self, statement: ast.stmt, items: _Items) -> None:
        """Note the local names that an assignment gives to a list (with a star before it) or to an item."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return
        target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Name):
            return
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
            items.pop(target.id, None)
        elif attribute := _list_of(value, items):
            items[target.id] = "*" + attribute
        elif item := self._item(value, items):
            if isinstance(value, ast.Subscript) and _names_in(value.slice) <= self._counters:
                item = item.rstrip("?")  # i += 1 in each turn of a loop
            items[target.id] = item
        elif not any(isinstance(part, ast.Name) and part.id == target.id for part in ast.walk(value)):
            items.pop(target.id, None)

    def _loop_variables(self, target: ast.expr, source: ast.expr, items: _Items) -> _Items:
        """The variables of a loop over a range or a list of `self`, with the attribute they go through."""
        if (
            isinstance(source, ast.Call)
            and isinstance(source.func, ast.Name)
            and isinstance(target, ast.Tuple)
        ):
            parts: list[tuple[ast.expr, ast.expr]] = []
            if source.func.id == "zip" and len(source.args) == len(target.elts):
                parts = list(zip(target.elts, source.args, strict=True))
            elif source.func.id == "enumerate" and len(target.elts) == 2 and source.args:
                parts = [(target.elts[1], source.args[0])]
            found: _Items = {}
            for part, through in parts:
                found.update(self._loop_variables(part, through, items))
            if found and source.func.id == "enumerate" and isinstance(target.elts[0], ast.Name):
                found[target.elts[0].id] = None
            if parts:
                return found
        lists = {name for node in ast.walk(source) if (name := _attribute_of_self(node))}
        names = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
        lists |= {name.strip("*?") for each in names if (name := items.get(each)) not in (None, "#")}
        if not lists and "range" not in names:
            return {}
        variables = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        is_walk = "range" not in names and len(lists) == 1
        index = "#" if self._is_part(source, items) else None
        return dict.fromkeys(variables, lists.pop() if is_walk else index)

    def _is_part(self, source: ast.expr, items: _Items, in_range: bool = True) -> bool:
        """True for a loop over a draw, or over a slice or range whose bounds may differ between ranks."""
        for node in ast.walk(source):
            bounds: list[ast.expr] = []
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                if _list_of(node.value, items):
                    bounds = [part for part in (node.slice.lower, node.slice.upper, node.slice.step) if part]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
                bounds = node.args if in_range else []
            elif isinstance(node, ast.Call) and self._item(node, items):
                return True
            if not all(self._is_static(part, items, any_length=True) for part in bounds):
                return True
        return False

    def _leaves(self, body: Sequence[ast.stmt], items: _Items, kinds: Any, in_doubt: bool = False) -> bool:
        """True if a break or return in the statements hangs on a condition that may differ among ranks."""
        for part in body:
            if isinstance(part, kinds) and in_doubt:
                return True
            if isinstance(part, ast.If):
                is_open = in_doubt or not self._is_static(part.test, items)
                inside = (*part.body, *part.orelse)
                if self._leaves(inside, items, kinds, is_open):
                    return True
            elif isinstance(part, ast.For | ast.While):
                if self._leaves(part.body, items, ast.Return, in_doubt):
                    return True
            elif isinstance(part, ast.With | ast.Try) and self._leaves(part.body, items, kinds, in_doubt):
                return True
        return False

    def _is_static(self, test: ast.AST, items: _Items, any_length: bool = False) -> bool:
        """True for an expression that is the same on all ranks; `any_length`: len(...) of anything is."""
        if isinstance(test, ast.Name):
            is_flag = test.id.startswith(_FLAGS) or (test.id.isupper() and test.id not in self._locals)
            is_item = test.id in items and (items[test.id] == "#" or _is_known(items[test.id]))
            return (
                is_flag
                or is_item
                or test.id in ("self", "torch")
                or test.id in self._constants
                or (any_length and test.id in self._lengths)
            )
        if isinstance(test, ast.Attribute):
            if test.attr in _KINDS_OF_TENSOR or (any_length and test.attr == "shape"):
                return True
            if (own := _attribute_of_self(test)) is not None:
                return own not in self._computed
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
            ends = (test.left, test.comparators[-1])
            if any(isinstance(end, ast.Constant) and end.value is None for end in ends):
                return True
        if isinstance(test, ast.Call):
            name = test.func.id if isinstance(test.func, ast.Name) else ""
            if name in _TYPE_TESTS or _asks_torch(test.func) or (any_length and _is_length(test.func)):
                return True
            values = (*test.args, *(keyword.value for keyword in test.keywords))
            return name in _STATIC_CALLS and all(self._is_static(part, items, any_length) for part in values)
        if isinstance(test, ast.Lambda | ast.comprehension):
            return False
        return all(self._is_static(part, items, any_length) for part in ast.iter_child_nodes(test))


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield node.target, node.value


def _attribute_of_self(node: ast.AST) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else None


def _list_of(node: ast.AST, items: _Items) -> str | None:
    """The attribute that an expression reads: self.blocks, or a local name for it."""
    name = items.get(node.id) if isinstance(node, ast.Name) else None
    return name[1:] if name is not None and name.startswith("*") else _attribute_of_self(node)


def _mentions_self(statement: ast.If) -> bool:
    parts = (node for part in statement.body for node in ast.walk(part))
    return any(_attribute_of_self(node) is not None for node in parts)


def _is_draw(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _DRAWS and bool(call.args)


def _asks_torch(func: ast.expr) -> bool:
    """True for torch.is_grad_enabled, torch.jit.is_scripting and x.dim: the same on all ranks."""
    if not isinstance(func, ast.Attribute):
        return False
    root: ast.expr = func
    while isinstance(root, ast.Attribute):
        root = root.value
    is_torch = isinstance(root, ast.Name) and root.id == "torch"
    return func.attr == "dim" or (is_torch and func.attr.startswith("is_") and func.attr != "is_nonzero")


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_length(func: ast.expr) -> bool:
    return (isinstance(func, ast.Name) and func.id == "len") or (
        isinstance(func, ast.Attribute) and func.attr == "size"
    )


def _is_known(name: str | None) -> bool:
    return name is None or not (name.endswith("?") or name == "#")
