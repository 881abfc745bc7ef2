"""Waits end with the result, or with an error that names this rank and the collective."""

import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.watch.watchdog import Waits

CPU = torch.device("cpu")


def wait_while_there_is_an_alarm(kind):
    """Rank 0's errors and the seconds until the first: rank 1 stays away, and another thread interrupts."""
    axis = Axis(dist.group.WORLD, device=CPU, counter=Counter(), timeout_s=30.0)
    if axis.rank == 1:
        return None
    threading.Timer(0.5, axis.waits.rank_status.interrupt).start()
    start, errors = time.monotonic(), []
    for label in ("first thing", "second thing"):
        try:
            if kind == "exchange":
                axis.all_gather(torch.zeros(2), torch.zeros(1), tag=0, label=label).wait()
            else:
                axis.any([True], label)()
        except RuntimeError as error:
            errors.append(str(error))
    return errors, time.monotonic() - start


@pytest.mark.parametrize("kind", ["exchange", "agreement"])
def test_an_alarm_ends_a_wait_that_goes_on_and_every_later_one_at_once(ranks, kind):
    errors, seconds = ranks(2, wait_while_there_is_an_alarm, kind)[0]
    assert seconds < 5
    assert errors == [
        f"rank 0 of 2 gave up in the {label}, because a rank has raised an alarm"
        for label in ("first thing", "second thing")
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:546. "
            "This is typically caused by a remote worker crashing.",
            "(Connection closed by peer [::1]:546. ",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:738: Connection "
            "reset by peer",
            "(Read error [127.0.0.1]:738: Connection reset by peer)",
        ),
        (
            "[/a/gloo/transport/tcp/unbound_buffer.cc:85] Timed out waiting 2000ms for recv operation",
            "(Timed out waiting 2000ms for recv operation)",
        ),
        ("[/a/b/pair.h:3] Something else\nwith more", "(Something else with more)"),
    ],
)
def test_errors_of_the_backend_are_told_without_places_in_its_code(theirs, ours):
    error = Waits("rank 0 of 2", CPU, 1.0, Counter()).error("first thing", RuntimeError(theirs))
    assert ours in str(error)
    assert "third_party" not in str(error)


def lose_a_rank():
    """The error of rank 0 as it is printed: rank 1 is gone."""
    axis = Axis(dist.group.WORLD, device=CPU, counter=Counter(), timeout_s=2.0)
    if axis.rank == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        axis.all_gather(torch.zeros(2), torch.zeros(1), tag=0, label="first thing").wait()
    return "".join(traceback.format_exception(caught.value))


def test_the_text_of_the_backend_is_not_printed_beside_ours(ranks):
    text = ranks(2, lose_a_rank)[0]
    assert text.count("RuntimeError") == 1
    assert "gave up in the first thing" in text
    assert "gloo" not in text
