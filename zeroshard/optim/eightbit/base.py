"""The base of all optimizers with states in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.eightbit import blocks
from zeroshard.optim.eightbit.rule import Rule
from zeroshard.optim.eightbit.step import has_kernel, take_step
from zeroshard.optim.ranges import RANGES, ChecksRanges, called, check_ranges, dense
from zeroshard.stepping.rounding import Bits, BitsOf, load_states, no_bits

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class BlockwiseOptimizer(ChecksRanges):
    """Keeps states in blocks of 256: uint8 codes under their usual names, scales under `<name>_absmax`.

    Over slices that start on a block, as a sharded model has them, codes and scales are the same as for the
    whole parameter, at any number of ranks. Parameters of less than `min_8bit_size` elements, counted over
    all ranks, have float32 states. Updates are computed in float32.

    Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
    """

    rule: ClassVar[Rule]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of a `state_dict()`; codes and scales keep their dtypes."""
        load_states(self, super().load_state_dict, state_dict)
        for group in self.param_groups:  # an optimizer of torch has none of it
            group.setdefault("min_8bit_size", self.defaults["min_8bit_size"])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a hyperparameter that is out of its range."""
        super().check_group(group)
        check_ranges(group, {**RANGES, **self.rule.ranges})

    def compile_kernels(self, device: torch.device) -> None:
        """Compile the steps of a GPU, or warn that they cannot be compiled: before the first backward."""
        for group in self.param_groups:
            has_kernel(self.rule, device, len(self.rule.scalars(self.rule.numbers(group, 1))))

    def _step_by_rule(
        self,
        parameter: Tensor,
        gradient: Tensor,
        settings: Mapping[str, Any],
        bits: Bits | None = None,
    ) -> None:
        """Take a parameter and its states through one step; a step that fails is not counted.

        Args:
            gradient: [n], float32; replaced by the update where the rule gives that.
            settings: the hyperparameters of this step.
            bits: the random bits of a bfloat16 parameter, which is rounded stochastically; its gradient may
                have any dtype.
        """
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(blocks.begin(self.rule, parameter, settings["min_8bit_size"]))
        step = int(state["step"]) + 1
        numbers = self.rule.numbers(settings, step)
        values, held = blocks.flat(parameter, is_widened=bits is None), blocks.read(self.rule, state)
        take_step(self.rule, values, gradient, held, numbers, bits)
        state["step"] = step
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values.view(parameter.shape))


class ElementWise8bit(BlockwiseOptimizer):
    """An optimizer whose class has a `rule`, and hands its hyperparameters on.

    Args:
        params: parameters or parameter groups.
        defaults: the hyperparameters of groups that have no others, by name.
        min_8bit_size: elements of a whole parameter from which its states are quantized.

    Raises:
        ValueError: a hyperparameter is out of the range that the rule has for it.
    """

    bits_of: BitsOf = staticmethod(no_bits)
    """The random bits of bfloat16 parameters, which are stepped as they are; see `RoundsItself`."""

    def __init__(self, params: Params, defaults: dict[str, Any], min_8bit_size: int) -> None:
        super().__init__(params, {"min_8bit_size": min_8bit_size, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Returns:
            The result of `closure`, which is called first, with gradients on; None without a closure.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = called(closure)
        with past_guards():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        bits = self.bits_of(parameter)
                        flat = blocks.flat(dense(gradient), is_widened=bits is None)
                        self._step_by_rule(parameter, flat, group, bits)
        return loss
