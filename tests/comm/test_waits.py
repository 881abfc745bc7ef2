"""Waits end with the result or with an error that names this rank; all ranks find the watchdog's store."""

import socket
import threading
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from zeroshard.comm.collectives import Axis
from zeroshard.comm.lifecycle import open_watchdog
from zeroshard.comm.watch.watchdog import Waits

CPU = torch.device("cpu")


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
    error = Waits("rank 0 of 2", CPU, 1.0).error("first thing", RuntimeError(theirs))
    assert ours in str(error)
    assert "third_party" not in str(error)


@pytest.mark.parametrize("kind", ["exchange", "agreement"])
@on_ranks(2)
def test_an_alarm_ends_a_wait_that_goes_on_and_every_later_one_at_once(kind):
    """Rank 1 stays away, and another thread interrupts."""
    axis = Axis(dist.group.WORLD, device=CPU, timeout_s=30.0)
    if axis.rank == 1:
        return

    def wait(label):
        if kind == "exchange":
            axis.all_gather(torch.zeros(2), torch.zeros(1), tag=0, label=label).wait()
        else:
            axis.any([True], label)()

    threading.Timer(0.2, axis.waits.rank_status.interrupt).start()
    start = time.monotonic()
    for label in ("first thing", "second thing"):
        text = f"^rank 0 of 2 gave up in the {label}, because a rank has raised an alarm$"
        with pytest.raises(RuntimeError, match=text):
            wait(label)
    assert time.monotonic() - start < 20  # and not the 30 s of the axis


@on_ranks(2)
def test_the_text_of_the_backend_is_not_printed_beside_ours():
    axis = Axis(dist.group.WORLD, device=CPU, timeout_s=0.2)
    if axis.rank == 1:
        return
    with pytest.raises(RuntimeError) as caught:
        axis.all_gather(torch.zeros(2), torch.zeros(1), tag=0, label="first thing").wait()
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("RuntimeError") == 1
    assert "gave up in the first thing" in text
    assert "gloo" not in text


def open_on_hosts(hosts, master, timeout_s):
    """The address of the store, and the warnings; ranks have hosts of these names."""
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), timeout_s=timeout_s)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(socket, "gethostname", lambda: hosts[axis.rank])
        patch.delenv("MASTER_ADDR", raising=False)
        if master:
            patch.setenv("MASTER_ADDR", master)
        opened = open_watchdog(axis, None)
    return None if opened is None else opened._store.host, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("hosts", "master", "address"),
    [
        (("one", "one"), "", "127.0.0.1"),
        (("one", "one"), "127.0.0.2", "127.0.0.2"),
        (("127.0.0.3", "other"), "", "127.0.0.3"),
        (("one", "other"), "127.0.0.2", "127.0.0.2"),
    ],
)
def test_ranks_find_the_store_at_the_master_or_else_at_the_host_of_rank_0(ranks, hosts, master, address):
    (_, said), (found, _) = ranks(2, open_on_hosts, hosts, master, 20.0)
    assert found == address
    assert not said


@pytest.mark.long
def test_where_rank_0_is_out_of_reach_all_ranks_go_on_without_a_watchdog(ranks):
    """The others wait for the one that tries no longer than they wait in any collective."""
    for found, said in ranks(2, open_on_hosts, ["one", "other"], "240.0.0.1", 20.0):
        assert found is None
        assert said[0].startswith("zeroshard runs without its watchdog: rank 1 cannot reach rank 0 at ")
