from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import forks, seconds

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Before anything is imported that reads them. The scripts that tests start may ask a name server.
os.environ.update(forks.BEFORE_IMPORTS, RES_OPTIONS=os.environ.get("RES_OPTIONS", "timeout:1 attempts:2"))
gc.disable()  # until all is collected: collections of garbage take a quarter of the imports' time


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs a function on several ranks: `ranks(2, function, *args)`. See `tests.ranks`."""
    from tests.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    """Destroy the process group that a test has opened in this process: the next one may need none."""
    import torch.distributed as dist

    had_one = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_one:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- the selection

SECONDS_OF_LONG = 2
"""Of a long test whose mark says nothing else, about."""
NUM_FAST = pytest.StashKey[dict[str, int]]()
"""The number of fast tests of each test file that is collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run long tests, too")


def pytest_configure(config: pytest.Config) -> None:
    """Tell tests, and the ranks that they start, to go through all stages; take as many examples as usual.

    The process that only hands tests to those of pytest-xdist imports nothing: they wait for it.
    """
    if config.option.all:
        os.environ["ALL_STAGES"] = "1"
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import HealthCheck, settings

    from tests.worker import ask_no_name_server

    # The ranks of a test share few cores, so the time that an example or its draw takes says nothing. Where
    # all tests must pass, examples don't change: `make test` draws others each time.
    settings.register_profile(
        "zeroshard",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=config.option.all or "CI" in os.environ,
        max_examples=100 if config.option.all else 40,
    )
    settings.load_profile("zeroshard")
    torch.set_num_threads(1)  # as in the ranks: two processes run tests, and a thread that waits is busy
    ask_no_name_server()


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; leave out long ones that nobody asked for."""
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():  # keywords have tests/gpu, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if any(_holds_for(item, mark) for mark in item.iter_markers("long_where")):
            item.add_marker(pytest.mark.long)
    config.stash[NUM_FAST] = num_fast = dict.fromkeys((str(item.path) for item in items), 0)
    for item in items:
        num_fast[str(item.path)] += not item.get_closest_marker("long")
    if not (config.option.all or config.option.markexpr):
        left_out = {item for item in items if item.get_closest_marker("long") and not _is_named(item, config)}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    if hasattr(config, "workerinput"):  # the files that take longest come first, so that none ends alone
        taken = Counter(seconds.kept())
        for item in items:
            if mark := item.get_closest_marker("long"):
                taken[_file_of(item)] += mark.kwargs.get("seconds", SECONDS_OF_LONG)
        items.sort(key=lambda item: -taken[_file_of(item)])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave all that has been imported out of each `gc.collect()` and `gc.get_objects()` of a test."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Have workers of pytest-xdist share forks of themselves; not on a GPU, which a test may have asked."""
    if not (worker := getattr(session.config, "workerinput", None)):
        return
    import torch

    if not torch.cuda.is_available():
        number = int(worker["workerid"].removeprefix("gw"))
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            forks.share(worker["testrunuid"], number, worker["workercount"])


def _file_of(item: pytest.Item) -> str:
    """The path under tests/ of a test's file."""
    return item.nodeid.partition("::")[0].removeprefix("tests/")


def _holds_for(item: pytest.Item, mark: pytest.Mark) -> bool:
    """True for a case whose parameters all have one of the values that `long_where` lists for them."""
    case = item.callspec.params  # type: ignore[attr-defined]
    return all(case[name] in values for name, values in mark.kwargs.items())


def _is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """True for a test that the command names, as in `pytest tests/cli/test_cli.py::test_estimate`."""
    name = item.nodeid.partition("::")[2]
    for argument in config.args:
        file, _, asked = argument.partition("::")
        is_same_file = (config.invocation_params.dir / file).resolve() == item.path
        if asked and is_same_file and (name == asked or name.startswith((f"{asked}[", f"{asked}::"))):
            return True
    return False
