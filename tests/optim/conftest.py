"""What tests of optimizers share."""

import pytest

from zeroshard.optim.eightbit import step as steps


@pytest.fixture(params=["numba", "torch"])
def kernel(request, monkeypatch):
    """Steps of 8 bits by numba, and by the torch operations that take its place."""
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(steps, "_has_numba", lambda: False)
