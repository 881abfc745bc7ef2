"""`zeroshard plan`: schedules of a pipeline, as a person compares them."""

from __future__ import annotations

import pytest

from tests.commands import failure, rows
from tests.commands import shown as shown_by
from zeroshard.parallel.pipeline.actions import parse_schedule
from zeroshard.parallel.pipeline.schedules import build_schedule

FOUR_EIGHT = ("--stages", 4, "--microbatches", 8)


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys, *arguments: object) -> str:
    return shown_by(capsys, "plan", *arguments)


def named(*names: str) -> list[str]:
    return [word for name in names for word in ("--schedule", name)]


def test_schedules_are_compared_side_by_side(capsys):
    out = shown(capsys, *named("gpipe", "1f1b", "interleaved", "zb-h1"), *FOUR_EIGHT)
    found = rows(out)
    assert "1f1b   interleaved, 2 chunks   zb-h1" in out
    assert found["makespan"] == ["33", "33", "28.5", "27"]
    shares = [1 - 24 / makespan for makespan in (33, 33, 28.5, 27)]
    assert found["bubble share"] == [f"{share:.1%}" for share in shares]
    # Interleaved: (2 - 1) * 4 + 2 * (3 - rank) forwards ahead, one more, and each is half of a rank.
    assert [found[f"activations, rank {rank}"] for rank in range(4)] == [
        ["8", "4", "5.5", "4"],
        ["8", "3", "4.5", "4"],
        ["8", "2", "3.5", "4"],
        ["8", "1", "2.5", "4"],
    ]
    assert max(map(len, out.splitlines())) <= 100


def test_asynchronous_schedules_show_delays_and_versions(capsys):
    """Narayanan et al. 2019 and 2021: p - 1 - s steps and p - s versions; one step and two versions."""
    found = rows(shown(capsys, *named("1f1b", "pipedream", "2bw", "pb"), "--stages", 4, "--microbatches", 16))
    assert found["makespan"] == ["57"] * 4  # (16 + 4 - 1) * 3: each list fills and drains once
    assert found["steps"] == ["1", "16", "4", "16"]
    assert [found[f"delay in steps, rank {rank}"] for rank in range(4)] == [
        ["0", "3", "1", "3"],
        ["0", "2", "1", "2"],
        ["0", "1", "1", "1"],
        ["0", "0", "0", "0"],
    ]
    assert [found[f"versions of weights, rank {rank}"] for rank in range(4)] == [
        ["1", "4", "2", "1"],
        ["1", "3", "2", "1"],
        ["1", "2", "2", "1"],
        ["1", "1", "2", "1"],
    ]


def test_a_list_is_printed_and_read_back_as_a_schedule_of_the_user(capsys, tmp_path):
    text = shown(capsys, *named("varuna"), *FOUR_EIGHT, "--list")
    assert parse_schedule(text) == build_schedule("varuna", 4, 8)
    file = tmp_path / "own.csv"
    file.write_text(text, encoding="utf-8")
    found = rows(shown(capsys, *named(str(file))))
    assert found["makespan"] == ["39"]
    assert rows(shown(capsys, *named(str(file), "varuna"), *FOUR_EIGHT))["makespan"] == ["39", "39"]


DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--schedule"),
        (
            named("dream"),
            "expected one of gpipe, 1f1b, interleaved, zb-h1, zbv, varuna, pipedream, 2bw, pipemare, pb, "
            "spectrain, lwp, paci, or a file",
        ),
        (named("pipedream"), "--schedule pipedream needs --stages and --microbatches"),
        ((*named("pb"), "--stages", 0, "--microbatches", 8), "--stages: expected at least 1, got 0"),
        ((*named("pb"), *FOUR_EIGHT, "--recompute", 1), "expected synchronous schedules, got pb"),
        ((*named("1f1b"), "--stages", 0, "--microbatches", 8), "expected at least 1 pipeline rank, got 0"),
        ((*named("1f1b"), *FOUR_EIGHT, "--chunks", 2), "1f1b: expected 1 chunk a rank, got 2"),
        (
            (*named("1f1b"), *FOUR_EIGHT, "--forward", "-1"),
            "forward: expected a duration of at least 0, got -1.0",
        ),
        ((*named("1f1b", "zbv"), *FOUR_EIGHT, "--list"), "--list: expected one --schedule, got 2"),
        (
            (*named("1f1b"), "--stages", 10**6, "--microbatches", 10**6),
            "expected at most 262,144 chunks times micro-batches, got 1,000,000,000,000 for 1f1b",
        ),
        ((*named("{file}"), "--stages", 3), "expected --stages 2, as in the lists, got 3"),
        (
            named("{file}"),
            "got a deadlock: pipeline rank 0: 0B0 waits for 1B0; pipeline rank 1: 1F1 waits for 0F1",
        ),
    ],
)
def test_a_plan_that_cannot_be_ends_with_2_and_one_line(capsys, tmp_path, arguments, expected):
    file = tmp_path / "own.csv"
    file.write_text(DEADLOCK, encoding="utf-8")
    code, err = failure(capsys, "plan", *(str(word).replace("{file}", str(file)) for word in arguments))
    assert code == 2
    assert expected in err
