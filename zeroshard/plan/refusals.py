"""Parameters and buffers that sharding would change, refused by name before anything is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn


def check_tensors(parameters: Mapping[str, nn.Parameter], buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters and buffers that a flat buffer cannot replace.

    Args:
        parameters: the parameters that are sharded, by name.
        buffers: the buffers of the model, with their names.

    Raises:
        ValueError: a parameter of a class with operations of its own; parameters, or a parameter and a
            buffer, that share memory; a buffer that is not dense.
    """
    for name, parameter in parameters.items():
        _check_class(parameter, name)
    areas = [_Area.of(parameter, "parameter", name) for name, parameter in parameters.items()]
    for name, buffer in buffers:
        _check_dense(buffer, name)
        areas.append(_Area.of(buffer, "buffer", name))
    _check_apart(areas)


def _check_class(parameter: nn.Parameter, name: str) -> None:
    kind = type(parameter)
    if hasattr(parameter, "quant_state"):  # of bitsandbytes, whose own operations only keep this along
        return
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
    if function not in plain or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"parameter '{name}' is a {kind.__name__} with operations of its own, so a shard of plain "
            "numbers cannot replace it: expected a torch.nn.Parameter, or the frozen weight of a "
            "torch.nn.Linear that wraps contiguous tensors. Shard the model before it is quantized or "
            "converted, or leave the parameter out with Config(ignored=...)"
        )


def _check_dense(buffer: Tensor, name: str) -> None:
    if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
        kind = "nested" if buffer.is_nested else buffer.dtype if buffer.is_quantized else buffer.layout
        raise ValueError(
            f"buffer '{name}' is {kind}; expected a dense buffer, which can be sent to all ranks. Register "
            "its parts (indices and values, integers and scale, ...) as buffers and put them together in "
            "forward; or keep it as a plain attribute, with values of its own on each rank"
        )


class _Area(NamedTuple):
    """The memory of a tensor; for a tensor without memory, its part of the storage."""

    home: object
    """An object that tensors with common memory have in common: a device or a storage."""
    start: int
    stop: int
    tensor: Tensor
    kind: str
    name: str

    @staticmethod
    def of(tensor: Tensor, kind: str, name: str) -> _Area:
        size = tensor.element_size()
        if tensor.device.type != "meta":
            home, start = tensor.device, tensor.data_ptr()
        else:
            home, start = tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * size
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = (1 + sum((extent - 1) * step for extent, step in steps)) * size if tensor.numel() else 0
        return _Area(home, start, start + length, tensor, kind, name)

    def overlaps(self, other: _Area) -> bool:
        """True if the areas share an element. Two columns of a matrix do not: they lie between each other."""
        if self.home != other.home or other.start >= self.stop or self.start >= other.stop:
            return False
        size, start = self.tensor.element_size(), min(self.start, other.start)
        if size != other.tensor.element_size() or (self.start - other.start) % size:
            return True
        marks = torch.zeros((max(self.stop, other.stop) - start) // size, dtype=torch.bool)
        self._within(marks, start).fill_(True)
        return bool(other._within(marks, start).any())

    def _within(self, marks: Tensor, start: int) -> Tensor:
        offset = (self.start - start) // self.tensor.element_size()
        return marks.as_strided(self.tensor.shape, self.tensor.stride(), offset)


def _check_apart(areas: Iterable[_Area]) -> None:
    """Refuse memory that two names share, if one of them is trained."""
    before: list[_Area] = []
    for area in sorted(areas, key=lambda area: (str(area.home), area.start)):
        before = [one for one in before if one.home == area.home and one.stop > area.start]
        for one in before:
            is_trained = one.tensor.requires_grad or area.tensor.requires_grad
            if is_trained and "parameter" in (one.kind, area.kind) and one.overlaps(area):
                first, second = sorted((one, area), key=lambda area: area.kind == "buffer")
                remedy = (
                    "assign one Parameter object to both modules (b.weight = a.weight)"
                    if second.kind == "parameter"
                    else "compute the buffer in forward"
                )
                raise ValueError(
                    f"{first.kind} '{first.name}' and {second.kind} '{second.name}' share memory but are "
                    f"two objects, so sharding would separate them: {remedy}, or give each its own values "
                    "with clone()"
                )
        before.append(area)
