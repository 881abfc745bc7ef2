"""Dataclasses that check their fields by the rules in their annotations."""

import difflib
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, get_args

from zeroshard.config.dtypes import dtype_of, is_dtype
from zeroshard.tables import parse_size

if TYPE_CHECKING:
    import torch

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
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        names = [name_of(item) for item in (value if several else [value])]
        return REFUSED if REFUSED in names else tuple(names)

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
    if isinstance(value, type):
        from torch import nn

        return value.__name__ if issubclass(value, nn.Module) else REFUSED
    return _text(value)


def _predicate(value: Any) -> Any:
    # A class or a module is callable too, but calling it would build or run something.
    if not callable(value) or isinstance(value, type):
        return REFUSED
    from torch import nn

    return REFUSED if isinstance(value, nn.Module) else value


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("float64", "fp64", "double"), "float64"),
}


def _dtype(value: Any) -> Any:
    is_named = isinstance(value, str) or is_dtype(value)
    name = _DTYPES.get(str(value).lower().removeprefix("torch.")) if is_named else None
    return REFUSED if name is None else dtype_of(name)


def _dtypes_by_name(value: Any) -> Any:
    """Pairs of a pattern and a dtype, in order; they have a hash, and a config keeps them as they are."""
    try:
        stored = tuple((_text(name), _dtype(dtype)) for name, dtype in dict(value).items())
    except (TypeError, ValueError):
        return REFUSED
    return REFUSED if any(REFUSED in pair for pair in stored) else stored


def parse_dtype(value: Any) -> "torch.dtype":
    """Return the floating-point dtype for a dtype or its name.

    Raises:
        ValueError: the value is neither.
    """
    dtype: torch.dtype = DTYPE.accept(value)
    if dtype is REFUSED:
        raise ValueError(f"dtype: expected {DTYPE.expected}, got {value!r}")
    return dtype


def _size(value: Any) -> Any:
    with suppress(ValueError):
        return parse_size(value) or REFUSED if isinstance(value, str) else REFUSED
    return REFUSED


def _device(value: Any) -> Any:
    import torch

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
MAIN_DTYPE = ValueRule(
    "a dtype among bfloat16, float32, float64",
    lambda value: REFUSED if _dtype(value) == dtype_of("float16") else _dtype(value),
)
DTYPES_BY_NAME = ValueRule(
    "a dict of dtypes by names of parameters or modules, such as {'*.norm*': 'fp32', 'router': 'fp32'}, with "
    "dtypes among bfloat16, float16, float32, float64",
    _dtypes_by_name,
)
DEVICE = ValueRule("a device such as 'cpu', 'cuda' or 'cuda:1'", _device)
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
POSITIVE = number("a finite number > 0", lambda value: 0 < value <= sys.float_info.max)
_BYTES = number("bytes, or a share of the device up to 1", lambda value: 0 < value < math.inf)
MEMORY = either(ValueRule("a size such as '60GB'", _size), _BYTES)
SECONDS = number("a number > 0 and at most 1e6", lambda value: 0 < value <= 1e6)
PATH = ValueRule("a path", lambda value: _text(os.fspath(value) if isinstance(value, os.PathLike) else value))
TIER = choice("none", "cpu", "nvme")
PATTERNS = names_by("names of parameters or modules, or patterns such as 'blocks.*.bias'", _text)
FROZEN = either(choice("shard", "replicate"), PATTERNS)
_PREDICATE = ValueRule("a predicate that takes a module", _predicate)
UNITS = either(names_by("names of classes (or classes), or of modules", _class_name), _PREDICATE)
SCHEDULE = either(
    choice(
        *("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "varuna"),
        *("pipedream", "2bw", "pipemare", "pb", "spectrain", "lwp", "paci"),
    ),
    ValueRule("the path of a .csv file, or a list of actions as a Schedule or its text", _own_schedule),
)


Condition = tuple[bool, str, str]
"""True if it is met, the key that it is about, and the values that this must have ("must be ...")."""

Requirement = tuple[bool, str, *tuple[Condition, ...]]
"""True if a key has been set; the key; and the conditions without which its value makes no sense."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A dataclass that checks and normalizes its fields by their rules."""

    _prefix: ClassVar[str] = ""  # before the keys of a section in messages: "precision."
    _short: ClassVar[str] = ""  # the description of its short form in messages
    _whole: "ClassVar[type[Checked]]"  # the config that all sections belong to

    def __post_init__(self) -> None:
        for option in fields(self):
            rule, got = _rule_of(option.type), getattr(self, option.name)
            stored = rule.accept(got)
            if stored is REFUSED:
                key = self._prefix + option.name
                raise ValueError(f"config key '{key}': expected {rule.expected}, got {with_type(got)}")
            object.__setattr__(self, option.name, stored)
        for asked, key, *conditions in self._requirements():
            for met, other, needed in conditions if asked else ():
                if not met:
                    value, got = attrgetter(key, other)(self)
                    key, other = self._prefix + key, self._prefix + other
                    raise ValueError(f"{key}={show(value)} needs {other} to be {needed}, got {show(got)}")

    def _requirements(self) -> list[Requirement]:
        return []

    @classmethod
    def _from_short(cls, value: Any) -> Any:
        """Return the section that a short form stands for, or REFUSED."""
        return REFUSED

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from keys and values; a section is a mapping itself. Raises ValueError."""
        if not isinstance(options, Mapping):
            raise ValueError(f"expected a mapping of config keys, got {with_type(options)}")
        kinds: dict[str, Any] = {option.name: option.type for option in fields(cls)}
        values = dict(options)
        for key, value in options.items():
            if key not in kinds:
                raise ValueError(cls._unknown_key(key, list(kinds)))
            if _is_section(kinds[key]) and isinstance(value, Mapping):
                values[key] = kinds[key].from_dict(value)
        return cls(**values)

    @classmethod
    def _unknown_key(cls, key: object, known: list[str]) -> str:
        close = [cls._prefix + name for name in difflib.get_close_matches(str(key).lower(), known, n=1)]
        close = [_MEANT[f"{cls._prefix}{key}"]] if f"{cls._prefix}{key}" in _MEANT else close
        # The same name in another section is meant rather than a similar one: 'param_dtype'.
        close = [name for name in flat(cls._whole()) if name.rpartition(".")[2] == key] + close
        hint = f"; did you mean '{close[0]}'?" if close else "; Config.from_deepspeed reads DeepSpeed's."
        place = f"Known keys of '{cls._prefix[:-1]}'" if cls._prefix else "Known keys"
        return f"unknown config key '{cls._prefix}{key}'{hint} {place}: {', '.join(known)}"

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for `from_dict` that JSON can hold. Raises ValueError when `units` is a predicate."""
        return {option.name: _plain(option.name, getattr(self, option.name)) for option in fields(self)}


_MEANT = {"precision.dtype": "precision.param_dtype", "dtype": "precision"}
"""Unknown keys with the key that is meant, where the spelling of another key is closer."""


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Checked)


