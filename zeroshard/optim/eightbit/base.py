"""What all optimizers with states in blocks have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.eightbit.rules import Rule


class BlockwiseOptimizer(Optimizer):
    """Keeps states in blocks of 256: uint8 codes under their usual names, scales under `<name>_absmax`.

    Over slices that start on a block, as a sharded model has them, codes and scales are those of the whole
    parameter, at any number of ranks. Parameters of less than `min_8bit_size` elements, counted over all
    ranks, have float32 states. Updates are computed in float32.

    Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
    """

    rule: ClassVar[Rule]

    def override(self, parameter: Tensor, hyperparameters: Mapping[str, Any]) -> None:
        """Let a parameter differ from its group, also by `min_8bit_size`.

        Raises:
            ValueError: a hyperparameter is unknown, out of its range, or the same for all of a group; the
                parameter is not the optimizer's, or has its states already.
        """
        self.check_override(hyperparameters)
        if not any(parameter is held for group in self.param_groups for held in group["params"]):
            raise ValueError(f"{type(self).__name__}: expected one of its parameters, came another one")
        if "min_8bit_size" in hyperparameters and self.state.get(parameter):
            raise ValueError("min_8bit_size: expected before the first step of a parameter, came after it")
        self.overrides[parameter] = {**self.overrides.get(parameter, {}), **hyperparameters}

    def check_override(self, hyperparameters: Mapping[str, Any]) -> None:
        """Raise the errors of `override`."""
        for key in hyperparameters:
            if key not in self._overridable:
                raise ValueError(
                    f"{type(self).__name__}: of a single parameter, one can override "
                    f"{', '.join(self._overridable)}; came {key!r}"
                )
        self.check_group({**self.defaults, **hyperparameters})

    @property
    def overrides(self) -> dict[Tensor, dict[str, Any]]:
        """By parameter."""
        return self.__dict__.setdefault("_overrides", {})  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_overrides": self.overrides}

    def settings(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a parameter: those of its group, and its own."""
        return {**group, **self.overrides.get(parameter, {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave; codes and scales keep their dtypes."""
        given: dict[str, Any] = {}  # what other hooks have made of it
        last = self.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for group in self.param_groups:  # an optimizer of torch has none of it
            group.setdefault("min_8bit_size", self.defaults["min_8bit_size"])
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in given["state"].get(number, {}).items():
                if isinstance(value, Tensor):  # torch's own gives states the dtype of their parameter
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    @property
    def _overridable(self) -> tuple[str, ...]:
        return tuple(self.defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        check_ranges(group, _RANGES)


Ranges = Mapping[str, tuple[Callable[[Any], bool], str]]

_RANGES: Ranges = {
    "min_8bit_size": (lambda x: isinstance(x, int) and x is not True and x >= 0, "an integer >= 0"),
}


def check_ranges(group: Mapping[str, Any], ranges: Ranges) -> None:
    """Raise ValueError for the first hyperparameter that is not as expected."""
    for key, (is_in_range, expected) in ranges.items():
        if key in group and not _holds(is_in_range, group[key]):
            raise ValueError(f"{key}: expected {expected}, came {group[key]!r}")


def _holds(condition: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(condition(value))
    except TypeError:  # no number
        return False
