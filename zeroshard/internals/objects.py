"""The values inside one object, and a twin of the object with other values.

An object is looked into only if nothing in it can hide. Its class and all base classes are then written in
Python, or are containers whose values are known. Methods of the class are never called.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

_MAPPINGS = (OrderedDict, defaultdict, dict)
_LISTS = (list, tuple, set, frozenset, deque)
_IMMUTABLE = (tuple, frozenset)
_SCALARS = (str, bytes, int, float, complex)
_KNOWN = (object, SimpleNamespace, *_MAPPINGS, *_LISTS, *_SCALARS)

_HEAP, _IMMUTABLE_CLASS = 1 << 9, 1 << 8
"""CPython's `Py_TPFLAGS_HEAPTYPE` and `Py_TPFLAGS_IMMUTABLETYPE`: set, and not set, for a class statement."""


def look_into(value: Any) -> list[Any] | None:
    """The values that an object holds: elements, attributes and slots; None if it may hide more."""
    kind: Any = type(value)
    slots = _slots_of(kind)
    if slots is None:
        return None
    attributes = [found for slot in slots if (found := _get(slot, value)) is not None]
    return [*_elements(value), *_variables(value).values(), *attributes]


def twin_of(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of an object that can be looked into, with `change(each value)` in the place of each value."""
    kind: Any = type(value)
    base: Any = next((known for known in _KNOWN[1:] if isinstance(value, known)), object)
    if base in _IMMUTABLE:
        twin = base.__new__(kind, map(change, base.__iter__(value)))
    elif base in _SCALARS:
        twin = base.__new__(kind, value)
    else:
        twin = base.__new__(kind)
        _fill(twin, value, base, change)
    _variables(twin).update({name: change(part) for name, part in _variables(value).items()})
    for slot in _slots_of(kind) or ():
        if (part := _get(slot, value)) is not None:
            slot.__set__(twin, change(part))
    return twin


def _fill(twin: Any, value: Any, base: Any, change: Callable[[Any], Any]) -> None:
    if base in _MAPPINGS:
        if base is defaultdict:
            defaultdict.__init__(twin, value.default_factory)
        for key, part in base.items(value):
            base.__setitem__(twin, key, change(part))
    elif base is deque:
        deque.__init__(twin, map(change, deque.__iter__(value)), value.maxlen)
    elif base is list:
        list.extend(twin, map(change, list.__iter__(value)))
    elif base is set:
        set.update(twin, map(change, set.__iter__(value)))


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return dict.values(value)
    base: Any = next((known for known in _LISTS if isinstance(value, known)), None)
    return () if base is None else base.__iter__(value)


def _variables(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _get(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # a slot without a value
        return None


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[Any, ...] | None:
    """The slots of a class and its bases; None for a class whose objects may hide values."""
    slots: list[Any] = []
    for base in kind.__mro__:
        if base in _KNOWN:
            continue
        own = [member for member in vars(base).values() if isinstance(member, MemberDescriptorType)]
        if not _is_python_class(base, len(own)):
            return None
        slots += own
    return tuple(slots)


def _is_python_class(kind: type, num_slots: int) -> bool:
    """True for a class statement: its objects add only slots, a dict and weak references to the base."""
    is_bound = type(kind).__module__.partition(".")[0] in ("pybind11_builtins", "nanobind")
    base = kind.__base__
    assert base is not None, "object is known"
    extra = kind.__basicsize__ - base.__basicsize__
    has_flags = kind.__flags__ & _HEAP and not kind.__flags__ & _IMMUTABLE_CLASS
    return bool(has_flags) and not is_bound and extra <= object.__basicsize__ // 2 * (num_slots + 2)
