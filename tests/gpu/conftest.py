from functools import partial

import pytest


@pytest.fixture
def on_gpus(ranks):
    """As `ranks`, for functions that open their group, over NCCL."""
    return partial(ranks, process_group=False, timeout=300)
