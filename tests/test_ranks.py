from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks as ranks_module
from tests.ranks import RankError, Ranks, on_ranks


def describe(*values: object, **named: object) -> tuple[object, ...]:
    return dist.get_rank(), dist.get_world_size(), values, named


def draw_number_with_threads() -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


def process_id() -> int:
    return os.getpid()


def make_traces() -> None:
    os.environ["TRACE"] = "left"
    torch.set_default_dtype(torch.float64)


def find_traces() -> tuple[str | None, torch.dtype]:
    return os.environ.get("TRACE"), torch.get_default_dtype()


def fail_on(failing: list[int]) -> int:
    if dist.get_rank() in failing:
        print("about to fail")
        raise ValueError(f"bad luck on rank {dist.get_rank()}")
    return dist.get_rank()


def fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 gave up")
    wait_for_all()


def wait_for_all() -> None:
    dist.barrier()


def sleep_for_long() -> None:
    time.sleep(600)


def die_while_others_wait() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_all()


def write_process_id_and_sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    sleep_for_long()


def test_results_come_by_rank_with_arguments_passed_on_and_calls_start_alike(ranks: Ranks) -> None:
    found = ranks(2, describe, 1, key="value")
    assert found == [(rank, 2, (1,), {"key": "value"}) for rank in range(2)]
    drawn = ranks(2, draw_number_with_threads)
    assert drawn == ranks(2, draw_number_with_threads)
    assert drawn[0][1] == 1
    ranks(1, make_traces)
    assert ranks(1, find_traces) == [(None, torch.float32)]


def test_exceptions_are_reported_by_rank_and_processes_stay(ranks: Ranks) -> None:
    processes = ranks(2, process_id)
    with pytest.raises(RankError) as caught:
        ranks(2, fail_on, [1])
    assert caught.value.errors == [None, ("ValueError", "bad luck on rank 1")]
    assert "in fail_on" in str(caught.value)
    assert "about to fail" in str(caught.value)
    with pytest.raises(RankError) as caught:
        ranks(2, fail_on, [0, 1])
    assert caught.value.errors == [("ValueError", f"bad luck on rank {rank}") for rank in range(2)]
    assert ranks(2, process_id) == processes


def test_hang_ends_soon_with_the_stacks_of_the_ranks(ranks: Ranks) -> None:
    ranks(2, describe)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2, sleep_for_long, timeout=0.3)
    assert time.monotonic() - start < 20
    assert [error and error[0] for error in caught.value.errors] == ["TimeoutError", "TimeoutError"]
    assert str(caught.value).count("in sleep_for_long") == 2
    assert ranks(2, fail_on, []) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "error", "failed"),
    [
        (fail_while_others_wait, ("ValueError", "rank 1 gave up"), 1),
        (die_while_others_wait, ("ChildProcessError", "killed by SIGKILL"), 0),
    ],
)
def test_a_rank_that_fails_or_dies_while_others_wait_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, function: Callable[[], None], error: object, failed: int
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE", 1.0)
    with pytest.raises(RankError) as caught:
        ranks(2, function)
    assert caught.value.errors[failed] == error
    waiting = caught.value.errors[1 - failed]
    assert waiting is not None
    assert "in wait_for_all" in str(caught.value)
    assert ranks(2, fail_on, []) == [0, 1]


@on_ranks(2)
def body_that_fails() -> None:
    number = dist.get_rank()
    assert number == 0


@on_ranks(2)
def body_that_returns() -> list[str]:
    return [f"found on rank {dist.get_rank()}"]


def test_a_body_that_fails_shows_its_local_variables_and_what_one_returns_is_wrong(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="number = 1"):
        body_that_fails(ranks)
    with pytest.raises(AssertionError, match="found on rank 1"):
        body_that_returns(ranks)


@pytest.mark.long
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    file = tmp_path / "process_id"
    code = "import sys; from tests.ranks import Ranks; from tests import test_ranks; Ranks()"
    code += f"(1, test_ranks.write_process_id_and_sleep, {str(file)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    try:
        wait_until(file.exists)
        wait_until(lambda: file.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not Path(f"/proc/{file.read_text()}").exists(), timeout=10)


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.1)
