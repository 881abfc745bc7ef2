"""The description of a weight with codes, which is a tensor of JSON in its state_dict.

Weights of bitsandbytes with 4 bits have one, and those of other libraries that were taken apart. Scales are
tensors of the state_dict, too, and are saved and loaded like buffers. The description is computed anew each
time. It tells the kind of the codes, which must be that of the model, and with 4 bits the offset of the
scales, which belongs to the values.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.reader import Stored, TensorReader
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.forwards.composed import DESCRIPTION
from zeroshard.sharding.runtime import Runtime

_MARK = ".quant_state.bitsandbytes__"
_OFFSET = "nested_offset"

Offsets = dict[str, float | None]
"""By the name of a description; None where scales are not quantized themselves."""


def is_description(name: str) -> bool:
    """True for the name of a description in a state_dict."""
    return _MARK in name or name.rpartition(".")[2] == DESCRIPTION


def is_beside_codes(name: str) -> bool:
    """True for a tensor of a state_dict that bitsandbytes keeps beside the codes of a weight."""
    return is_description(name) or name.rpartition(".")[2] == "SCB"


def read_offsets(stored: Stored, runtime: Runtime, buffers: dict[str, Tensor]) -> Offsets:
    """Read the descriptions of a checkpoint.

    Args:
        stored: the checkpoint.
        runtime: of the model.
        buffers: tensors of the model's state_dict that are no parameters; the checkpoint has the same names.

    Raises:
        ValueError: a weight is quantized in another way.
    """
    offsets: Offsets = {}
    with TensorReader(stored, runtime.context.memory.rest) as reader:
        for name, buffer in buffers.items():
            if not is_description(name):
                continue
            shape = tuple(stored.tensors[name].shape)
            values = torch.empty(shape, dtype=torch.uint8, device="cpu")
            reader.read(TensorSlice(name, shape, 0, values))
            saved, own = _unpack(values), _unpack(buffer)
            offsets[name] = saved.pop(_OFFSET, None)
            own.pop(_OFFSET, None)
            if saved != own:
                raise ValueError(
                    f"'{stored.directory}': '{_weight_of(name)}' is quantized as {saved}; the model "
                    f"has {own}: expected the same kind of codes"
                )
    return offsets


def set_offset(model: nn.Module, name: str, offset: float | None) -> None:
    """Give the weight that a description belongs to the offset of its scales."""
    if offset is not None:
        weight: Any = model.get_parameter(_weight_of(name))
        weight.quant_state.offset.fill_(offset)


def _weight_of(name: str) -> str:
    """The name of the weight that a description belongs to."""
    return name.partition(_MARK)[0].removesuffix(DESCRIPTION.removeprefix("weight"))


def _unpack(values: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(values.cpu().numpy()).decode())
    return found
