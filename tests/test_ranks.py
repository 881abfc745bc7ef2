from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import forks
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


def sleep_for_long() -> None:
    time.sleep(600)


def die_while_others_wait() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


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
def test_a_rank_that_dies_while_others_wait_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE", 1.0)
    with pytest.raises(RankError) as caught:
        ranks(2, die_while_others_wait)
    assert caught.value.errors[0] == ("ChildProcessError", "killed by SIGKILL")
    assert "in die_while_others_wait" in str(caught.value)
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


PARENTS = """
import json, os
from pathlib import Path

def parent():
    return os.getppid()

def test_parents(ranks):
    Path(__file__).with_suffix(".json").write_text(json.dumps(ranks(3, parent)))
"""


@pytest.mark.long  # all workers of `make test` do so
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may be in use by the worker that forks")
def test_workers_of_a_run_share_their_forks_and_leave_nothing(tmp_path: Path) -> None:
    """Each file has ranks of its own, forks of two processes that both workers use."""
    files = [tmp_path / f"test_{name}.py" for name in ("one", "other")]
    for file in files:
        file.write_text(PARENTS)
    options = ["-n", "2", "--dist", "loadfile", "--testrunuid", tmp_path.name, "--rootdir", str(tmp_path)]
    options += ["-p", "tests.conftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    code = f"import sys, pytest; sys.path = {sys.path!r}; sys.exit(pytest.main())"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(forks.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code, *options, str(tmp_path)], env=environment, check=True)
    one, other = (json.loads(file.with_suffix(".json").read_text()) for file in files)
    assert one == other == [one[0], one[1], one[0]]
    assert one[0] != one[1]
    assert not any(map(psutil.pid_exists, one))
    assert not any(forks.path(tmp_path.name, number).exists() for number in range(forks.NUM_FORKERS))
