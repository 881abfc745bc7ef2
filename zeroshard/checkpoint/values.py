"""Values that are neither parameters nor element-wise states: JSON, with their tensors in safetensors.

    value                                   in JSON
    None, True, 1, 0.5, "x"                 the same
    [1, 2], {"a": 1}                        the same, where all keys are strings that do not start with "$"
    other dicts                             {"$dict": [[key, value], ...]}, "$OrderedDict", "$Counter"
    (1, 2), {1, 2}                          {"$tuple": [1, 2]}, {"$set": [1, 2]}, "$frozenset"
    nan, inf, -inf                          {"$float": "nan"}
    an int of more than 4096 bits           {"$int": "0x..."}
    1j, b"x", torch.Size((1, 2))            {"$complex": [0.0, 1.0]}, {"$bytes": "78"}, {"$Size": [1, 2]}
    torch.float16, torch.device("cpu")      {"$dtype": "float16"}, {"$device": "cpu"}
    a tensor                                {"$tensor": {"name": "3"}}: its name in the file of safetensors
    a parameter                             {"$parameter": {"name": "3"}}

A value comes back with the same type. A tensor comes back on the CPU, contiguous, with memory of its own.
Numbers and strings of NumPy come back as numbers and strings of Python, arrays as tensors.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import TENSORS, VALUES
from zeroshard.codec import dtype_name, naming_damage, typed
from zeroshard.plan.layout import Span
from zeroshard.safetensors import DTYPE_NAMES, FileTensor, TensorInfo, begin_file, read_header

MAX_DEPTH = 100
"""Most containers around a value. Python's own stack, and so what walks through values, ends near 1000."""

_MAX_INT_BITS = 4096
"""Python reads decimal numbers of at most 4300 digits, which is more bits than these."""
_SEQUENCES = (tuple, set, frozenset, torch.Size)
_DICTS = (dict, OrderedDict, Counter)
_ATOMS: dict[type, Callable[[Any], str]] = {bytes: bytes.hex, torch.dtype: dtype_name, torch.device: str}


@dataclass(frozen=True, kw_only=True)
class SavedValues:
    """The values of a checkpoint that are neither in tensors nor in the manifest."""

    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group, and under "names" its parameters."""
    scalars: dict[str, dict[Any, Any]]
    """States with one value for all elements of a parameter, such as "step", by the name of the parameter."""
    other: dict[str, Any]
    """States that belong to no parameter."""
    lr_scheduler: dict[Any, Any] | None
    rng: list[dict[str, Any]]
    """The generators of each data-parallel rank: of the first of its tensor ranks."""
    hooks: list[Any] = field(default_factory=list)
    """The record of each rank's gradient hook, see `GradientHook.to_files`."""
    extra: dict[str, Any]
    """The values that modules' get_extra_state() gave."""
    client_state: dict[Any, Any]


def check_plain(value: Any, name: str) -> None:
    """Raise ValueError with the key of the first value that a checkpoint cannot hold.

    Args:
        value: containers, numbers, strings and tensors.
        name: of the value, for the error.
    """
    _JsonEncoder().encode(value, name)


