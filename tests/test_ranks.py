from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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


def open_group_from_environment() -> tuple[bool, str, int]:
    was_open = dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    return was_open, os.environ["LOCAL_RANK"], dist.get_world_size()


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


def test_results_come_by_rank_with_arguments_passed_on(ranks: Ranks) -> None:
    assert ranks(2, describe, 1, key="value") == [
        (0, 2, (1,), {"key": "value"}),
        (1, 2, (1,), {"key": "value"}),
    ]


def test_every_call_starts_from_the_same_seed_with_one_thread(ranks: Ranks) -> None:
    assert ranks(2, draw_number_with_threads) == ranks(2, draw_number_with_threads)
    assert ranks(1, draw_number_with_threads)[0][1] == 1


def test_function_can_open_the_process_group_as_under_torchrun(ranks: Ranks) -> None:
    results = ranks(2, open_group_from_environment, process_group=False)
    assert results == [(False, "0", 2), (False, "1", 2)]
    assert ranks(2, open_group_from_environment, process_group=False) == results


def test_environment_and_default_dtype_are_restored(ranks: Ranks) -> None:
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
        ranks(2, sleep_for_long, timeout=1.0)
    assert time.monotonic() - start < 20
    assert [error and error[0] for error in caught.value.errors] == ["TimeoutError", "TimeoutError"]
    assert str(caught.value).count("in sleep_for_long") == 2
    assert len(re.findall(r"^thread \d+ .+: [A-Z] in ", str(caught.value), re.MULTILINE)) >= 2
    assert ranks(2, fail_on, []) == [0, 1]


def test_rank_that_raises_comes_before_the_stacks_of_those_that_wait(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE", 1.0)
    with pytest.raises(RankError) as caught:
        ranks(2, fail_while_others_wait)
    waiting, raised = caught.value.errors
    assert waiting is not None
    assert waiting[0] == "TimeoutError"
    assert raised == ("ValueError", "rank 1 gave up")
    message = str(caught.value)
    assert 0 < message.index("in fail_while_others_wait") < message.index("in wait_for_all")


@pytest.mark.long
def test_process_that_dies_is_named_with_its_signal(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE", 1.0)
    with pytest.raises(RankError) as caught:
        ranks(2, die_while_others_wait)
    assert caught.value.errors[0] == ("ChildProcessError", "killed by SIGKILL")
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


def wait_until(condition: object, timeout: float = 120) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.1)
