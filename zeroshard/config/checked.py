"""Dataclasses that check their fields by the rules in their annotations."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from types import ModuleType, NoneType
from typing import Any, ClassVar, NamedTuple, Self, get_args

import torch

from zeroshard.config import rules


class Requirement(NamedTuple):
    """One key whose value makes sense only with certain values of another key."""

    asked: bool
    key: str
    met: bool
    other: str
    needed: str  # completes the sentence "other must be ..."


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
            if stored is rules.REFUSED:
                key = self._prefix + option.name
                raise ValueError(f"config key '{key}': expected {rule.expected}, got {with_type(got)}")
            object.__setattr__(self, option.name, stored)
        for asked, key, met, other, needed in self._requirements():
            if asked and not met:
                value, got = attrgetter(key, other)(self)
                key, other = self._prefix + key, self._prefix + other
                raise ValueError(f"{key}={show(value)} needs {other} to be {needed}, got {show(got)}")

    def _requirements(self) -> list[Requirement]:
        return []

    @classmethod
    def _from_short(cls, value: Any) -> Any:
        """Return the section that a short form stands for, or rules.REFUSED."""
        return rules.REFUSED

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
        if close:
            hint = f"; did you mean '{close[0]}'?"
        else:
            hint = "; Config.from_deepspeed reads DeepSpeed's." if deepspeed_reader().is_known(key) else "."
        place = f"Known keys of '{cls._prefix[:-1]}'" if cls._prefix else "Known keys"
        return f"unknown config key '{cls._prefix}{key}'{hint} {place}: {', '.join(known)}"

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for `from_dict` that JSON can hold. Raises ValueError when `units` is a predicate."""
        return {option.name: self._written(option.name) for option in fields(self)}

    def _written(self, name: str) -> Any:
        """Return the value of a field as `to_dict` has it."""
        return _plain(name, getattr(self, name))


_MEANT = {"precision.dtype": "precision.param_dtype", "dtype": "precision"}
"""Unknown keys with the key that is meant, where the spelling of another key is closer."""


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Checked)


def _rule_of(annotation: Any) -> rules.ValueRule:
    if annotation is bool:
        return rules.BOOLEAN
    if _is_section(annotation):
        expected = f"{annotation.__name__}(...), or its keys as a dict in from_dict{annotation._short}"
        short = rules.ValueRule(expected, annotation._from_short)
        return rules.ValueRule(expected, rules.either(rules.instance(annotation, expected), short).accept)
    kind, rule = get_args(annotation)
    return rules.either(rules.instance(NoneType, "None"), rule) if NoneType in get_args(kind) else rule


def _plain(key: str, value: Any) -> Any:
    if callable(value):
        raise ValueError(f"config key '{key}': expected class names to write down, got {with_type(value)}")
    if isinstance(value, torch.dtype):
        return show(value)
    if isinstance(value, Checked):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def deepspeed_reader() -> ModuleType:
    """Import `zeroshard.deepspeed.translate`, the one import upward.

    `Config.from_deepspeed` is a method of the Config, but `import zeroshard` should not load the keys of
    another engine.
    """
    from zeroshard.deepspeed import translate

    return translate


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
