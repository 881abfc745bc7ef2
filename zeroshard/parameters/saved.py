"""State dicts of this rank's slices, which warn when a file of them is written."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from typing import Any, ClassVar, Self

_OF_MODEL = (
    "a state_dict() of a sharded model is being saved; it holds this rank's 1-D slices. Save "
    "engine.full_state_dict() (called on all ranks; rank 0 gets whole tensors) or call "
    "engine.save_pretrained(folder); to go on training later, call engine.save_checkpoint(folder)"
)
_OF_OPTIMIZER = (
    "a state_dict() of an optimizer of a sharded model is being saved; it holds only the states of this "
    "rank's slices. Call engine.save_checkpoint(folder) on all ranks: it saves the whole states, for any "
    "number of ranks"
)


class SavedSlices(OrderedDict[str, Any]):
    """A state dict of slices of parameters."""

    warning: ClassVar[str] = _OF_MODEL

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(self.warning, stacklevel=4)  # the caller of torch.save
        plain = OrderedDict(self)
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def items(self) -> Any:
        if sys._getframe(1).f_code.co_name == "_find_shared_tensors":  # of safetensors, before it writes
            warnings.warn(self.warning, stacklevel=6)  # the caller of save_file
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self)((name, copy.deepcopy(value, memo)) for name, value in self.items())
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class SavedOptimizer(SavedSlices):
    """A state dict of an optimizer over slices."""

    warning = _OF_OPTIMIZER
