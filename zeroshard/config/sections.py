"""What the user asks for: frozen dataclasses, and every check of user input.

A field's annotation carries its rule, which says what is expected and what is stored:

    stage: Annotated[int, _integer(0, 3)] = 3
                          '------------ accepts, normalizes, and names what it expects

A type that includes None takes None besides; bool fields and nested sections need no rule of their own.
`_Checked` applies the rules, then the requirements between fields. Whatever is wrong with what the user
gave ends in a `ValueError` with the dotted key, what was expected and what came.
"""

import difflib
import json
import math
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

import torch
from torch import nn

from zeroshard.deepspeed.translate import is_known, translate

# ---------------------------------------------------------------------------------------------- rules

_REFUSED: Any = object()


class _Rule(NamedTuple):
    """What a field takes."""

    expected: str  # completes the sentence "expected ..."
    accept: Callable[[Any], Any]  # value given -> value stored, or _REFUSED


def _number(expected: str, in_range: Callable[[Any], bool], kind: type = Real, store: type = float) -> _Rule:
    def accept(value: Any) -> Any:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return store(value) if is_number and in_range(value) else _REFUSED

    return _Rule(expected, accept)


def _integer(low: int, high: float = math.inf) -> _Rule:
    expected = f"an integer >= {low}" if high == math.inf else f"an integer from {low} to {high}"
    return _number(expected, lambda value: low <= value <= high, kind=Integral, store=int)


def _choice(*choices: str) -> _Rule:
    def accept(value: Any) -> Any:
        return value.lower() if isinstance(value, str) and value.lower() in choices else _REFUSED

    return _Rule(" or ".join(map(repr, choices)), accept)


def _names(expected: str, name_of: Callable[[Any], Any]) -> _Rule:
    """One name or several, stored as a tuple."""

    def accept(value: Any) -> Any:
        several = isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)
        names = [name_of(item) for item in (value if several else [value])]
        if _REFUSED in names:
            return _REFUSED
        # A set's order differs between processes, and all ranks must read the same config.
        return tuple(sorted(names, key=str) if isinstance(value, Set) else names)

    return _Rule(expected, accept)


def _instance(kind: type, expected: str) -> _Rule:
    return _Rule(expected, lambda value: value if isinstance(value, kind) else _REFUSED)


def _either(*rules: _Rule) -> _Rule:
    def accept(value: Any) -> Any:
        answers = (rule.accept(value) for rule in rules)
        return next((answer for answer in answers if answer is not _REFUSED), _REFUSED)

    return _Rule(" or ".join(rule.expected for rule in rules), accept)


def _text(value: Any) -> Any:
    return value if isinstance(value, str) and value else _REFUSED


def _class_name(value: Any) -> Any:
    if isinstance(value, list | tuple):  # the names of modules that are one unit together
        names = tuple(map(_text, value))
        return _REFUSED if _REFUSED in names or not names else names
    return value.__name__ if isinstance(value, type) and issubclass(value, nn.Module) else _text(value)


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "double"), torch.float64),
}


def _dtype(value: Any) -> Any:
    is_named = isinstance(value, str | torch.dtype)
    return _DTYPES.get(str(value).lower().removeprefix("torch."), _REFUSED) if is_named else _REFUSED


def parse_dtype(value: Any) -> torch.dtype:
    """A floating-point dtype, or its name.

    Raises:
        ValueError: it is none.
    """
    dtype = _DTYPE.accept(value)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected {_DTYPE.expected}, got {value!r}")
    return dtype


def _device(value: Any) -> Any:
    if not isinstance(value, str | torch.device):
        return _REFUSED
    try:
        device = torch.device(value)
    except RuntimeError:
        return _REFUSED
    return {"cpu": "cpu", "meta": _REFUSED}.get(device.type, str(device))


_BOOLEAN = _instance(bool, "True or False")
_DTYPE = _Rule("a dtype among bfloat16, float16, float32, float64", _dtype)
_DEVICE = _Rule("a device such as 'cpu', 'cuda' or 'cuda:1'", _device)
_FRACTION = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_POSITIVE = _number("a finite number > 0", lambda value: 0 < value <= sys.float_info.max)
_SECONDS = _number("a number > 0 and at most 1e6", lambda value: 0 < value <= 1e6)
_PATH = _Rule("a path", lambda value: _text(os.fspath(value) if isinstance(value, os.PathLike) else value))
_TIER = _choice("none", "cpu", "nvme")
_MODULE_NAMES = _names("module names", _text)
_PATTERNS = _names("parameter names, or patterns such as 'blocks.*.bias'", _text)
# A class or a module is callable too, but calling it would build or run something.
_PREDICATE = _Rule(
    "a predicate that takes a module",
    lambda value: value if callable(value) and not isinstance(value, type | nn.Module) else _REFUSED,
)
_UNITS = _either(_names("class names (or module classes, or lists of module names)", _class_name), _PREDICATE)