def to_files(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the files `VALUES` and `TENSORS`, by name.

    Raises:
        ValueError: as `check_plain`.
    """
    encoder = _JsonEncoder()
    # By the depth that `check_plain` allows, in up to three containers more.
    encoded = encoder.encode(dict(values), "values", -3)
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in encoder.tensors.items()}
    beginning = begin_file(infos)
    flat = (encoder.tensors[name].reshape(-1).view(torch.uint8) for name in beginning.offsets)
    tensors = b"".join([beginning.header, *(one.numpy().data for one in flat)])  # in this order, without gaps
    return {VALUES: json.dumps(encoded, allow_nan=False).encode(), TENSORS: tensors}


def read_values(directory: Path) -> Any:
    """Return the values of which `to_files` made files.

    Raises:
        DamageError: a file is damaged, or says what cannot be.
    """
    file = directory / VALUES
    with naming_damage(file):
        return _JsonDecoder(directory / TENSORS).decode(json.loads(file.read_bytes()))


# -------------------------------------------------------------------------------------------- writing


class _JsonEncoder:
    """Makes JSON of values, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """On the CPU, contiguous, of dtypes that safetensors has."""

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return what stands for a value in JSON.

        Args:
            value: not changed.
            path: of the value, for errors.
            depth: of containers around it.

        Raises:
            ValueError: it has no form in JSON, or is nested too deeply.
        """
        value = value.item() if isinstance(value, numpy.generic) else value
        if isinstance(value, numpy.ndarray):
            with suppress(TypeError):  # of objects: refused below
                value = torch.from_numpy(value.copy())
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= _MAX_INT_BITS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is complex:
            return {"$complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind in _ATOMS:
            return {f"${kind.__name__}": _ATOMS[kind](value)}
        if kind in (Tensor, nn.Parameter):
            return self._encode_tensor(value, path)
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{path:.300}: expected values nested up to {MAX_DEPTH} deep, and no value that holds itself"
            )
        if kind is list or kind in _SEQUENCES:
            items = [self.encode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
            return items if kind is list else {f"${kind.__name__}": items}
        if kind in _DICTS:
            return self._encode_dict(value, path, depth)
        raise _foreign(value, path)

    def _encode_dict(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        items = {key: self.encode(item, f"{path}[{key!r:.100}]", depth + 1) for key, item in value.items()}
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return items
        keys = [self.encode(key, f"{path}: the key {key!r:.100}", depth + 1) for key in items]
        return {f"${type(value).__name__}": [list(pair) for pair in zip(keys, items.values(), strict=True)]}

    def _encode_tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or vars(value):
            kind = "a meta" if value.is_meta else "a quantized" if value.is_quantized else "another"
            raise ValueError(
                f"{path}: expected a dense tensor with values and without attributes of its own, got {kind} "
                "one. Give a sparse tensor as its indices, values and shape"
            )
        options: dict[str, Any] = {"requires_grad": True} if value.requires_grad else {}
        tag = "$parameter" if type(value) is nn.Parameter else "$tensor"
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        name, stored = str(len(self.tensors)), value
        if value.dtype not in DTYPE_NAMES:  # stored as bytes
            options |= {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
            stored = value.reshape(-1).view(torch.uint8)
        self.tensors[name] = stored
        return {tag: {"name": name, **options}}


def _foreign(value: Any, path: str) -> ValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ValueError(
        f"{path}: expected tensors, numbers, strings, None, and lists, tuples and dicts of them, "
        f"which load without running code; got {kind}. Give what it is made from, such as str(path), "
        "dict(values) or list(values)"
    )


# -------------------------------------------------------------------------------------------- reading


class _JsonDecoder:
    """Makes values of JSON."""

    def __init__(self, file: Path) -> None:
        self._infos: dict[str, FileTensor] = read_header(file)
        self._make: dict[str, Callable[[Any], Any]] = {
            **{f"${kind.__name__}": kind for kind in _SEQUENCES},
            "$dict": dict,
            "$OrderedDict": OrderedDict,
            "$Counter": lambda pairs: Counter(dict(pairs)),
            "$float": float,
            "$int": lambda text: int(text, 16),
            "$complex": lambda parts: complex(*parts),
            "$bytes": bytes.fromhex,
            "$dtype": lambda name: typed(torch.dtype, name, "$dtype"),
            "$device": torch.device,
            "$tensor": lambda fields: self._tensor(**fields),
            "$parameter": lambda fields: nn.Parameter(
                self._tensor(**fields).detach(), fields.get("requires_grad", False)
            ),
        }

    def decode(self, value: Any) -> Any:
        """Return the value that JSON stands for. Raises an error of any kind where it stands for none."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        decoded = {key: self.decode(item) for key, item in value.items()}
        tag = next((key for key in decoded if key.startswith("$")), None)
        if tag is None:
            return decoded
        [(tag, content)] = decoded.items()
        return self._make[tag](content)

    def _tensor(
        self,
        *,
        name: str,
        dtype: str | None = None,
        shape: list[int] | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        info = self._infos.pop(name)  # each once: a small file cannot fill the memory
        values = info.read(Span(0, info.numel)).view(info.shape).clone()
        if dtype is not None:
            values = values.view(typed(torch.dtype, dtype, name)).view(shape or ())
        return values.requires_grad_(requires_grad)
