"""Tensors inside dataclasses are changed, and the rest of a dataclass stays as it is."""

from dataclasses import dataclass, field

import torch

from zeroshard.internals.nested import change_tensors


@dataclass
class State:
    hidden: torch.Tensor
    notes: dict = field(default_factory=dict)


def test_containers_without_a_changed_tensor_stay_the_same_objects():
    state = State(torch.ones(2), {"seen": torch.ones(1, dtype=torch.int64)})
    changed = change_tensors(state, lambda t: t.double() if t.is_floating_point() else t)
    assert (changed.hidden.dtype, state.hidden.dtype) == (torch.float64, torch.float32)
    assert changed.notes is state.notes
    assert change_tensors(state, lambda t: t) is state