# ----------------------------------------------------------------------------------- what checks itself


class _Requirement(NamedTuple):
    """One key whose value makes sense only with certain values of another key."""

    asked: bool
    key: str
    met: bool
    other: str
    needed: str  # completes the sentence "other must be ..."


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A dataclass that checks and normalizes its fields by their rules."""

    _prefix: ClassVar[str] = ""  # of its keys, as messages name them: "precision."
    _short: ClassVar[str] = ""  # how messages name its short form

    def __post_init__(self) -> None:
        for option in fields(self):
            rule, came = _rule_of(option.type), getattr(self, option.name)
            stored = rule.accept(came)
            if stored is _REFUSED:
                key = self._prefix + option.name
                raise ValueError(f"config key '{key}': expected {rule.expected}, came {_came(came)}")
            object.__setattr__(self, option.name, stored)
        for asked, key, met, other, needed in self._requirements():
            if asked and not met:
                value, came = attrgetter(key, other)(self)
                key, other = self._prefix + key, self._prefix + other
                raise ValueError(f"{key}={_show(value)} needs {other} to be {needed}, came {_show(came)}")

    def _requirements(self) -> list[_Requirement]:
        return []

    @classmethod
    def _from_short(cls, value: Any) -> Any:
        """The section that stands for a short form of it, or _REFUSED."""
        return _REFUSED

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from keys and values, sections being mappings themselves. Raises ValueError for a bad one."""
        if not isinstance(options, Mapping):
            raise ValueError(f"expected a mapping of config keys, came {_came(options)}")
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
        close = [name for name in _flat(Config()) if name.rpartition(".")[2] == key] + close
        of_deepspeed = "; Config.from_deepspeed reads DeepSpeed's." if is_known(key) else "."
        hint = f"; did you mean '{close[0]}'?" if close else of_deepspeed
        place = f"Known keys of '{cls._prefix[:-1]}'" if cls._prefix else "Known keys"
        return f"unknown config key '{cls._prefix}{key}'{hint} {place}: {', '.join(known)}"

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads, JSON-serializable. Raises ValueError when `units` is a predicate."""
        return {option.name: _plain(option.name, getattr(self, option.name)) for option in fields(self)}


_MEANT = {"precision.dtype": "precision.param_dtype", "dtype": "precision"}
"""Unknown keys whose meaning is plain, though another key looks more alike."""


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, _Checked)


def _rule_of(annotation: Any) -> _Rule:
    if annotation is bool:
        return _BOOLEAN
    if _is_section(annotation):
        expected = f"{annotation.__name__}(...), or its keys as a dict in from_dict{annotation._short}"
        short = _Rule(expected, annotation._from_short)
        return _Rule(expected, _either(_instance(annotation, expected), short).accept)
    kind, rule = get_args(annotation)
    return _either(_instance(NoneType, "None"), rule) if NoneType in get_args(kind) else rule


def _plain(key: str, value: Any) -> Any:
    if callable(value):
        raise ValueError(f"config key '{key}': expected class names to write down, came {_came(value)}")
    if isinstance(value, torch.dtype):
        return _show(value)
    if isinstance(value, _Checked):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _flat(config: _Checked) -> dict[str, Any]:
    """All values of a config and its sections, by dotted key."""
    flat: dict[str, Any] = {}
    for option in fields(config):
        value = getattr(config, option.name)
        flat.update(_flat(value) if isinstance(value, _Checked) else {config._prefix + option.name: value})
    return flat


def _show(value: object) -> str:
    text = repr(value).removeprefix("torch.")
    return text if len(text) <= 200 else text[:200] + "..."


def _came(value: object) -> str:
    return "None" if value is None else f"{_show(value)} ({type(value).__name__})"


# ----------------------------------------------------------------------------------------- the sections


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale(_Checked):
    """How the loss scale of float16 follows overflows; the defaults are those of torch.amp.GradScaler."""

    _prefix = "precision.loss_scale."
    start: Annotated[float, _POSITIVE] = 65536.0  # the scale of the first step
    window: Annotated[int, _integer(1)] = 2000  # steps without overflow after which the scale is doubled
    minimum: Annotated[float, _POSITIVE] = 1.0  # an overflow halves the scale, but not below this
    # Overflows since the scale was last doubled, of which only the last one and later ones halve it.
    hysteresis: Annotated[int, _integer(1)] = 1

    def _requirements(self) -> list[_Requirement]:
        needed = f">= minimum={self.minimum:g}"
        return [_Requirement(True, "start", self.start >= self.minimum, "start", needed)]


def _dynamic_loss_scale(value: Any) -> Any:
    if isinstance(value, Mapping):
        return DynamicLossScale.from_dict(value)
    return value if isinstance(value, DynamicLossScale) else _REFUSED


_LOSS_SCALE = _either(
    _choice("dynamic"), _POSITIVE, _Rule("a dict of start, window, minimum, hysteresis", _dynamic_loss_scale)
)


@dataclass(frozen=True, kw_only=True)
class Precision(_Checked):
    """Dtypes of what is computed, sent and kept: torch dtypes, or names such as "bf16".

    A dtype alone, `precision="bf16"`, stands for `Precision(param_dtype="bf16")`.
    """

    _prefix = "precision."
    _short = ", or a dtype such as 'bf16', which stands for param_dtype"
    # Of parameters and float inputs in forward and backward. None: as the model has them.
    param_dtype: Annotated[torch.dtype | None, _DTYPE] = None
    # In which gradients are summed over ranks. None: param_dtype, but at least float32.
    reduce_dtype: Annotated[torch.dtype | None, _DTYPE] = None
    # Of main parameters and their gradients. None: the model's, but at least float32. Optimizer states and
    # updates have at least float32; into bfloat16, updates are rounded stochastically.
    main_dtype: Annotated[torch.dtype | None, _DTYPE] = None
    # To which the model's float outputs are cast. None: they are left as they are.
    output_dtype: Annotated[torch.dtype | None, _DTYPE] = None
    # Factor on the loss against underflow of float16 gradients. None: "dynamic", which adapts it; a dict of
    # start, window, minimum and hysteresis tells how.
    loss_scale: Annotated[float | str | DynamicLossScale | None, _LOSS_SCALE] = None

    @classmethod
    def _from_short(cls, value: Any) -> Any:
        dtype = _dtype(value)
        return _REFUSED if dtype is _REFUSED else cls(param_dtype=dtype)

    def _requirements(self) -> list[_Requirement]:
        is_half = self.param_dtype == torch.float16
        return [_Requirement(self.loss_scale is not None, "loss_scale", is_half, "param_dtype", "float16")]


@dataclass(frozen=True, kw_only=True)
class Offload(_Checked):
    """What lives outside the device: "none" (stays on it), "cpu" (host memory) or "nvme" (files)."""

    _prefix = "offload."
    # Tier of main parameters and optimizer states; the optimizer step runs there.
    optimizer: Annotated[str, _TIER] = "none"
    parameters: Annotated[str, _TIER] = "none"  # tier of the sharded parameters between uses
    activations: Annotated[str, _TIER] = "none"  # tier of activations between forward and backward
    # Part of the offloaded optimizer states that stays on the device, 0 to 1.
    device_fraction: Annotated[float, _FRACTION] = 0.0
    nvme_path: Annotated[str | None, _PATH] = None  # directory for the files of the nvme tier
    # Threads of an optimizer step on the host. None: torch's own setting.
    num_threads: Annotated[int | None, _integer(1)] = None

    def _requirements(self) -> list[_Requirement]:
        has_path, tiers = self.nvme_path is not None, ("optimizer", "parameters", "activations")
        uses = {tier: getattr(self, tier) == "nvme" for tier in tiers}
        return [_Requirement(used, tier, has_path, "nvme_path", "a path") for tier, used in uses.items()]


@dataclass(frozen=True, kw_only=True)
class Checkpoint(_Checked):
    """How checkpoints are kept."""

    _prefix = "checkpoint."
    # Number of checkpoints that are kept, the newest ones. None: all.
    keep_last: Annotated[int | None, _integer(1)] = None
    verify: bool = True  # whether checksums are compared on load
    frozen: bool = (
        True  # False leaves out what is frozen: such checkpoints load over the same frozen parameters
    )


@dataclass(frozen=True, kw_only=True)
class Loader(_Checked):
    """The DataLoader that `initialize` builds from `training_data`."""

    _prefix = "loader."
    num_workers: Annotated[int, _integer(0)] = 0  # processes that load samples; 0: this one does
    # Whether batches are collated in pinned memory. None: where the device is an accelerator.
    pin_memory: Annotated[bool | None, _BOOLEAN] = None
    drop_last: bool = False  # whether the last batch of an epoch is left out where it is smaller


@dataclass(frozen=True, kw_only=True)
class Mesh(_Checked):
    """Ranks along the model-parallel axes; the data-parallel axes get what is left."""

    _prefix = "mesh."
    pp: Annotated[int, _integer(1)] = 1  # ranks along the pipeline-parallel axis
    tp: Annotated[int, _integer(1)] = 1  # ranks along the tensor-parallel axis


@dataclass(frozen=True, kw_only=True)
class Pipeline(_Checked):
    """How a batch flows through the pipeline-parallel ranks."""

    _prefix = "pipeline."
    # Order of forwards and backwards, in upper or lower case.
    schedule: Annotated[str, _choice("1f1b", "gpipe", "interleaved1f1b", "zerobubble")] = "1f1b"
    num_microbatches: Annotated[int, _integer(1)] = 1  # micro-batches in a rank's batch
    # Names of the modules that each begin a new pipeline stage. None: the model is cut automatically.
    split: Annotated[Sequence[str] | None, _MODULE_NAMES] = None
    num_chunks: Annotated[int, _integer(1)] = 1  # pipeline stages on each rank


@dataclass(frozen=True, kw_only=True)
class Config(_Checked):
    """All that can be asked of `zeroshard.initialize`. Raises ValueError for what is impossible."""

    # 0: nothing is sharded; 1: optimizer states are; 2: gradients too; 3: parameters too.
    stage: Annotated[int, _integer(0, 3)] = 3
    precision: Precision = Precision()  # dtypes of what is computed, sent and kept
    # Where this rank computes; of the same type on all ranks. None: the accelerator of its local rank where
    # there is one and the open process group serves it, else the CPU.
    device: Annotated[str | None, _DEVICE] = None
    # Micro-batches whose gradients are added up before an optimizer step.
    gradient_accumulation_steps: Annotated[int, _integer(1)] = 1
    # Largest global L2 norm of the gradients, beyond which they are scaled down. None: no clipping.
    clip_grad_norm: Annotated[float | None, _POSITIVE] = None
    # A step whose gradient norm is inf or nan is taken ("report"), left out ("skip") or an error ("error").
    # In float16, "report" leaves it out as well, and "error" waits until the loss scale can't be lowered.
    nonfinite: Annotated[str, _choice("report", "skip", "error")] = "report"
    # Samples in a rank's micro-batch, for the DataLoader that `initialize` builds.
    micro_batch_size: Annotated[int, _integer(1)] = 1
    # Modules that are gathered as one: class names or a predicate. None: repeated blocks are found.
    # A list of module names among the class names makes one unit of several modules.
    units: Annotated[Sequence[str | Sequence[str]] | Callable[[nn.Module], bool] | None, _UNITS] = None
    # Names of parameters, * for any letters, that each rank keeps whole and steps by itself. None: none.
    ignored: Annotated[Sequence[str] | None, _PATTERNS] = None
    # Ranks in a shard group, for hybrid sharding. None: all ranks are one group.
    shard_group_size: Annotated[int | None, _integer(1)] = None
    # Whether parameters are freed from forward to backward. An integer: kept, over that many ranks.
    reshard_after_forward: Annotated[bool | int, _either(_BOOLEAN, _integer(2))] = True
    num_prefetch: Annotated[int, _integer(0)] = 1  # units that are gathered ahead of the one that computes
    # "unit": backward recomputes the activations inside each unit. "none": all are kept.
    recompute: Annotated[str, _choice("none", "unit")] = "none"
    compile: bool = False  # whether each unit is compiled with torch.compile
    offload: Offload = Offload()  # what lives in host memory or in files
    checkpoint: Checkpoint = Checkpoint()  # how checkpoints are kept
    loader: Loader = Loader()  # the DataLoader that `initialize` builds
    mesh: Mesh = Mesh()  # ranks along the model-parallel axes
    pipeline: Pipeline = Pipeline()  # how a batch flows through the pipeline-parallel ranks
    # Seconds that a rank may wait in a collective before the watchdog ends the run.
    watchdog_s: Annotated[float, _SECONDS] = 600.0

    def _requirements(self) -> list[_Requirement]:
        stage_3 = (self.stage == 3, "stage", "3")
        pipelined = (self.mesh.pp > 1, "mesh.pp", ">= 2")
        regroups = not isinstance(self.reshard_after_forward, bool)
        param_dtype, main_dtype = self.precision.param_dtype, self.precision.main_dtype
        not_half = (param_dtype != torch.float16, "precision.param_dtype", "another dtype than float16")
        not_narrow = (main_dtype != torch.bfloat16, "precision.main_dtype", "another dtype than bfloat16")
        return [
            _Requirement(self.shard_group_size is not None, "shard_group_size", *stage_3),
            _Requirement(regroups, "reshard_after_forward", *stage_3),
            _Requirement(self.offload.parameters != "none", "offload.parameters", *stage_3),
            _Requirement(self.pipeline.num_chunks > 1, "pipeline.num_chunks", *pipelined),
            _Requirement(self.pipeline.split is not None, "pipeline.split", *pipelined),
            # Gradients of ignored parameters are neither unscaled nor widened.
            _Requirement(bool(self.ignored), "ignored", *not_half),
            _Requirement(bool(self.ignored), "ignored", *not_narrow),
        ]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"zeroshard's Config has no attribute {name!r}; engine.config is such a Config, the model's "
            "own config is engine.module.config"
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a .json or .toml file. Raises ValueError naming the file, and the line of a syntax error."""
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"config file: expected a path, came {_came(path)}")
        with _naming(path):
            return cls.from_dict(_read(Path(path)))

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> Self:
        """Read a DeepSpeed config: a dict, or the path of a file; see docs/migrating.md.

        One warning tells what is to be written elsewhere (optimizer and scheduler) and what has no effect.
        `train_batch_size` is divided over WORLD_SIZE, which torchrun sets; without it, over one rank.

        Raises:
            ValueError: listing all keys that are unknown, wrong, "auto", or have no equivalent.
        """
        path = config if isinstance(config, str | os.PathLike) else None
        with nullcontext() if path is None else _naming(path):
            given: Any = config if path is None else _read(Path(path))
            options, note = translate(given, _world_size())
            translated = cls.from_dict(options)
        if note:
            warnings.warn(note, stacklevel=2)
        return translated

    @classmethod
    def parse(cls, config: "Config | Mapping[str, Any] | str | os.PathLike[str] | None") -> "Config":
        """The Config that `initialize` is given: as an object, a mapping or a path; None: the defaults."""
        if isinstance(config, Config):
            return config
        if isinstance(config, str | os.PathLike):
            return cls.from_file(config)
        if config is None or isinstance(config, Mapping):
            return cls.from_dict(config or {})
        raise ValueError(f"config: expected a Config, a dict, a path or None, came {_came(config)}")


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is wrong inside is told with the name of the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"config file '{path}': {error}") from None


def _world_size() -> int | None:
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() else None


def _read(file: Path) -> Any:
    parsers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    if file.suffix.lower() not in parsers:
        raise ValueError("expected a name that ends in .json or .toml")
    try:
        return parsers[file.suffix.lower()](file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror}") from None


# ------------------------------------------------------------------------ what this version doesn't have

_NOT_YET: tuple[_Checked, ...] = (Offload(), Mesh(), Pipeline())
# Keys that have only some of their values so far; of the sections above, only the defaults.
_AVAILABLE: dict[str, tuple[object, ...]] = {
    "precision.main_dtype": (None, torch.float32, torch.float64, torch.bfloat16),
} | {key: (value,) for section in _NOT_YET for key, value in _flat(section).items()}


def require_supported(config: Config) -> None:
    """Raise one ValueError that lists all that `config` asks for and zeroshard doesn't have yet."""
    asked = {key: value for key, value in _flat(config).items() if value not in _AVAILABLE.get(key, (value,))}
    if asked:
        missing = ", ".join(f"{key}={_show(value)}" for key, value in asked.items())
        raise ValueError(f"not available in zeroshard yet: {missing}")
