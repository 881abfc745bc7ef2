"""The form of what a pickle builds, told from its opcodes: nothing is built.

A pickle of 200 bytes can name a tuple that holds the one before it twice, 60 times over. Nothing of it is
large, but whoever hashes, compares or walks through the last tuple takes 2**60 steps; and a tuple nested
100,000 deep overruns the stack of C. So the form is measured before the pickle is loaded:

    depth  the longest way from a container to its innermost element
    work   over every place that an element is put in, the elements that a walk through it would visit there
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 100
"""Of plain values; Python's own stack, and so what walks through values, ends near 1000."""
_WORK = 1 << 20
"""Elements that any pickle may have a walk visit. A list of a million numbers is of that size."""
_WORK_PER_BYTE = 32
"""More for each byte: what is written out, not repeated, takes a byte an element or more."""


class _Node:
    """A container, or what is made by a call."""

    __slots__ = ("depth", "items", "num_atoms", "size")

    def __init__(self, items: list[_Item]) -> None:
        self.items: list[_Node] = []
        self.num_atoms = 0
        """Numbers, strings and the like."""
        self.depth = self.size = 0
        """Known once all inside is: 0 until then."""
        if items:
            self.put(items)

    def put(self, items: list[_Item]) -> None:
        """Take more elements in."""
        nodes = [item for item in items if item is not None]
        self.items += nodes
        self.num_atoms += len(items) - len(nodes)


_Item = _Node | None
"""None: an atom."""


def check_form(code: bytes) -> None:
    """True if a pickle can be loaded and walked through in a time in proportion to its length.

    Raises:
        pickle.UnpicklingError: it is nested too deeply, holds itself, or repeats elements too often; or it
            has an opcode that no checkpoint has; or it is none.
    """
    try:
        nodes = _read(code)
    except (ValueError, IndexError, KeyError) as error:
        raise pickle.UnpicklingError(f"no pickle of a checkpoint ({error})") from None
    _measure(nodes, _WORK + _WORK_PER_BYTE * len(code))


def _read(code: bytes) -> list[_Node]:
    """Follow the stack and the memo of a pickle, with nodes in the place of objects; the nodes."""
    nodes: list[_Node] = []
    stack: list[_Item] = []
    below: list[list[_Item]] = []  # stacks below the marks
    memo: dict[int, _Item] = {}
    at = 0
    while (opcode := code[at]) != _STOP:
        at += 1
        if (size := _ATOMS.get(opcode)) is not None:
            stack.append(None)
            at += size
        elif opcode == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif (size := _SIZED_ATOMS.get(opcode)) is not None:
            stack.append(None)
            at += size + _number(code, at, size)
        elif (size := _GETS.get(opcode)) is not None:
            stack.append(memo[_number(code, at, size)])
            at += size
        elif (size := _PUTS.get(opcode)) is not None:
            memo[_number(code, at, size)] = stack[-1]
            at += size
        elif opcode == _MARK:
            below.append(stack)
            stack = []
        elif (taken := _TAKES.get(opcode)) is not None:
            num, makes = taken
            items, stack = (stack, below.pop()) if num == _MARKED else _split(stack, num)
            if makes:
                nodes.append(node := _Node(items))
                stack.append(node)
            elif (target := stack[-1]) is not None:
                target.put(items)
        else:
            at = _skip(code, at, opcode, stack)
    return nodes


def _skip(code: bytes, at: int, opcode: int, stack: list[_Item]) -> int:
    """Go past the rare opcodes, those without elements; the place of the next one."""
    if opcode == pickle.PROTO[0]:
        return at + 1
    if opcode == pickle.FRAME[0]:
        return at + 8
    if opcode == pickle.GLOBAL[0]:
        stack.append(None)
        return code.index(b"\n", code.index(b"\n", at) + 1) + 1
    raise ValueError(f"opcode {opcode:#x} at byte {at - 1}")


def _number(code: bytes, at: int, size: int) -> int:
    return int.from_bytes(code[at : at + size], "little")


def _split(stack: list[_Item], num: int) -> tuple[list[_Item], list[_Item]]:
    """The topmost items, and the stack without them."""
    if len(stack) < num:
        raise IndexError("nothing is left on its stack")
    start = len(stack) - num
    items = stack[start:]
    del stack[start:]
    return items, stack


_MEMOIZE, _MARK, _STOP = pickle.MEMOIZE[0], pickle.MARK[0], pickle.STOP[0]
_MARKED = -1


def _each(num: Any, *opcodes: bytes) -> dict[int, Any]:
    return {opcode[0]: num for opcode in opcodes}


_ATOMS: dict[int, int] = {
    **_each(0, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    **_each(1, pickle.BININT1),
    **_each(2, pickle.BININT2),
    **_each(4, pickle.BININT),
    **_each(8, pickle.BINFLOAT),
}
"""By opcode: the number of bytes that follow."""
_SIZED_ATOMS: dict[int, int] = {
    **_each(1, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.SHORT_BINSTRING),
    **_each(4, pickle.BINUNICODE),
}
"""By opcode: the size of a number that follows, which tells how many bytes follow it."""
_GETS: dict[int, int] = {**_each(1, pickle.BINGET), **_each(4, pickle.LONG_BINGET)}
_PUTS: dict[int, int] = {**_each(1, pickle.BINPUT), **_each(4, pickle.LONG_BINPUT)}
_TAKES: dict[int, tuple[int, bool]] = {
    **_each((0, True), pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
    **_each((1, True), pickle.TUPLE1, pickle.BINPERSID),
    **_each((2, True), pickle.TUPLE2, pickle.REDUCE, pickle.NEWOBJ, pickle.STACK_GLOBAL),
    **_each((3, True), pickle.TUPLE3),
    **_each((_MARKED, True), pickle.TUPLE),
    **_each((1, False), pickle.APPEND, pickle.BUILD),
    **_each((2, False), pickle.SETITEM),
    **_each((_MARKED, False), pickle.APPENDS, pickle.SETITEMS),
}
"""By opcode: how many of the topmost items it takes (_MARKED: those above the mark), and whether it makes an
object of them or puts them into the one below. That a class takes none is for readers to refuse."""


def _measure(nodes: list[_Node], max_work: int) -> None:
    """Fill in depth and size of all nodes, those inside first.

    Raises:
        pickle.UnpicklingError: as `check_form`.
    """
    work = 0
    for root in nodes:
        for node in () if root.size else _inside_first(root):
            node.depth, inside = 1, node.num_atoms
            for item in node.items:
                node.depth = max(node.depth, item.depth + 1)
                inside += item.size
            node.size = 1 + inside
            work += inside
            if node.depth > MAX_DEPTH:
                raise pickle.UnpicklingError(f"it is nested more than {MAX_DEPTH} deep")
            if work > max_work:
                raise pickle.UnpicklingError("it repeats its elements too often to be walked through")


def _inside_first(root: _Node) -> Iterator[_Node]:
    """The nodes without a size in a node, and the node itself: each after those that it holds."""
    entered = {id(root)}
    path = [(root, iter(root.items))]
    while path:
        node, rest = path[-1]
        inner = next((item for item in rest if not item.size), None)
        if inner is None:
            path.pop()
            entered.discard(id(node))
            yield node
        elif id(inner) in entered:
            raise pickle.UnpicklingError("it holds a container that holds itself")
        else:
            entered.add(id(inner))
            path.append((inner, iter(inner.items)))
