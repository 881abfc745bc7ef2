"""Copies and files of a sharded model: no copy or pickle can be made, and slices in a file warn."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.internals.warn import warn_user

_WARNING = (
    "a state_dict() of a sharded model is being saved, or of its optimizer; it holds this rank's slices. "
    "Save engine.full_state_dict() (called on all ranks; rank 0 gets whole tensors) or call "
    "engine.save_pretrained(folder); to go on later, call engine.save_checkpoint(folder) on all ranks"
)


class NotCopied:
    """An object that holds a sharded model or a slice of it: no copy or pickle of it can be made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "copy.deepcopy of a sharded model would copy this rank's slices, and hooks of its engine: copy "
            "the model before initialize or after engine.close(), or load engine.full_state_dict() (called "
            "on all ranks) into another model"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a sharded model cannot be pickled: save engine.full_state_dict() (called on all ranks), or call "
            "engine.save_pretrained(folder) or engine.save_checkpoint(folder)"
        )


class SavedSlices(OrderedDict[str, Any]):
    """A state dict of slices of parameters, or of their states in an optimizer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_user(_WARNING)
        plain = OrderedDict(self)
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def items(self) -> Any:
        if sys._getframe(1).f_code.co_name == "_find_shared_tensors":  # of safetensors, before it writes
            warn_user(_WARNING)
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self)((name, copy.deepcopy(value, memo)) for name, value in self.items())
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def guard_copies(
    modules: Iterable[nn.Module],
    note: Callable[[RemovableHandle], None],
    give: Callable[[nn.Module, str, Any], None],
) -> None:
    """Have `state_dict()` of modules return `SavedSlices` while they show slices; refuse copies and pickles.

    Copies and pickles are refused also where modules show whole parameters.

    Args:
        note: notes a hook of a module.
        give: sets an attribute of a module.
    """
    refused = NotCopied()
    for module in modules:
        note(module._register_state_dict_hook(_mark))
        give(module, "__deepcopy__", refused.__deepcopy__)
        give(module, "__reduce_ex__", refused.__reduce_ex__)


def _mark(module: nn.Module, state_dict: OrderedDict[str, Any], prefix: str, _: Any) -> SavedSlices | None:
    if prefix or not any(isinstance(parameter, NotCopied) for parameter in module.parameters()):
        return None
    marked = SavedSlices(state_dict)
    marked.__dict__.update(state_dict.__dict__)  # torch keeps versions there
    return marked
