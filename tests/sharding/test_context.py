"""The changes of modules: all that lies around a forward is in one order."""

from functools import partial

import pytest
from torch import nn

from zeroshard.sharding.context import ORDER, Changes


def test_a_stack_is_in_the_order_of_all_changes():
    changes, module = Changes(), nn.Linear(2, 2)
    forward = module.forward
    for name in ("codes", "cast", "recompute"):
        changes.around(module, name, partial)
    assert changes.stacks == {module: ["codes", "cast", "recompute"]}
    with pytest.raises(AssertionError, match="expected the order of ORDER, got"):
        changes.around(module, ORDER[0], partial)
    with pytest.raises(ValueError, match="not in tuple"):
        changes.around(nn.Linear(2, 2), "other", partial)
    changes.undo()
    assert module.forward == forward
    assert not changes.stacks
