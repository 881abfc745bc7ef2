"""A DeepSpeed config, as a dict or a file, becomes a Config and one warning, or one error."""

import difflib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zeroshard.config.files import naming, read_options, world_size
from zeroshard.config.sections import Config
from zeroshard.deepspeed.keys import (
    IGNORED,
    KNOWN,
    MAPPED,
    NO_EQUIVALENT,
    SECTIONS,
    SWITCHED,
    Options,
    auto,
)
from zeroshard.internals.warn import warn_user

_Config = TypeVar("_Config", bound=Config)


def read(kind: type[_Config], config: Mapping[str, Any] | str | os.PathLike[str]) -> _Config:
    """Return the Config for `Config.from_deepspeed`, and warn of keys and sections that it does not hold.

    Args:
        kind: the class to build.
        config: a mapping of DeepSpeed's keys and sections, or the path of such a file.

    Raises:
        ValueError: listing all keys that are unknown, wrong, "auto", or have no equivalent.
    """
    path = config if isinstance(config, str | os.PathLike) else None
    with nullcontext() if path is None else naming(path):
        given: Any = config if path is None else read_options(Path(path))
        options, note = translate(given, world_size())
        translated = kind.from_dict(options)
    if note:
        warn_user(note)
    return translated


class Translation(NamedTuple):
    """A DeepSpeed config in the terms of zeroshard."""

    options: dict[str, Any]
    """The options for `Config.from_dict`."""
    note: str
    """The keys that are not read, and what to do instead; empty if there are none."""


def translate(config: Mapping[str, Any], num_ranks: int | None) -> Translation:
    """Read a DeepSpeed config.

    Args:
        config: its keys and sections.
        num_ranks: the world size; None if unknown.

    Raises:
        ValueError: listing all that is wrong or has no equivalent.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"expected a mapping of DeepSpeed config keys, got {_with_type(config)}")
    leaves = dict(_leaves(config))
    problems = [problem for key, value in leaves.items() if (problem := _problem(key, value))]
    options, conflicts = _options({key: value for key, value in leaves.items() if _is_mapped(key, value)})
    batch_problem, batch_note = _resolve_batch(options, num_ranks)
    problems += [*conflicts, *batch_problem]
    if problems:
        raise ValueError("\n- ".join(["DeepSpeed config:", *problems]))
    notes = [*batch_note, *_clipping_note(config), *_ignored_note(leaves)]
    return Translation(_nested(options), "\n- ".join(["DeepSpeed config:", *notes]) if notes else "")


def is_known(key: object) -> bool:
    """True for a key of DeepSpeed."""
    return key in KNOWN or key in SECTIONS


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the given values by dotted key; sections that are switched off and null give none."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, Mapping):
            if key not in SWITCHED or value.get("enabled"):
                yield from _leaves(value, key + ".")
        elif value is not None:
            yield key, value


def _problem(key: str, value: Any) -> str | None:
    """Return the problem of one key, if it has one."""
    if key in MAPPED and value == "auto":
        return f"'{key}': {auto(key)}"
    if key in MAPPED:
        rule = MAPPED[key]
        return None if rule.takes(value) else f"'{key}': expected {rule.expected}, got {_with_type(value)}"
    if key in NO_EQUIVALENT:
        nearest, harmless = NO_EQUIVALENT[key]
        is_disabled = not value or (isinstance(value, Mapping) and value.get("enabled") is False)
        is_off = value in harmless if harmless else is_disabled
        return None if is_off else f"'{key}' has no equivalent: {nearest}"
    if key in SECTIONS:
        return f"'{key}': expected a section, got {_with_type(value)}"
    return None if key in KNOWN else _unknown(key)


def _unknown(key: str) -> str:
    leaf = key.rpartition(".")[2]
    # The same name in another section is meant rather than a similar one: 'stage'.
    close = sorted(known for known in KNOWN if known.rpartition(".")[2] == leaf)
    close += difflib.get_close_matches(key.lower(), sorted(KNOWN | SECTIONS), n=1)
    return f"unknown key '{key}'" + (f"; did you mean '{close[0]}'?" if close else "")


def _is_mapped(key: str, value: Any) -> bool:
    return key in MAPPED and MAPPED[key].takes(value)


def _options(leaves: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the options that mapped keys ask for, and the contradictions between them."""
    wanted: dict[str, tuple[Any, str]] = {"stage": (0, "")}  # no zero_optimization: nothing is sharded
    conflicts = []
    for key, value in leaves.items():
        for option, asked in MAPPED[key].options(value).items():
            first, by = wanted.setdefault(option, (asked, key))
            if not by:
                wanted[option] = (asked, key)
            elif first != asked:
                conflicts.append(f"'{by}' asks for {option}={first!r}, '{key}' for {asked!r}")
    options = {option: value for option, (value, _) in wanted.items()}
    if options.get("precision.param_dtype") == "float16":
        options.setdefault("precision.loss_scale", "dynamic")
    elif options.get("precision.param_dtype") == "bfloat16":
        options.setdefault("nonfinite", "skip")  # the default of DeepSpeed 0.19.6
    _tell_dynamic(options)
    return options, conflicts


def _tell_dynamic(options: Options) -> None:
    """Join the options of a dynamic loss scale into one; they have no effect beside a fixed scale."""
    keys = [key for key in options if key.startswith("precision.loss_scale.")]
    asked = {key.rpartition(".")[2]: options.pop(key) for key in keys}
    if asked and options.get("precision.loss_scale") == "dynamic":
        options["precision.loss_scale"] = asked


def _resolve_batch(options: Options, num_ranks: int | None) -> tuple[list[str], list[str]]:
    """Divide train_batch_size by the given factors; return the problems and the notes of that."""
    batch = options.pop("train_batch_size", None)
    if batch is None:
        return [], []
    size, steps = options.get("micro_batch_size"), options.get("gradient_accumulation_steps")
    data_ranks = max(1, (num_ranks or 1) // options.get("mesh.tp", 1))
    per_rank = (size or 1) * (steps or 1)
    is_given = size is not None and steps is not None
    # Without WORLD_SIZE, a batch with both factors given determines the number of ranks.
    divisor = per_rank if is_given and num_ranks is None else per_rank * data_ranks
    rest, remainder = divmod(batch, divisor)
    if remainder or not rest or (is_given and num_ranks is not None and rest != 1):
        parts = f"micro-batch {size or 'not given'}, accumulation steps {steps or 'not given'}"
        return [f"'train_batch_size': {batch} does not go into {parts}, data-parallel ranks {data_ranks}"], []
    if is_given:
        return [], []
    options["gradient_accumulation_steps" if size else "micro_batch_size"] = rest
    note = f"train_batch_size={batch} was taken for one rank: WORLD_SIZE, which torchrun sets, is not set"
    return [], [note] if num_ranks is None else []


def _clipping_note(config: Mapping[str, Any]) -> list[str]:
    if config.get("gradient_clipping") is not None:
        return []
    return [
        "gradient_clipping is not given, so gradients are not clipped; recent DeepSpeed (0.19.8) clips at 1.0"
    ]


def _ignored_note(keys: Mapping[str, Any]) -> list[str]:
    reasons = defaultdict(list)
    for key in keys:
        if key in IGNORED:
            reasons[IGNORED[key]].append(key)
    return [f"not read: {', '.join(ignored)} ({reason})" for reason, ignored in reasons.items()]


def _nested(options: Options) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def _with_type(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"
