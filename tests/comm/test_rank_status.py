"""Where a rank is, noted and put into words; no process group."""

import time

import pytest

from zeroshard.comm.watch.status import EXIT, FAILURE, RankStatus, Status, Wait, describe, find_lost, report

GATHER = "all-gather of unit 'layers.3'"
REDUCE = "reduce-scatter of the gradients of unit 'layers.3'"
COMPUTES = Status("is in the forward of unit 'layers.7'", 2.0)
EXITED = Status("has exited", 0.0, end=EXIT)
FAILED = Status("has exited with LookupError: a row is missing", 0.0, end=FAILURE)


NOW = 1000.0


@pytest.fixture(autouse=True)
def clock_stands(monkeypatch):
    """On a busy machine a test may stop for longer than the times that it compares are apart."""
    monkeypatch.setattr(time, "monotonic", lambda: NOW)


def heard(status, silent_s):
    """The status, whose heartbeat came so many seconds ago."""
    return status._replace(heard_at=NOW - silent_s)


def test_a_report_tells_where_each_rank_is():
    waits = Status(f"waits in the {GATHER}", 12.14)
    sightings = {0: heard(COMPUTES, 0.4), 1: heard(waits, 0.0), 2: heard(EXITED, 99.0), 3: None}
    assert report(sightings, silence_s=3.0) == (
        "rank 0 is in the forward of unit 'layers.7' since 2.0 s; "
        "rank 1 waits in the all-gather of unit 'layers.3' since 12.1 s; "
        "rank 2 has exited; nothing is known of rank 3. If rank 2 is not on its way there, it has had fewer "
        "batches (its data loader is shorter, or it left one out after an exception that it caught), has run "
        "other modules (put these into one unit, see units=), or has left out a call: every forward (in "
        "evaluation too), save_checkpoint, load_checkpoint, save_pretrained and full_state_dict exchange "
        "between ranks: call this on all ranks, equally often"
    )


@pytest.mark.parametrize(
    ("status", "silent_s", "words"),
    [
        (COMPUTES, 2.9, "rank 5 is in the forward of unit 'layers.7' since 2.0 s"),
        (
            COMPUTES,
            3.0,
            "rank 5 has exited or is stopped "
            "(last heard of 3.0 s ago: is in the forward of unit 'layers.7' since 2.0 s)",
        ),
        (FAILED, 99.0, "rank 5 has exited with LookupError: a row is missing"),
    ],
)
def test_a_rank_that_is_silent_is_taken_for_lost(status, silent_s, words):
    assert describe(5, heard(status, silent_s), silence_s=3.0) == words


@pytest.mark.parametrize(
    ("status", "silent_s", "is_lost"),
    [
        (COMPUTES, 9.9, False),
        (COMPUTES, 10.1, True),  # killed
        (FAILED, 9.9, False),
        (FAILED, 10.1, True),
        (EXITED, 1e9, False),  # it was done; the others may go on alone
    ],
)
def test_a_rank_is_lost_when_it_was_killed_or_failed_longer_ago_than_the_limit(status, silent_s, is_lost):
    sightings = {0: None, 4: heard(status, silent_s), 5: heard(COMPUTES, 0.0)}
    assert (find_lost(sightings, limit_s=10.0) == "rank 4 is lost since 10.1 s") == is_lost


def test_a_rank_is_in_what_it_entered_last_and_in_a_collective_while_it_waits():
    status = RankStatus()
    assert status.message().text == "is outside of forward, backward and optimizer step"
    status.enter("the backward of ", "unit 'layers.3'")
    assert status.message().text == "is in the backward of unit 'layers.3'"
    status.wait = Wait(GATHER, NOW - 7.0, 600.0)
    assert status.message().text == f"waits in the {GATHER}"
    assert status.message().seconds == 7.0
    status.wait = None
    assert status.message().text == "is in the backward of unit 'layers.3'"
    status.enter(status.OUTSIDE)
    assert status.message().text == "is outside of forward, backward and optimizer step"


def test_a_host_that_waits_longer_than_the_limit_and_the_margin_is_overdue():
    status = RankStatus()
    status.wait = Wait(GATHER, NOW - 10.5, 10.0)
    assert status.find_overdue(margin_s=1.0) is None
    assert status.find_overdue(margin_s=0.2) == GATHER


def test_a_collective_of_one_stream_is_noticed_though_later_ones_of_another_are_over():
    status = RankStatus()
    status.issue(Wait(REDUCE, NOW - 10.5, 10.0, lambda: False))
    for _ in range(100):
        status.issue(Wait(GATHER, NOW, 10.0, lambda: True))
    assert status.find_overdue(0.0) == REDUCE


@pytest.mark.parametrize(
    ("other", "is_advised"),
    [
        (Status("is outside of forward, backward and optimizer step", 5.0), True),
        (EXITED, True),
        (COMPUTES, False),
        (FAILED, False),
        (Status(f"waits in the {REDUCE}", 3.0), False),
    ],
)
def test_a_rank_that_waits_for_one_in_no_call_tells_what_all_ranks_must_call(other, is_advised):
    sightings = {0: heard(Status(f"waits in the {GATHER}", 12.0), 0.0), 3: heard(other, 0.5)}
    text = report(sightings, silence_s=3.0)
    assert ("If rank 3 is not on its way there, it has had fewer batches" in text) == is_advised
    is_elsewhere = other.text.startswith("waits")
    advice = "If these are not parts of the same call, one of the ranks has had fewer batches"
    assert (advice in text) == is_elsewhere
    assert ("call this on all ranks" in text) == (is_advised or is_elsewhere)
    assert "on all ranks" not in report({3: sightings[3]}, silence_s=3.0)
    computing = {0: heard(COMPUTES, 0.0), 3: sightings[3]}  # as where the connection was closed meanwhile
    assert ("it has had fewer batches" in report(computing, silence_s=3.0)) == is_advised
    together = dict.fromkeys((0, 3), sightings[0])
    assert "on all ranks" not in report(together, silence_s=3.0)
