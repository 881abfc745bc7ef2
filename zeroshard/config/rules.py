"""Rules for the values of a config: the values that a rule accepts, and those that it stores."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import nn

REFUSED: Any = object()


class ValueRule(NamedTuple):
    """The values that a field takes."""

    expected: str  # completes the sentence "expected ..."
    accept: Callable[[Any], Any]  # value given -> value stored, or REFUSED


def number(
    expected: str, in_range: Callable[[Any], bool], kind: type = Real, store: type = float
) -> ValueRule:
    """Return the rule for a number in a range; a bool is refused."""

    def accept(value: Any) -> Any:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return store(value) if is_number and in_range(value) else REFUSED

    return ValueRule(expected, accept)


def integer(low: int, high: float = math.inf) -> ValueRule:
    """Return the rule for an integer from `low` to `high`."""
    expected = f"an integer >= {low}" if high == math.inf else f"an integer from {low} to {high}"
    return number(expected, lambda value: low <= value <= high, kind=Integral, store=int)


def choice(*choices: str) -> ValueRule:
    """Return the rule for one of some words, in upper or lower case."""

    def accept(value: Any) -> Any:
        return value.lower() if isinstance(value, str) and value.lower() in choices else REFUSED

    return ValueRule(" or ".join(map(repr, choices)), accept)


def names_by(expected: str, name_of: Callable[[Any], Any]) -> ValueRule:
    """Return the rule for one name or several, which are stored as a tuple."""

    def accept(value: Any) -> Any:
        several = isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)
        names = [name_of(item) for item in (value if several else [value])]
        if REFUSED in names:
            return REFUSED
        # A set's order differs between processes, and all ranks must read the same config.
        return tuple(sorted(names, key=str) if isinstance(value, Set) else names)

    return ValueRule(expected, accept)


def instance(kind: type, expected: str) -> ValueRule:
    """Return the rule for an object of a class."""
    return ValueRule(expected, lambda value: value if isinstance(value, kind) else REFUSED)


def either(*rules: ValueRule) -> ValueRule:
    """Return the rule that stores a value by the first of some rules that accepts it."""

    def accept(value: Any) -> Any:
        answers = (rule.accept(value) for rule in rules)
        return next((answer for answer in answers if answer is not REFUSED), REFUSED)

    return ValueRule(" or ".join(rule.expected for rule in rules), accept)


def _text(value: Any) -> Any:
    return value if isinstance(value, str) and value else REFUSED


def _class_name(value: Any) -> Any:
    if isinstance(value, list | tuple):  # the names of modules that are one unit together
        names = tuple(map(_text, value))
        return REFUSED if REFUSED in names or not names else names
    return value.__name__ if isinstance(value, type) and issubclass(value, nn.Module) else _text(value)


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "double"), torch.float64),
}


def _dtype(value: Any) -> Any:
    is_named = isinstance(value, str | torch.dtype)
    return _DTYPES.get(str(value).lower().removeprefix("torch."), REFUSED) if is_named else REFUSED


def _dtypes_by_name(value: Any) -> Any:
    """Pairs of a pattern and a dtype, in order; they have a hash, and a config keeps them as they are."""
    items = value.items() if isinstance(value, Mapping) else value
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        return REFUSED
    pairs = [tuple(item) if isinstance(item, list | tuple) else () for item in items]
    if any(len(pair) != 2 for pair in pairs):
        return REFUSED
    stored = tuple((_text(name), _dtype(dtype)) for name, dtype in pairs)
    return REFUSED if any(REFUSED in pair for pair in stored) else stored


def parse_dtype(value: Any) -> torch.dtype:
    """Return the floating-point dtype for a dtype or its name.

    Raises:
        ValueError: the value is neither.
    """
    dtype = DTYPE.accept(value)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected {DTYPE.expected}, got {value!r}")
    return dtype


def _device(value: Any) -> Any:
    if not isinstance(value, str | torch.device):
        return REFUSED
    try:
        device = torch.device(value)
    except RuntimeError:
        return REFUSED
    return {"cpu": "cpu", "meta": REFUSED}.get(device.type, str(device))


def _own_schedule(value: Any) -> Any:
    """A list of the user's: its text, the path of its file, or an object that has lists of actions."""
    if hasattr(value, "lists") and hasattr(value, "placement"):
        return str(value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    is_list = isinstance(text, str) and ("\n" in text or text.lower().endswith(".csv"))
    return text if is_list else REFUSED


BOOLEAN = instance(bool, "True or False")
DTYPE = ValueRule("a dtype among bfloat16, float16, float32, float64", _dtype)
DTYPES_BY_NAME = ValueRule(
    "a dict of dtypes by names of parameters or modules, such as {'*.norm*': 'fp32', 'router': 'fp32'}, with "
    "dtypes among bfloat16, float16, float32, float64",
    _dtypes_by_name,
)
DEVICE = ValueRule("a device such as 'cpu', 'cuda' or 'cuda:1'", _device)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
POSITIVE = number("a finite number > 0", lambda value: 0 < value <= sys.float_info.max)
SECONDS = number("a number > 0 and at most 1e6", lambda value: 0 < value <= 1e6)
PATH = ValueRule("a path", lambda value: _text(os.fspath(value) if isinstance(value, os.PathLike) else value))
TIER = choice("none", "cpu", "nvme")
MODULE_NAMES = names_by("module names", _text)
PATTERNS = names_by("parameter names, or patterns such as 'blocks.*.bias'", _text)
FROZEN = either(choice("shard", "replicate"), PATTERNS)
# A class or a module is callable too, but calling it would build or run something.
_PREDICATE = ValueRule(
    "a predicate that takes a module",
    lambda value: value if callable(value) and not isinstance(value, type | nn.Module) else REFUSED,
)
UNITS = either(names_by("class names (or module classes, or lists of module names)", _class_name), _PREDICATE)
SCHEDULE = either(
    choice(
        *("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "varuna"),
        *("pipedream", "2bw", "pipemare", "pb", "spectrain", "lwp", "paci"),
    ),
    ValueRule("the path of a .csv file, or a list of actions as a Schedule or its text", _own_schedule),
)
