from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks
from tests.worker import ask_no_name_server

# The ranks of a test share few cores, so an example's time says nothing; in CI, examples don't change.
settings.register_profile("zeroshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("zeroshard")

ask_no_name_server()
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # the scripts that tests start may ask one


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on several ranks: `ranks(2, function, *args)`. See `tests.ranks`."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]  # keywords have tests/gpu, too
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
