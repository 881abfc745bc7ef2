"""All ranks find the store of the watchdog, which rank 0 holds, on one machine and on several."""

import socket
import warnings

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.lifecycle import open_watchdog


def open_on_hosts(hosts, master, timeout_s):
    """The address of the store, and the warnings; ranks have hosts of these names."""
    axis = Axis(dist.group.WORLD, device=torch.device("cpu"), counter=Counter(), timeout_s=timeout_s)
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