def _rule_of(annotation: Any) -> ValueRule:
    if annotation is bool:
        return BOOLEAN
    if _is_section(annotation):
        expected = f"{annotation.__name__}(...), or its keys as a dict in from_dict{annotation._short}"
        short = ValueRule(expected, annotation._from_short)
        return ValueRule(expected, either(instance(annotation, expected), short).accept)
    kind, rule = get_args(annotation)
    return either(instance(NoneType, "None"), rule) if NoneType in get_args(kind) else rule


def _plain(key: str, value: Any) -> Any:
    if callable(value):
        raise ValueError(f"config key '{key}': expected class names to write down, got {with_type(value)}")
    if is_dtype(value):
        return show(value)
    if isinstance(value, Checked):
        return value.to_dict()
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: _plain(key, part) for name, part in value}
    return list(value) if isinstance(value, tuple) else value


def flat(config: Checked) -> dict[str, Any]:
    """Return all values of a config and its sections, by dotted key."""
    values: dict[str, Any] = {}
    for option in fields(config):
        value = getattr(config, option.name)
        values.update(flat(value) if isinstance(value, Checked) else {config._prefix + option.name: value})
    return values


def show(value: object) -> str:
    """Return the text of a value for messages; a long one is cut."""
    text = repr(value).removeprefix("torch.")
    return text if len(text) <= 200 else text[:200] + "..."


def with_type(value: object) -> str:
    """Return the text of a value and of its type, for messages."""
    return "None" if value is None else f"{show(value)} ({type(value).__name__})"


# ------------------------------------------------------------------------------------------------- files


_Made = TypeVar("_Made")


def read_file(path: str | os.PathLike[str], build: Callable[[Any], _Made]) -> _Made:
    """Return what a function makes of the content of a .json or .toml file.

    Raises:
        ValueError: naming the file: it cannot be parsed, or has another ending; or the function raises one.
        OSError: it cannot be read.
    """
    parsers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    file = Path(path)
    try:
        if file.suffix.lower() not in parsers:
            raise ValueError("expected a name that ends in .json or .toml")
        return build(parsers[file.suffix.lower()](file.read_text(encoding="utf-8-sig")))
    except ValueError as error:
        raise ValueError(f"config file '{path}': {error}") from None
