"""Memory that goes while tensors view it."""

import pytest
import torch
from torch import nn

from zeroshard.stores.storage import _CAN_FORBID, allocate, count_views, release

needs_errors = pytest.mark.skipif(not _CAN_FORBID, reason="needs a torch that can clear the message, as 2.14")

READS = {
    "arithmetic": lambda view: view + 1,
    "in place": lambda view: view.zero_(),
    "a product": lambda view: view @ view,
    "an embedding": lambda view: nn.functional.embedding(torch.tensor([1]), view),
    "a layer": lambda view: nn.functional.linear(torch.ones(4), view),
    "a list": lambda view: view.tolist(),
    "numpy": lambda view: view.numpy(),
    "a copy": lambda view: view.clone(),
    "an element": lambda view: view.sum().item(),
    "text": repr,
}


@needs_errors
@pytest.mark.parametrize("what", READS)
def test_who_reads_a_view_of_memory_that_is_gone_gets_the_error(what):
    full = torch.randn(32)
    view = full[8:24].view(4, 4)
    release(full, "the memory is gone")
    with pytest.raises(RuntimeError, match=r"the memory is gone|out of bounds for storage"):
        READS[what](view)


def test_memory_that_is_taken_again_can_be_read_through_the_same_views():
    full = torch.randn(32)
    view = full[8:24].view(4, 4)
    release(full, "the memory is gone")
    assert full.untyped_storage().nbytes() == 0
    allocate(full, 128)
    full.fill_(2.0)
    assert view.sum() == 32.0


def test_each_view_that_is_alive_counts():
    full = torch.randn(32)
    before = count_views(full)
    views = [full[:4], full.view(4, 8).t(), full.detach()]
    assert count_views(full) == before + 3
    del views
    assert count_views(full) == before
